# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, checksums, licence, settings and the ``.env`` file."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from vllm_h3_plugin.checkpoint.checksums import Verdicts
from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.preflight.check import Check, Unknown, failed, passed, warned
from vllm_h3_plugin.preflight.dotenv import EnvFile
from vllm_h3_plugin.settings import PREFIX, Settings, known_variables

LICENCE = (
    "the community licence of the MiniMax-H3 weights. It excludes the United States, the European Union, the United "
    "Kingdom and the Republic of Korea: do not run the model there. It restricts showing its outputs there too"
)

_LISTED = 6
_OURS = (PREFIX, "VLLM_H3_", "VLLM_API_KEY")
_PARTITIONS = ("FL2VA", "Ref2VA")
_INSTEAD = {
    "H3_API_KEY_FILE": "Use VLLM_H3_API_KEY_FILE: a server in a container gets its key as a secret file.",
    "VLLM_API_KEY": "Use VLLM_H3_API_KEY_FILE: a server in a container gets its key as a secret file.",
    "H3_CACHE_DIR": "Remove it: in a container the cache is a volume.",
    "H3_RUN_DIR": "Remove it: the server makes its own.",
    "H3_FFMPEG": "Remove it: the image has its own.",
    "H3_REFERENCE": "Remove it, and choose VLLM_H3_PROFILE=reference if you mean it.",
}
"""What to do about settings that no compose file hands on."""


def checkpoint(found: Inventory | Unknown, path: Path | None, chosen: str | None = None) -> Check:
    """Every file of the checkpoint, by its headers.

    Args:
        chosen: why both partitions of a root are served, or one.
    """
    name = "checkpoint"
    if path is None:
        return failed(
            name,
            "none was named",
            "Give the folder: --checkpoint /models/MiniMax-H3/FL2VA; where compose starts the server also "
            "VLLM_H3_CHECKPOINT=/models/MiniMax-H3 in .env.",
        )
    if isinstance(found, Unknown):
        return failed(name, f"{path}: {found.reason}", "Make the folder readable for this user.")
    if not found.faults:
        return passed(
            name, f"{path}: whole, {found.nbytes / 2**30:.1f} GiB, by its headers{f'. {chosen}' if chosen else ''}"
        )
    first, others = found.faults[0], len(found.faults) - 1
    more = f" ({others} more: vllm-h3 inspect {path})" if others else ""
    if path.name in _PARTITIONS and path.parent.name in _PARTITIONS:
        above = path.parent.parent
        return failed(name, f"{first.what}: {first.why}", f"VLLM_H3_CHECKPOINT is the folder above: {above}.")
    return failed(name, f"{first.what}: {first.why}{more}", first.fix)


def mounted_checkpoint(root: Path, leading_out: Sequence[Path], unreadable: Sequence[Path], user: int) -> Check:
    """The checkpoint as a container will see it: one folder, mounted, read by a user of its own.

    Args:
        root: the folder that is mounted.
        leading_out: links below the partition whose files lie elsewhere, as in a download cache.
        unreadable: files and folders that ``user`` may not read.
    """
    name = "checkpoint in the container"
    if leading_out:
        return failed(
            name,
            f"{len(leading_out)} links lead out of {root}, where no container follows; the first is {leading_out[0]}",
            f"Put the files themselves there: cp -rL {shlex.quote(str(root))} /another/place, and name that place.",
        )
    if unreadable:
        return failed(
            name,
            f"user id {user} of the container may not read {unreadable[0]} ({len(unreadable)} in all)",
            f"Let others read it: chmod -R o+rX {shlex.quote(str(root))}",
        )
    return passed(name, f"{root}: nothing leads out of it, and user id {user} may read it")


def checksums(found: Verdicts | H3Error) -> Check:
    """Every shard against its SHA-256."""
    name = "checksums"
    if isinstance(found, H3Error):
        return _from_error(name, found)
    if not found.bad:
        return passed(name, f"{len(found.good)} files are as listed")
    shown = [f"{file}: {verdict}" for file, verdict in found.bad.items()][:_LISTED]
    return failed(
        name,
        f"{len(found.bad)} of {found.count} files are not as listed: {'; '.join(shown)}",
        "Download these files again and compare once more.",
    )


def licence(settings: Settings) -> Check:
    """Whether the operator has accepted the weights' licence."""
    name = "licence"
    if settings.accept_license:
        return passed(name, f"accepted (H3_ACCEPT_LICENSE): {LICENCE}")
    return failed(
        name,
        f"not accepted yet: {LICENCE}",
        "Read it where you download the weights. If you accept it and it lets you: H3_ACCEPT_LICENSE=yes in .env or "
        "in the environment.",
    )


def settings(found: Settings | H3Error) -> Check:
    """The ``H3_*`` variables, those of ``.env`` included."""
    name = "settings"
    if isinstance(found, H3Error):
        return _from_error(name, found)
    return passed(name, "every H3_* variable is known and has a value that it can take")


def recipe(found: object) -> Check:
    """Whether the recipe can be read and fits the checkpoint.

    Args:
        found: a ``Need``, or the error in its place.
    """
    name = "recipe"
    if isinstance(found, H3Error):
        return _from_error(name, found)
    return passed(name, f"{getattr(found, 'recipe', '')} gives every layer a precision")


def env_file(found: EnvFile | Unknown | None, path: Path, known: Collection[str]) -> Check:
    """The ``.env`` file: what readers would take differently, by line.

    Args:
        found: None where there is no file and none was asked for.
        known: names that settings and compose files read.
    """
    name = ".env"
    if found is None:
        return passed(name, f"none at {path}; the environment alone counts")
    if isinstance(found, Unknown):
        return failed(name, found.reason, "Correct --env-file, or: cp .env.example .env")
    fatal = [oddity for oddity in found.oddities if oddity.fatal]
    unread = [key for key in found.values if key.startswith(_OURS) and key not in known]
    if fatal or unread:
        oddities = sorted(found.oddities, key=lambda oddity: not oddity.fatal)
        texts = [str(oddity) for oddity in fatal]
        remedies = [oddity.remedy for oddity in oddities]
        for key in unread:
            texts.append(f"line {found.lines[key]}: nothing reads {key}")
            near = next(iter(difflib.get_close_matches(key, {*known, *known_variables()}, n=1, cutoff=0.6)), "")
            remedies.append(_INSTEAD.get(key) or (f"Did you mean {near}?" if near else f"Remove {key}."))
        texts += [str(oddity) for oddity in oddities if not oddity.fatal]
        return failed(name, f"{path}: {_some(texts)}", _joined(remedies))
    if found.oddities:
        return warned(
            name,
            f"{path}: {_some([str(oddity) for oddity in found.oddities])}",
            _joined([oddity.remedy for oddity in found.oddities]),
        )
    quotes = f"; the quotes around {', '.join(found.quoted)} are not part of the value" if found.quoted else ""
    return passed(name, f"{path}: {len(found.values)} variables, nothing in it is misread{quotes}")


def _joined(remedies: list[str]) -> str:
    """Each remedy once. They end in a full stop, or are commands, which must not."""
    return "; ".join(dict.fromkeys(remedy.rstrip(".") for remedy in remedies))


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more


def _from_error(name: str, error: H3Error) -> Check:
    detail = f"{error.what}: {error.why}" if error.why else error.what
    return failed(name, detail, error.fix or "See the message.")
