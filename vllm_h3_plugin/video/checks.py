# SPDX-License-Identifier: Apache-2.0
"""The single checks: each takes what was seen and returns one :class:`Check`; none of them reads a file."""

from __future__ import annotations

from vllm_h3_plugin.video import geometry
from vllm_h3_plugin.video.decode import HASHED_FORMATS, DecodeReport
from vllm_h3_plugin.video.measure import SILENCE_DBFS, PictureFacts, SoundFacts
from vllm_h3_plugin.video.probe import ClipFacts
from vllm_h3_plugin.video.verdict import Check, Expectation

PADDING_SAMPLES = 2048
"""Samples per channel by which two AAC decoders may differ: one frame of 1024 of priming at the start and one of
padding at the end, which FFmpeg versions and the container's edit list trim or hand out."""

AUDIO_SLACK_SECONDS = PADDING_SAMPLES / geometry.AUDIO_RATE + 1 / (2 * geometry.AUDIO_LATENT_RATE)
"""By how much sound and picture may differ in length: the padding above, and rounding to the audio latent grid."""

MOSTLY = 0.5
"""Fraction of a clip that must be black or still before it is reported: a fade or a held shot is no fault."""


def container(facts: ClipFacts) -> Check:
    """MP4, with nothing behind its last box."""
    seen = f"MP4 ({' '.join(facts.boxes)}), {facts.size} bytes"
    if facts.trailing_bytes:
        return Check(
            "container",
            "warn",
            f"{seen}, of which {facts.trailing_bytes} at the end belong to no box",
            "MP4",
            why="two files may have been written into one, or a download resumed at the wrong place",
            fix="Compare the file's size and checksum with the server's.",
        )
    return Check("container", "ok", seen, "MP4")


def video_stream(facts: ClipFacts) -> Check:
    """H.264; another codec decodes here, but not everywhere."""
    seen = f"{facts.video_codec} {facts.width}x{facts.height} {facts.pixel_format}"
    if facts.video_codec != "h264":
        return Check("video stream", "warn", seen, "h264", why="the server encodes H.264", fix="Check who encoded it.")
    return Check("video stream", "ok", seen, "h264")


def audio_stream(facts: ClipFacts, expectation: Expectation) -> Check:
    """AAC, 32 kHz, stereo; or none if none is required."""
    wanted = f"{geometry.AUDIO_CODEC} {geometry.AUDIO_RATE} Hz, {geometry.AUDIO_CHANNELS} channels"
    if facts.audio_codec is None:
        if not expectation.audio_required:
            return Check("audio stream", "ok", "none", "any or none")
        return Check(
            "audio stream",
            "fail",
            "none",
            wanted,
            why="H3 makes sound with every clip; it was lost when the file was written",
            fix="Make the clip again; pass --allow-silent for a clip that is meant to have no sound.",
        )
    seen = f"{facts.audio_codec} {facts.sample_rate} Hz, {facts.channels} channels"
    if (facts.audio_codec, facts.sample_rate, facts.channels) != (
        geometry.AUDIO_CODEC,
        geometry.AUDIO_RATE,
        geometry.AUDIO_CHANNELS,
    ):
        return Check(
            "audio stream",
            "fail",
            seen,
            wanted,
            why="a wrong rate changes pitch and length; another format shows that the clip was encoded again",
            fix="Verify the file as the server sent it.",
        )
    return Check("audio stream", "ok", seen, wanted)


def decoded(name: str, report: DecodeReport) -> Check:
    """A whole decode without an error."""
    seen = f"{report.frames} frames, {report.samples} samples"
    if report.errors:
        return Check(
            name,
            "fail",
            f"{seen}; {report.errors[0]}",
            "no error",
            why=f"{report.decoder} cannot decode all of it: the file was damaged after, or while, it was written",
            fix="Download it again and compare checksums; if they agree, make the clip again.",
        )
    if report.frames == 0:
        return Check(
            name,
            "fail",
            seen,
            "at least one frame",
            why="the video stream is empty",
            fix="Check the server's log for the encoder, then make the clip again.",
        )
    return Check(name, "ok", f"{seen}, {report.decoder}", "no error")


