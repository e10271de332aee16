# SPDX-License-Identifier: Apache-2.0
"""A contact sheet: evenly spaced frames with their times, over the waveform of the sound, as one PNG."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
from av.audio.frame import AudioFrame
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vllm_h3_plugin.errors import ClipError, UsageError
from vllm_h3_plugin.video.decode import decoded_frames
from vllm_h3_plugin.video.measure import as_float
from vllm_h3_plugin.video.probe import ClipFacts, probe
from vllm_h3_plugin.video.promote import promote

_COLUMNS = 4
_TILE_WIDTH = 320
_GAP = 8
_LABEL = 20
_WAVE = 96
_BACKGROUND, _INK, _FAINT, _WAVE_INK = "#181818", "#f0f0f0", "#303030", "#66ccff"


@dataclass
class _Material:
    """What one pass over the clip leaves: (time in seconds, picture) of the chosen frames, and the sound's extent."""

    tiles: list[tuple[float, Image.Image]] = field(default_factory=list)
    low: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    high: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    damage: str = ""


def write_sheet(clip: Path, out: Path, *, frames: int = 12, force: bool = False) -> Path:
    """Draw ``frames`` evenly spaced frames of ``clip``, first and last included, and its waveform.

    A clip that breaks off is drawn as far as it can be decoded, and the sheet says so.

    Args:
        clip: the MP4 file.
        out: the PNG to write; its folder must exist.
        frames: number of pictures, at least 1; a clip with fewer frames gives fewer.
        force: replace ``out`` if it exists.

    Returns:
        ``out``.

    Raises:
        UsageError: ``out`` exists and ``force`` is not set, its folder does not exist, or ``frames`` is below 1.
        ClipError: ``clip`` is no clip, or not one frame of it can be decoded.
    """
    check_output(out, force=force)
    if frames < 1:
        raise UsageError(f"{frames} pictures", why="a sheet shows at least one", fix="Ask for 1 or more.")
    facts = probe(clip)
    columns = min(_COLUMNS, frames)
    width = columns * _TILE_WIDTH + (columns + 1) * _GAP
    material = _gather(facts, frames, width - 2 * _GAP)
    if not material.tiles:
        raise ClipError(
            f"{clip} has no frame to draw", why=material.damage or "none could be decoded", fix="Run `vllm-h3 verify`."
        )
    save(_draw(facts, material, columns, width), out, force=force)
    return out


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output that would be refused later, before the long work.

    Raises:
        UsageError: as :func:`write_sheet` says.
    """
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}", fix="Make it first.")
    if out.is_dir():
        raise UsageError(f"{out} is a folder", fix="Name the PNG file in it.")
    if out.suffix.lower() != ".png":
        raise UsageError(f"{out} is no name of a PNG file", why="the sheet is one", fix=f"Name it {out.stem}.png.")
    if out.exists() and not force:
        raise UsageError(
            f"{out} already exists", why="nothing is overwritten unasked", fix="Choose another name, or pass --force."
        )


def _gather(facts: ClipFacts, count: int, wave_width: int) -> _Material:
    total = facts.frames or max(round(facts.duration * facts.fps), 1)
    count = min(count, total)
    chosen = {round(n * (total - 1) / max(count - 1, 1)) for n in range(count)}
    tile_height = max(round(_TILE_WIDTH * facts.height / max(facts.width, 1)), 1)
    expected = max(round(facts.audio_duration * facts.sample_rate), 1)
    material = _Material()
    material.low = np.zeros(wave_width, np.float32)
    material.high = np.zeros(wave_width, np.float32)
    index = heard = 0
    try:
        for frame in decoded_frames(facts.path):
            if isinstance(frame, AudioFrame):
                values = as_float(frame)
                columns = np.minimum((heard + np.arange(frame.samples)) * wave_width // expected, wave_width - 1)
                np.minimum.at(material.low, columns, values.min(axis=0))
                np.maximum.at(material.high, columns, values.max(axis=0))
                heard += frame.samples
                continue
            if index in chosen:
                picture = frame.reformat(width=_TILE_WIDTH, height=tile_height, format="rgb24").to_image()
                seconds = frame.time if frame.time is not None else index / float(facts.fps or 1)
                material.tiles.append((seconds, picture))
            index += 1
    except av.FFmpegError as exc:
        material.damage = f"breaks off after {index} frames: {exc.strerror or exc}"
    return material


def _draw(facts: ClipFacts, material: _Material, columns: int, width: int) -> Image.Image:
    font = ImageFont.load_default()
    tile_height = material.tiles[0][1].height
    rows = -(-len(material.tiles) // columns)
    wave_top = _GAP + _LABEL + rows * (tile_height + _LABEL + _GAP)
    sheet = Image.new("RGB", (width, wave_top + _WAVE + _GAP), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP), _title(facts, material), fill=_INK, font=font)
    for number, (seconds, picture) in enumerate(material.tiles):
        left = _GAP + number % columns * (_TILE_WIDTH + _GAP)
        top = _GAP + _LABEL + number // columns * (tile_height + _LABEL + _GAP)
        sheet.paste(picture, (left, top))
        draw.text((left, top + tile_height + 3), f"{seconds:.3f} s", fill=_INK, font=font)
    draw.rectangle((_GAP, wave_top, width - _GAP - 1, wave_top + _WAVE - 1), fill=_FAINT)
    if facts.audio_codec is None:
        draw.text((_GAP * 2, wave_top + _WAVE // 2 - 6), "no sound stream", fill=_INK, font=font)
        return sheet
    middle, reach = wave_top + _WAVE / 2, _WAVE / 2 - 2
    for column, (low, high) in enumerate(zip(material.low.clip(-1, 1), material.high.clip(-1, 1), strict=True)):
        x = _GAP + column
        draw.line((x, middle - float(high) * reach, x, middle - float(low) * reach), fill=_WAVE_INK)
    return sheet


def _title(facts: ClipFacts, material: _Material) -> str:
    sound = f"{facts.audio_codec} {facts.sample_rate} Hz" if facts.audio_codec else "no sound"
    # The built-in font may lack what a file name holds; a sheet must not fail for that.
    name = facts.path.name.encode("ascii", "replace").decode("ascii")
    parts = [name, f"{facts.width}x{facts.height}", f"{float(facts.fps):g} fps", f"{facts.duration:.3f} s", sound]
    return "   ".join(parts + ([material.damage] if material.damage else []))


def save(sheet: Image.Image, out: Path, *, force: bool) -> None:
    """Write a PNG whole or not at all.

    Raises:
        UsageError: ``out`` came to be there meanwhile and ``force`` is not set.
    """
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        sheet.save(part, format="PNG")
        if force:
            part.replace(out)
        else:
            promote(part, out)
    finally:
        part.unlink(missing_ok=True)
