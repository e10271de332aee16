# SPDX-License-Identifier: Apache-2.0
"""Is this clip what was asked for? Everything that can be told from the file alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_h3_plugin.errors import ClipError
from vllm_h3_plugin.video import checks, decode
from vllm_h3_plugin.video.checksum import check_checksum
from vllm_h3_plugin.video.probe import probe
from vllm_h3_plugin.video.tools import find_ffmpeg
from vllm_h3_plugin.video.verdict import Check, Expectation, Verdict

Progress = Callable[[str, int, int], None]
"""Called with (decoder's name, frames decoded so far, frames that the container lists or 0)."""


def verify(
    path: Path,
    expectation: Expectation | None = None,
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Check a clip: container, streams, a full decode by two decoders, counts, lengths, picture, sound, checksum.

    A bad clip is a verdict, not an exception; ``Verdict.raise_if_failed`` turns it into one.

    Args:
        path: the file, under any name.
        expectation: what was asked; unset, only what holds for every H3 clip is checked.
        strict: warnings (silence, black or frozen picture, odd container) are failures.
        progress: called while the clip is decoded.

    Raises:
        ToolMissingError: no ffmpeg, or one that does not start. A file that is no clip is reported even without it.
        SettingsError: an ``H3_*`` variable is wrong.
    """
    path = Path(path)
    expectation = Expectation() if expectation is None else expectation
    try:
        facts = probe(path)
    except ClipError as exc:
        failed = Check(exc.details.get("check", "file"), "fail", exc.what, "an MP4 clip", exc.why, exc.fix)
        return Verdict(path, (failed,), fault=exc)

    program = find_ffmpeg()

    def count(decoder: str) -> decode.Progress | None:
        return None if progress is None else lambda done: progress(decoder, done, facts.frames)

    ours = decode.decode_with_pyav(facts, count("PyAV"))
    theirs = decode.decode_with_ffmpeg(facts, program, count("ffmpeg"))

    found = [
        checks.container(facts),
        checks.video_stream(facts),
        checks.audio_stream(facts, expectation),
        checks.decoded("decode by PyAV", ours),
        checks.decoded("decode by ffmpeg", theirs),
    ]
    # Counts and pictures of a decode that broke off say nothing about the clip.
    if not ours.errors and not theirs.errors and ours.frames and theirs.frames:
        found.append(checks.decoders_agree(facts, ours, theirs))
        found.append(checks.frame_count(facts, ours, expectation))
        found.append(checks.frame_size(ours, expectation))
        found.append(checks.frame_rate(facts, ours, expectation))
        found.append(checks.duration(facts, ours, expectation))
        if ours.sound is not None:
            found.append(checks.audio_length(facts, ours, expectation))
            found.append(checks.silence(ours.sound, expectation))
        if ours.picture is not None:
            found.append(checks.black_picture(ours.picture))
            found.append(checks.frozen_picture(ours.picture))
    found.append(check_checksum(path, facts.sha256))
    if strict:
        found = [check.strictly() for check in found]
    return Verdict(path, tuple(found), facts, ours.picture, ours.sound)
