# SPDX-License-Identifier: Apache-2.0
"""How far two clips are apart: picture by ffmpeg's PSNR, SSIM and VMAF, sound by log-spectral distance.

The second clip is held against the first. Nothing here says which is better: VMAF alone takes the first one for the
reference and was trained on compression and scaling, not on what a generator does differently.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import av
import ffmpeg
import numpy as np
from av.audio.frame import AudioFrame
from numpy.typing import NDArray

from vllm_h3_plugin.errors import ClipError, ToolMissingError, UsageError
from vllm_h3_plugin.video.decode import decoded_frames
from vllm_h3_plugin.video.measure import as_float
from vllm_h3_plugin.video.probe import ClipFacts, probe

_PEAK = 255.0
_WINDOW, _HOP = 1024, 256
_SILENCE_DB = -80.0
"""Spectral power below this, against full scale, counts as this: what a codec leaves of silence is no difference."""


@dataclass(frozen=True)
class Metric:
    """One figure of every frame.

    Attributes:
        name: ``psnr`` (dB, infinite for equal frames), ``ssim`` (1 for equal frames) or ``vmaf`` (0 to 100).
        frames: a value each.
        mean: of the clip; of PSNR that of the mean squared error over all frames, which one bad frame pulls down.
        reason: why there are none.
    """

    name: str
    frames: tuple[float, ...] = ()
    mean: float | None = None
    reason: str = ""

    @property
    def worst(self) -> tuple[int, float] | None:
        """Number, from 0, and value of the frame that is furthest apart."""
        if not self.frames:
            return None
        index = min(range(len(self.frames)), key=self.frames.__getitem__)
        return index, self.frames[index]

    def as_dict(self) -> dict[str, Any]:
        """JSON has no infinity: PSNR of equal frames is null, with ``identical``."""
        worst = self.worst
        return {
            "mean": _finite(self.mean),
            "worst": None if worst is None else {"frame": worst[0], "value": _finite(worst[1])},
            "frames": [_finite(value) for value in self.frames],
            "identical": bool(self.frames) and self.name == "psnr" and all(math.isinf(value) for value in self.frames),
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Difference:
    """What two clips differ in.

    Attributes:
        first, second: of the containers.
        compared: frames that both have; beyond them nothing is compared.
        metrics: by name, in the order psnr, ssim, vmaf.
        sound_db: log-spectral distance, dB; None: see ``sound_reason``.
        equal_files: the files are equal to the byte.
        notes: sentences about what limits the comparison.
    """

    first: ClipFacts
    second: ClipFacts
    compared: int
    metrics: dict[str, Metric]
    sound_db: float | None
    sound_reason: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def equal_files(self) -> bool:
        return self.first.sha256 == self.second.sha256

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "first": self.first.as_dict(),
            "second": self.second.as_dict(),
            "equal_files": self.equal_files,
            "compared_frames": self.compared,
            **{name: metric.as_dict() for name, metric in self.metrics.items()},
            "sound": {"log_spectral_distance_db": self.sound_db, "reason": self.sound_reason or None},
            "notes": list(self.notes),
        }


def compare(first: Path, second: Path, program: Path, *, vmaf: bool = True) -> Difference:
    """Compare two clips frame by frame, and their sound.

    Args:
        program: ffmpeg.
        vmaf: also VMAF, where ``program`` has it; it takes most of the time.

    Raises:
        ClipError: a file is no clip, or breaks off while it is decoded.
        UsageError: their pictures are not of one size.
        ToolMissingError: ``program`` cannot be run.
    """
    one, other = probe(first), probe(second)
    if (one.width, one.height) != (other.width, other.height):
        raise UsageError(
            f"{second} is {other.width}x{other.height} and {first} is {one.width}x{one.height}",
            why="frames are compared pixel by pixel, and scaling one of them would be part of the result",
            fix="Make both at one size.",
        )
    notes = []
    if one.fps != other.fps:
        notes.append(f"{float(one.fps):g} and {float(other.fps):g} frames a second: frames are paired by number")
    metrics = pictures_apart(one, other, program, vmaf=vmaf)
    compared = len(metrics["psnr"].frames)
    if one.frames != other.frames:
        notes.append(f"{one.frames} and {other.frames} frames: the first {compared} are compared")
    sound, reason = sound_apart(one, other)
    return Difference(one, other, compared, metrics, sound, reason, tuple(notes))


def pictures_apart(one: ClipFacts, other: ClipFacts, program: Path, *, vmaf: bool) -> dict[str, Metric]:
    """The metrics of two clips of one size, from one decode of each.

    Raises:
        ClipError: a clip cannot be decoded to its end.
        ToolMissingError: ``program`` cannot be run.
    """
    has_vmaf = "libvmaf" in _run([str(program), "-hide_banner", "-filters"], None).stdout
    wanted = [_PSNR, _SSIM, *([_VMAF] if vmaf and has_vmaf else [])]
    with tempfile.TemporaryDirectory() as folder:
        done = _run(_command(one, other, program, wanted), folder)
        if done.returncode != 0:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise ClipError(
                f"{one.path} and {other.path} cannot be compared",
                why=f"ffmpeg says: {said[0] if said else f'exit status {done.returncode}'}",
                fix="Run `vllm-h3 verify` on both.",
            )
        metrics = {kind.name: kind.read(Path(folder, kind.log).read_text("utf-8")) for kind in wanted}
    if "vmaf" not in metrics:
        reason = "this ffmpeg is built without libvmaf" if vmaf else "not asked for"
        metrics["vmaf"] = Metric("vmaf", reason=reason)
    return metrics


@dataclass(frozen=True)
class _Kind:
    """A filter of ffmpeg that compares, with the log that it writes."""

    name: str
    filter: str
    log: str
    options: dict[str, str]
    read: Callable[[str], Metric]


def _read_psnr(text: str) -> Metric:
    errors = _values(text, "mse_avg:")
    mean = fmean(errors) if errors else None
    return Metric("psnr", tuple(map(_decibels, errors)), None if mean is None else _decibels(mean))


def _read_ssim(text: str) -> Metric:
    values = _values(text, "All:")
    return Metric("ssim", values, fmean(values) if values else None)


def _read_vmaf(text: str) -> Metric:
    values = tuple(frame["metrics"]["vmaf"] for frame in json.loads(text)["frames"])
    return Metric("vmaf", values, fmean(values) if values else None)


_PSNR = _Kind("psnr", "psnr", "psnr.log", {"stats_file": "psnr.log"}, _read_psnr)
_SSIM = _Kind("ssim", "ssim", "ssim.log", {"stats_file": "ssim.log"}, _read_ssim)
_VMAF = _Kind("vmaf", "libvmaf", "vmaf.json", {"log_path": "vmaf.json", "log_fmt": "json"}, _read_vmaf)


def _values(text: str, key: str) -> tuple[float, ...]:
    words = (word for line in text.splitlines() for word in line.split() if word.startswith(key))
    return tuple(float(word.removeprefix(key)) for word in words)


def _decibels(mean_squared_error: float) -> float:
    return math.inf if mean_squared_error == 0 else 10 * math.log10(_PEAK**2 / mean_squared_error)


def _command(one: ClipFacts, other: ClipFacts, program: Path, wanted: Sequence[_Kind]) -> list[str]:
    def frames(facts: ClipFacts, time_base: str) -> Any:
        source = ffmpeg.input(
            f"file:{facts.path.absolute()}", format="mov", protocol_whitelist="file", noautorotate=None
        )
        # By number: clips of two encoders may differ in their time bases.
        return (
            source[str(facts.video_index)]
            .filter("settb", time_base)
            .filter("setpts", "N*10")
            .filter_multi_output("split", len(wanted))
        )

    # Not written alike: ffmpeg-python takes nodes that are for the same one, and a clip may be held against itself.
    first, second = frames(one, "1/1000"), frames(other, "0.001")
    outputs = [
        # The filters take the distorted one first.
        ffmpeg.output(
            ffmpeg.filter([second.stream(n), first.stream(n)], kind.filter, **kind.options, shortest=1, repeatlast=0),
            "-",
            format="null",
        )
        for n, kind in enumerate(wanted)
    ]
    merged = ffmpeg.merge_outputs(*outputs).global_args("-nostdin", "-hide_banner", "-xerror", "-v", "error")
    command: list[str] = ffmpeg.compile(merged, cmd=str(program))
    return command


def _run(command: Sequence[str], folder: str | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    except OSError as exc:
        raise ToolMissingError(
            f"{command[0]} cannot be run", why=exc.strerror or str(exc), fix="Set H3_FFMPEG to a working ffmpeg."
        ) from exc


def sound_apart(one: ClipFacts, other: ClipFacts) -> tuple[float | None, str]:
    """Log-spectral distance in dB of what both clips have of sound, all channels mixed; or why there is none.

    Raises:
        ClipError: the sound of one cannot be decoded.
    """
    silent = [facts.path.name for facts in (one, other) if facts.audio_codec is None]
    if silent:
        return None, f"no sound in {' and '.join(silent)}"
    if one.sample_rate != other.sample_rate:
        return None, f"{one.sample_rate} and {other.sample_rate} samples a second"
    waves = [mono(facts.path) for facts in (one, other)]
    length = min(map(len, waves))
    if length < _WINDOW:
        return None, f"less than {_WINDOW} samples in common"
    return log_spectral_distance(waves[0][:length], waves[1][:length]), ""


def mono(path: Path) -> NDArray[np.float32]:
    """The mean of a clip's channels, ``[samples]`` in -1 to 1.

    Raises:
        ClipError: it breaks off.
    """
    try:
        parts = [as_float(frame).mean(axis=0) for frame in decoded_frames(path) if isinstance(frame, AudioFrame)]
    except av.FFmpegError as exc:
        raise ClipError(
            f"the sound of {path} breaks off", why=exc.strerror or str(exc), fix="Run `vllm-h3 verify` on it."
        ) from exc
    return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)


def log_spectral_distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Mean over windows of the root mean square over frequencies of the difference of two power spectra in dB.

    Gray and Markel, "Distance measures for speech processing", 1976. Windows are Hann's, 1024 samples, every 256.

    Args:
        one, other: ``[samples]``, of one length, at least a window.
    """
    distance = _spectra(one) - _spectra(other)
    return float(np.sqrt((distance**2).mean(axis=1)).mean())


def _spectra(wave: NDArray[np.float32]) -> NDArray[np.float64]:
    window = np.hanning(_WINDOW)
    frames = np.lib.stride_tricks.sliding_window_view(wave, _WINDOW)[::_HOP] * window
    power = np.abs(np.fft.rfft(frames, axis=1) / (window.sum() / 2)) ** 2
    return np.maximum(10 * np.log10(np.maximum(power, 1e-30)), _SILENCE_DB)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
