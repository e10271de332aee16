# SPDX-License-Identifier: Apache-2.0
"""Decoding one clip: the stock host's video VAE, tile by tile, and the same one with tiles in batches.

Two VAEs of one folder in one process, both built by the host's own adapter: the second with what the plugin gives its
decoder. Two times each: of ``decode_latent`` alone, and from latents to frames in host memory, as each side does it:
the host as RGB bytes once all is decoded, the plugin as luma and chroma bytes while it decodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline
from vllm_omni.diffusion.models.minimax_h3 import vae as host_vae
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin import settings
from vllm_h3_plugin.host import decoder_operators
from vllm_h3_plugin.host.bench.apart import Apart, compare
from vllm_h3_plugin.host.bench.clock import in_turns, reason_of, wall_ms
from vllm_h3_plugin.host.clips import Recording
from vllm_h3_plugin.host.tiles import TileBatches, room_on
from vllm_h3_plugin.memory.guard import Thresholds
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.system import probe
from vllm_h3_plugin.pins import installed_host

STOCK = "stock"
_TRUE_PARAMETERS = 2_000_000_000
"""The released decoder has 2.42e9; no narrow one comes near."""


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        folder: a ``video_vae/`` folder.
        size: of the clip.
        batches: tiles at once, a column each; None: as many as fit.
        rounds: in which all columns take turns.
    """

    folder: Path
    size: RequestSize
    batches: tuple[int | None, ...] = (None,)
    rounds: int = 3


@dataclass(frozen=True)
class Column:
    """One way to decode.

    Attributes:
        name: ``stock``, or ``batch N`` and ``batch auto``.
        decode_ms: of ``decode_latent``; ``bytes_ms``: until the frames lie in host memory as bytes.
        peak_bytes: most on the device beyond what was there before; None on the CPU.
        decoded: what the plugin told of its tiles.
        apart: from the stock host's frames.
        note: why there is no time.
    """

    name: str
    decode_ms: float | None = None
    bytes_ms: float | None = None
    peak_bytes: int | None = None
    decoded: dict[str, Any] | None = None
    apart: Apart | None = None
    note: str = ""


@dataclass
class Found:
    """All of it.

    Attributes:
        parameters: of the VAE's decoder.
        optimized: whether the host puts its own operators into it.
        steps: what the plugin's runs with, in words.
        tiles: of one temporal clip.
    """

    size: RequestSize
    parameters: int = 0
    optimized: bool = False
    steps: str = ""
    tiles: int = 0
    columns: list[Column] = field(default_factory=list)

    @property
    def true_width(self) -> bool:
        """Whether the decoder is as large as the released one."""
        return self.parameters > _TRUE_PARAMETERS

    def column(self, name: str) -> Column | None:
        """By name."""
        return next((column for column in self.columns if column.name == name), None)


def column_name(batch: int | None) -> str:
    """Of the plugin with so many tiles at once."""
    return f"batch {'auto' if batch is None else batch}"


@torch.inference_mode()
def measure(
    options: Options,
    device: torch.device,
    *,
    starts: Callable[[str], None] = lambda words: None,
) -> Found:
    """Build the VAE and measure every column. Needs ``single_rank`` around it."""
    starts("building the video VAE")
    stock = build(options.folder, device)
    found = Found(options.size)
    found.parameters = sum(value.numel() for value in stock.model.decoder.parameters())
    found.optimized = bool(getattr(stock.model.decoder, "_omni_h3_vae_optimizations_installed", False))
    # After the stock one, which the host must not give what it has on no such device.
    operators = decoder_operators.offer(device)
    plugins = build(options.folder, device)
    found.steps = decoder_operators.install(plugins, operators)
    bench = _Bench(stock, plugins, options.size, device)
    found.tiles = int(stock._decoder_tile_count(bench.latent))
    ways: dict[str, tuple[bool, int | None]] = {STOCK: (False, None)}
    ways |= {column_name(batch): (True, batch) for batch in options.batches}
    shown: torch.Tensor | None = None
    for name, (ours, batch) in ways.items():
        starts(f"{name}: what it decodes")
        column = Column(name)
        try:
            frames, column = bench.look(column, ours, batch)
        except Exception as exc:  # noqa: BLE001 - the VAE's code may raise anything; other columns still say something
            found.columns.append(replace(column, note=reason_of(exc)))
            continue
        if shown is None:
            shown = frames
        elif ours:
            column = replace(column, apart=compare(shown, frames, bench.seams()))
        found.columns.append(column)
    measures = {}
    for column in found.columns:
        if not column.note:
            ours, batch = ways[column.name]
            measures[column.name, "decode_ms"] = partial(bench.decode_ms, ours, batch)
            measures[column.name, "bytes_ms"] = partial(bench.bytes_ms, ours, batch)
    starts(f"{options.rounds} rounds of {len(measures)} measures")
    times, failed = in_turns(measures, options.rounds, warm=1)
    found.columns = [
        replace(
            column,
            decode_ms=times.get((column.name, "decode_ms")),
            bytes_ms=times.get((column.name, "bytes_ms")),
            note="; ".join(filter(None, [column.note, *(failed.get((column.name, key), "") for key in _TIMES)])),
        )
        for column in found.columns
    ]
    return found


