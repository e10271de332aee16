# SPDX-License-Identifier: Apache-2.0
"""References as they were sent into media as the host takes them; what cannot be taken becomes a fault each."""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.serving.references.addresses import AllowedHost
from vllm_h3_plugin.serving.references.fetch import Fetcher
from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.media import Loaded, Media
from vllm_h3_plugin.serving.references.picture import load_picture
from vllm_h3_plugin.serving.references.recording import probe_film, probe_sound
from vllm_h3_plugin.serving.references.sniff import ALLOWED, HEAD_BYTES, Sniffed, sniff
from vllm_h3_plugin.serving.references.unfit import Unfit
from vllm_h3_plugin.serving.rules.accepted import ReferenceFacts
from vllm_h3_plugin.serving.rules.ask import Reference
from vllm_h3_plugin.serving.rules.conditions import MAX_REFERENCES
from vllm_h3_plugin.serving.rules.fault import Fault
from vllm_h3_plugin.settings import Settings

PREFIX = "h3-reference-"
"""Of temporary files' names, so that what a killed server left behind can be found."""

_DATA = re.compile(r"^data:[^,;]*(?:;[^,;]*)*,", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ReferencePolicy:
    """How references are taken.

    Attributes:
        limits: what H3 takes.
        fetcher: what may be fetched by URL.
        folder: of temporary files; None: the system's.
    """

    limits: ReferenceLimits = field(default_factory=ReferenceLimits)
    fetcher: Fetcher = field(default_factory=Fetcher)
    folder: Path | None = None

    @classmethod
    def of(cls, settings: Settings, folder: Path | None = None) -> ReferencePolicy:
        """The policy of a server with these settings.

        Raises:
            SettingsError: an entry of ``H3_REFERENCE_HOSTS`` is no host.
        """
        try:
            allowed = tuple(AllowedHost.parse(entry) for entry in settings.reference_hosts)
        except ValueError as exc:
            raise SettingsError(
                f"H3_REFERENCE_HOSTS={','.join(settings.reference_hosts)}",
                why=str(exc),
                fix="Give host names, comma-separated, such as cdn.example.com,*.example.org.",
            ) from exc
        return cls(fetcher=Fetcher(allowed, settings.reference_timeout_s), folder=folder)


def load(references: Sequence[Reference], policy: ReferencePolicy) -> tuple[Media, list[Fault]]:
    """Fetch, tell apart, check and decode every reference.

    Returns:
        What could be loaded, and a fault for each that could not. With a fault, the caller closes the media.
    """
    if len(references) > MAX_REFERENCES:
        first = references[MAX_REFERENCES]
        why = f"{len(references)} references were sent"
        return Media(), [Fault(first.field, None, why, f"up to {MAX_REFERENCES}", code="invalid_reference")]
    loaded: list[Loaded] = []
    faults: list[Fault] = []
    for reference in references:
        try:
            loaded.append(_load(reference, policy))
        except Unfit as exc:
            value = reference.filename if reference.url is None else _named(reference.url)
            faults.append(Fault(reference.field, value, exc.why, exc.allowed, code="invalid_reference"))
        except BaseException:
            Media(tuple(loaded)).close()
            raise
    return Media(tuple(loaded)), faults


def _load(reference: Reference, policy: ReferencePolicy) -> Loaded:
    with _spooled(reference, policy) as (path, nbytes):
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        try:
            found = sniff(head)
        except Unfit as exc:
            raise Unfit(exc.why, exc.allowed or ALLOWED[reference.kind]) from exc
        if reference.kind is not None and found.kind != reference.kind:
            raise Unfit(f"it is {_article(found)}", ALLOWED[reference.kind])
        most = policy.limits.nbytes[found.kind]
        if nbytes > most:
            raise Unfit(f"it has {nbytes / (1 << 20):.1f} MiB", f"up to {most >> 20} MiB")
        if found.kind == "image":
            image, notes = load_picture(path, found.format, policy.limits)
            facts = ReferenceFacts(reference.field, "image", nbytes, found.format, *image.size, notes=notes)
            return Loaded(facts, image=image)
        probe = probe_film if found.kind == "video" else probe_sound
        facts = probe(path, found.format, reference.field, policy.limits)
        # The host tells formats by suffix. Under its new name the file outlives this function.
        kept = path.with_name(f"{path.name}.{found.format}")
        path.rename(kept)
        return Loaded(facts, path=kept)


@contextmanager
def _spooled(reference: Reference, policy: ReferencePolicy) -> Iterator[tuple[Path, int]]:
    """The reference's bytes in a temporary file, which is removed unless it was renamed."""
    most = policy.limits.nbytes[reference.kind] if reference.kind is not None else policy.limits.most_bytes
    handle, name = tempfile.mkstemp(prefix=PREFIX, dir=policy.folder)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if reference.file is not None:
                nbytes = _copy(reference.file, file, most)
            elif (reference.url or "").lstrip()[:5].lower() == "data:":
                nbytes = file.write(_data(str(reference.url).strip(), most))
            else:
                nbytes = policy.fetcher.fetch(str(reference.url).strip(), file, most)
        yield path, nbytes
    finally:
        path.unlink(missing_ok=True)


def _copy(source: BinaryIO, file: BinaryIO, most: int) -> int:
    source.seek(0, os.SEEK_END)
    nbytes = source.tell()
    if nbytes > most:
        raise Unfit(f"it has {nbytes / (1 << 20):.1f} MiB", f"up to {most >> 20} MiB")
    source.seek(0)
    shutil.copyfileobj(source, file, _CHUNK_BYTES)
    return nbytes


def _data(url: str, most: int) -> bytes:
    """Bytes of a ``data:`` URI (RFC 2397)."""
    head = _DATA.match(url)
    if head is None:
        raise Unfit("it is no valid data: URI", "data:image/png;base64,… for example")
    # At most three characters stand for one byte.
    if (len(url) - head.end()) > most * 3:
        raise Unfit(f"it is larger than {most >> 20} MiB", f"up to {most >> 20} MiB")
    body = url[head.end() :]
    if not head[0][:-1].lower().endswith(";base64"):
        data = unquote_to_bytes(body)
    else:
        try:
            data = base64.b64decode("".join(unquote_to_bytes(body).decode("ascii").split()), validate=True)
        except (binascii.Error, ValueError) as exc:
            raise Unfit("its base64 is not valid; it may have been cut") from exc
    if len(data) > most:
        raise Unfit(f"it is larger than {most >> 20} MiB", f"up to {most >> 20} MiB")
    return data


def _named(url: str) -> str:
    """A URL as a message may repeat it: of a ``data:`` URI, its type; of others, no query, which may be a secret."""
    if url.lstrip()[:5].lower() == "data:":
        return url.partition(",")[0][:80] + ",…"
    return url.partition("?")[0]


def _article(found: Sniffed) -> str:
    name = {"image": "picture", "video": "film", "audio": "sound"}[found.kind]
    return f"{'an' if found.format.startswith('mp') else 'a'} {found.format.upper()} {name}"