def decoders_agree(facts: ClipFacts, first: DecodeReport, second: DecodeReport) -> Check:
    """Two decoders saw the same frames, sizes and pictures, and as many samples within ``PADDING_SAMPLES``."""
    differences = []
    if first.frames != second.frames:
        differences.append(f"{first.frames} and {second.frames} frames")
    if first.sizes != second.sizes:
        differences.append(f"sizes {_sizes(first)} and {_sizes(second)}")
    if abs(first.samples - second.samples) > PADDING_SAMPLES:
        differences.append(f"{first.samples} and {second.samples} samples")
    if first.frames == second.frames and first.digests != second.digests:
        pairs = enumerate(zip(first.digests, second.digests, strict=False))
        differences.append(f"picture {next((n for n, (a, b) in pairs if a != b), 0)} differs")
    wanted = f"equal frames, sizes and pictures; samples within {PADDING_SAMPLES}"
    if differences:
        return Check(
            "decoders agree",
            "fail",
            "; ".join(differences),
            wanted,
            why=f"{first.decoder} and {second.decoder} read different clips from one file; so will players",
            fix="Make the clip again; if it stays so, compare with another ffmpeg (H3_FFMPEG).",
        )
    if facts.pixel_format not in HASHED_FORMATS:
        return Check(
            "decoders agree",
            "warn",
            f"in counts; pictures not compared: {facts.pixel_format}",
            wanted,
            why="only 8-bit planar pixel formats are compared bit for bit",
            fix="The server writes yuv420p: check who encoded it.",
        )
    return Check("decoders agree", "ok", f"{first.frames} pictures bit for bit", wanted)


def frame_count(facts: ClipFacts, report: DecodeReport, expectation: Expectation) -> Check:
    """As many frames as H3 makes for what was asked, and as many as the container's index lists."""
    seen, wanted = report.frames, expectation.wanted_frames
    if facts.frames and facts.frames != seen:
        return Check(
            "frame count",
            "fail",
            f"{seen} decoded",
            f"{facts.frames}, as the index lists",
            why="frames are missing from, or superfluous in, the stream",
            fix="Download it again and compare checksums; if they agree, make the clip again.",
        )
    if wanted is not None:
        asked = f"{expectation.frames} frames" if expectation.frames is not None else f"{expectation.seconds:g} s"
        text = f"{wanted} ({asked} asked)"
        if seen == wanted:
            return Check("frame count", "ok", str(seen), text)
        return Check(
            "frame count",
            "fail",
            str(seen),
            text,
            why="H3 makes 17n+5 frames, the next such number for what was asked",
            fix="Check which request made this clip; if it was this one, the clip is cut or from another model.",
        )
    if geometry.snap_frames(max(seen, 1)) != seen:
        return Check(
            "frame count",
            "warn",
            str(seen),
            f"17n+5, such as {geometry.snap_frames(max(seen, 1))}",
            why="H3 makes 17n+5 frames: this clip was cut, or is from another model",
            fix="Give --frames or --seconds to check against what was asked.",
        )
    return Check("frame count", "ok", str(seen), "17n+5")


def frame_size(report: DecodeReport, expectation: Expectation) -> Check:
    """One size throughout, and the one that H3 makes for what was asked."""
    seen, wanted = _sizes(report), expectation.wanted_size
    text = "one size" if wanted is None else f"{wanted[0]}x{wanted[1]}"
    if wanted is not None and wanted != (expectation.width, expectation.height):
        text += f" ({expectation.width}x{expectation.height} asked, floored to multiples of {geometry.SIZE_MULTIPLE})"
    if len(report.sizes) != 1 or (wanted is not None and report.sizes[0] != wanted):
        return Check(
            "frame size",
            "fail",
            seen,
            text,
            why="the picture was scaled, cropped, or made for another request",
            fix="Check the request's size field and which request made this clip.",
        )
    return Check("frame size", "ok", seen, text)