_TIMES = ("decode_ms", "bytes_ms")


def build(folder: Path, device: torch.device) -> Any:
    """The host's adapter of a ``video_vae/`` folder, on a device."""
    cls = host_vae.MiniMaxH3VideoVAE
    trust = {"trust_remote_code": True} if "trust_remote_code" in inspect.signature(cls).parameters else {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return cls(str(folder), device=device, load_device=device, **trust)
    finally:
        torch.set_default_dtype(before)


class _Bench:
    def __init__(self, stock: Any, plugins: Any, size: RequestSize, device: torch.device) -> None:
        self._stock, self._plugins, self._size, self._device = stock, plugins, size, device
        self._old = installed_host().vllm_omni == "0.28.0"
        self._system = probe(device.type)
        numbers = torch.Generator().manual_seed(0)
        shape = (1, 24, size.latent_frames, size.height // 16, size.width // 16)
        # As a denoiser leaves them: about as large as noise, and alike from place to place.
        coarse = torch.randn(*shape[:2], -(-shape[2] // 4), shape[3] // 2, shape[4] // 2, generator=numbers)
        self.latent = torch.nn.functional.interpolate(coarse.float(), shape[2:], mode="trilinear").to(device)

    @contextmanager
    def _way(self, ours: bool, batch: int | None) -> Iterator[TileBatches | None]:
        if not ours:
            yield None
            return
        room = room_on(self._device, self._system, Thresholds.from_settings(settings.load()).floor)
        tiles = TileBatches(self._plugins, most=batch, room=room, streaming=not self._old)
        tiles.begin(self.latent)
        try:
            yield tiles
        finally:
            tiles.remove()

    def _decode(self, vae: Any) -> torch.Tensor:
        with current_omni_platform.create_autocast_context(
            device_type=self._device.type, dtype=torch.float16, enabled=True
        ):
            frames: torch.Tensor = vae.decode_latent(self.latent)
        return frames

    def _stock_bytes(self) -> Any:
        return host_pipeline._prepare_minimax_h3_video_output(self._decode(self._stock)).cpu()

    def _our_bytes(self) -> Any:
        kept: Any = _Kept()
        recording = Recording(kept, self._size.height, self._size.width)
        if self._old or not callable(getattr(self._plugins, "decode_with_chunks", None)):
            recording.add(self._decode(self._plugins))
        else:
            with current_omni_platform.create_autocast_context(
                device_type=self._device.type, dtype=torch.float16, enabled=True
            ):
                self._plugins.decode_with_chunks(self.latent, on_chunk=recording.add)
        return kept.all()

    def look(self, column: Column, ours: bool, batch: int | None) -> tuple[torch.Tensor, Column]:
        """Frames in bytes ``[3, T, H, W]`` on the CPU, and the column with its peak and what the plugin told."""
        cuda = self._device.type == "cuda"
        before = 0
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        with self._way(ours, batch) as tiles:
            frames = self._decode(self._plugins if ours else self._stock)
            told = None if tiles is None else tiles.told()
            if tiles is not None and told is None and batch != 1:
                column = replace(column, note=tiles.reason)
        peak = torch.cuda.max_memory_allocated(self._device) - before if cuda else None
        if frames.dtype != torch.uint8:
            frames = (frames * 255).round().to(torch.uint8)
        return frames[0].cpu(), replace(column, peak_bytes=peak, decoded=told)

    def decode_ms(self, ours: bool, batch: int | None) -> float:
        """Of ``decode_latent``."""
        with self._way(ours, batch):
            return wall_ms(partial(self._decode, self._plugins if ours else self._stock), self._device)

    def bytes_ms(self, ours: bool, batch: int | None) -> float:
        """Until the frames lie in host memory as bytes."""
        with self._way(ours, batch):
            return wall_ms(self._our_bytes if ours else self._stock_bytes, self._device)

    def seams(self) -> torch.Tensor:
        """Where tiles overlap: ``[H, W]``, bool."""
        mask = torch.zeros(self._size.height, self._size.width, dtype=torch.bool)
        for side, length in ((0, self._size.height), (1, self._size.width)):
            starts, lengths, _ = self._stock.model.split_tiles(length, True)
            for start, (before, long) in zip(starts[1:], zip(starts, lengths, strict=False), strict=False):
                mask.narrow(side, start, max(0, before + long - start)).fill_(True)
        return mask


class _Kept:
    """Takes what an encoder would; what is copied is waited for one piece later, as by the encoder's thread."""

    failed = False

    def __init__(self) -> None:
        self._waiting: list[Callable[[], Any]] = []
        self._arrays: list[Any] = []

    def push(self, chunk: Callable[[], Any]) -> None:
        self._waiting.append(chunk)
        if len(self._waiting) > 1:
            self._arrays.append(self._waiting.pop(0)())

    def all(self) -> Sequence[Any]:
        """Every piece, there."""
        while self._waiting:
            self._arrays.append(self._waiting.pop(0)())
        return self._arrays
