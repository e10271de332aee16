# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, checksums, licence, settings and the ``.env`` file."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from vllm_h3_plugin.checkpoint.checksums import Verdicts
from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.preflight.check import Check, Unknown, failed, passed, warned
from vllm_h3_plugin.preflight.dotenv import EnvFile
from vllm_h3_plugin.settings import PREFIX, Settings

LICENCE = (
    "the community licence of the MiniMax-H3 weights. It excludes the United States, the European Union, the United "
    "Kingdom and the Republic of Korea: do not run the model there. It restricts showing its outputs there too"
)

_LISTED = 6
_OURS = (PREFIX, "VLLM_H3_")


def checkpoint(found: Inventory | Unknown, path: Path | None) -> Check:
    """Every file of the checkpoint, by its headers."""
    name = "checkpoint"
    if path is None:
        return failed(
            name,
            "none was named",
            "Give the folder: VLLM_H3_CHECKPOINT=/models/MiniMax-H3 in .env, or --checkpoint /models/MiniMax-H3/FL2VA.",
        )
    if isinstance(found, Unknown):
        return failed(name, f"{path}: {found.reason}", "Make the folder readable for this user.")
    if not found.faults:
        return passed(name, f"{path}: whole, {found.nbytes / 2**30:.1f} GiB, by its headers")
    first, others = found.faults[0], len(found.faults) - 1
    more = f" ({others} more: vllm-h3 inspect {path})" if others else ""
    return failed(name, f"{first.what}: {first.why}{more}", first.fix)


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
            near = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), "")
            remedies.append(f"Did you mean {near}?" if near else f"Remove {key}.")
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