def frame_rate(facts: ClipFacts, report: DecodeReport, expectation: Expectation) -> Check:
    """The rate in the container, and every step between two frames, to a thousandth."""
    wanted = f"{expectation.fps}, constant"
    seen = f"{float(facts.fps):g}"
    fair = abs(facts.fps - expectation.fps) <= expectation.fps / 1000
    if report.steps is not None:
        low, high = report.steps
        if high - low > 1 / (1000 * expectation.fps):
            seen += f", not constant (steps of {float(low) * 1000:.1f} to {float(high) * 1000:.1f} ms)"
            fair = False
    if fair:
        return Check("frame rate", "ok", seen, wanted)
    return Check(
        "frame rate",
        "fail",
        seen,
        wanted,
        why="H3 makes 24 frames a second; at another rate picture and sound run apart",
        fix="Encode with the rate of the request; H3 knows no other than 24.",
    )


def duration(facts: ClipFacts, report: DecodeReport, expectation: Expectation) -> Check:
    """The container's duration of the video is that of its frames, to one frame."""
    wanted = report.frames / float(expectation.fps)
    seen = f"{facts.duration:.3f} s"
    if abs(facts.duration - wanted) > 1.001 / float(expectation.fps):
        return Check(
            "duration",
            "fail",
            seen,
            f"{wanted:.3f} s",
            why=f"{report.frames} frames at {expectation.fps} a second last {wanted:.3f} s",
            fix="The container's times are wrong: make the clip again.",
        )
    return Check("duration", "ok", seen, f"{wanted:.3f} s")


def audio_length(facts: ClipFacts, report: DecodeReport, expectation: Expectation) -> Check:
    """Decoded sound is as long as the decoded picture, within ``AUDIO_SLACK_SECONDS``."""
    seen = report.samples / max(facts.sample_rate, 1)
    wanted = report.frames / float(expectation.fps)
    text = f"{wanted:.3f} s +- {AUDIO_SLACK_SECONDS:.3f}"
    if abs(seen - wanted) > AUDIO_SLACK_SECONDS:
        return Check(
            "audio length",
            "fail",
            f"{seen:.3f} s",
            text,
            why="sound and picture of an H3 clip end together",
            fix="The sound was cut or belongs to another clip: make the clip again.",
        )
    return Check("audio length", "ok", f"{seen:.3f} s", text)


def silence(sound: SoundFacts, expectation: Expectation) -> Check:
    """Loud enough to be sound."""
    seen = f"RMS {sound.rms_dbfs:.1f} dBFS, peak {sound.peak_dbfs:.1f}"
    if sound.rms_dbfs < SILENCE_DBFS and expectation.audio_required:
        return Check(
            "silence",
            "warn",
            seen,
            f"RMS above {SILENCE_DBFS:g} dBFS",
            why="the sound stream holds silence",
            fix="Listen to it; pass --allow-silent if it is meant to be silent.",
        )
    return Check("silence", "ok", seen, f"RMS above {SILENCE_DBFS:g} dBFS" if expectation.audio_required else "any")


def black_picture(picture: PictureFacts) -> Check:
    """Not black for half of the clip or more."""
    seen = f"{picture.black_frames} of {picture.frames} frames black"
    if picture.frames and picture.black_frames >= MOSTLY * picture.frames:
        return Check(
            "black picture",
            "warn",
            seen,
            "fewer than half",
            why="a broken decoder or NaN in the latents gives black frames",
            fix="Look at it (--sheet); if the prompt did not ask for darkness, run `vllm-h3 doctor`.",
        )
    return Check("black picture", "ok", seen, "fewer than half")


def frozen_picture(picture: PictureFacts) -> Check:
    """No still run of half the clip or more."""
    seen = f"longest still run {picture.longest_still} of {picture.frames} frames"
    if picture.frames > 1 and picture.longest_still >= MOSTLY * picture.frames:
        return Check(
            "frozen picture",
            "warn",
            seen,
            "shorter than half",
            why="nothing moves from frame to frame",
            fix="Look at it (--sheet); if the prompt did not ask for a still, run `vllm-h3 doctor`.",
        )
    return Check("frozen picture", "ok", seen, "shorter than half")


def _sizes(report: DecodeReport) -> str:
    return ", ".join(f"{width}x{height}" for width, height in report.sizes) or "none"
