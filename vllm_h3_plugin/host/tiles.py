# SPDX-License-Identifier: Apache-2.0
"""Tiles of one temporal clip go through the video VAE's decoder together, as many as the memory allows.

The VAE's code comes with the checkpoint. It cuts a clip into tiles, decodes them in ``_run_tile_tasks`` and blends what
comes back; only that one method is replaced, on the instance. Which tiles there are, which rank decodes which, and how
they are blended stay the checkpoint's. Its own ``stack_tiling`` takes all tiles at once or none, whatever the memory.

Where the code has another shape, the host's way stays, one tile after the other, and the reason is kept.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.memory.activations import tiles_at_once
from vllm_h3_plugin.memory.requests import RequestSize
from vllm_h3_plugin.memory.system import GIB, MemorySystem

logger = init_logger(__name__)

_SEAM = "_run_tile_tasks"
_GIVEN = ("tiles", "tile_indices", "forward_fn", "stack_tiling")
_LATENT_PIXELS = 16
_DISCRETE_FLOOR = GIB
"""What stays free of a device with memory of its own: running out there costs another try, not the machine."""

Room = Callable[[], int]
"""Bytes that decoding may take now."""


@dataclass
class Decoded:
    """How one clip was decoded, as far as this rank did it.

    Attributes:
        tiles: of the largest temporal clip, on this rank.
        batch: tiles at once, in the end.
        calls: runs of the decoder; ``tiles_done`` tiles came out of them.
        reduced: how often the batch was made smaller because memory ran out.
    """

    tiles: int = 0
    batch: int = 1
    calls: int = 0
    tiles_done: int = 0
    reduced: int = 0


class TileBatches:
    """The decoder of one video VAE.

    Args:
        vae: the host's adapter; None: there is none on this rank.
        most: tiles at once at most; None: as many as fit.
        room: asked once a clip, before its first tile: by then the VAE's weights are where they are needed.
        streaming: whether the VAE writes uint8 frames as it goes.
    """

    def __init__(self, vae: Any, *, most: int | None, room: Room, streaming: bool) -> None:
        self._most = most
        self._room = room
        self._streaming = streaming
        self._model: Any = getattr(vae, "model", None)
        self._size: RequestSize | None = None
        self._clip: Decoded | None = None
        self.reason = "H3_DECODE_BATCH=1" if most == 1 else shortcoming(self._model)
        if self.reason:
            logger.info("the video VAE decodes one tile after the other: %s", self.reason)
            return
        self._one_by_one = getattr(self._model, _SEAM)
        setattr(self._model, _SEAM, self._run)

    def remove(self) -> None:
        """Give the VAE its own method back."""
        if not self.reason:
            delattr(self._model, _SEAM)
            self.reason = "it was taken away"

    def begin(self, latent: torch.Tensor) -> None:
        """A clip is about to be decoded.

        Args:
            latent: ``[1, 24, T, height / 16, width / 16]``.
        """
        self.forget()
        self._size = _request(latent)

    def forget(self) -> None:
        """A request begins: what is told is of its clip."""
        self._clip = self._size = None

    def told(self) -> dict[str, Any] | None:
        """How the last clip was decoded; None before its first tile, and where tiles go one by one."""
        return None if self._clip is None else asdict(self._clip)

    def facts(self) -> dict[str, Any]:
        """For ``/v1/h3/info``."""
        most = 1 if self.reason else self._most
        return {"most": "auto" if most is None else most, "reason": self.reason or None, "last": self.told()}

    def _run(
        self,
        tiles: Sequence[torch.Tensor],
        tile_indices: Sequence[int],
        forward_fn: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """In the place of the checkpoint's method; what it encodes with goes there as before.

        Returns:
            One output for each index, in order.
        """
        indices = list(tile_indices)
        if forward_fn != self._model.decode or not indices:
            return self._one_by_one(tiles, tile_indices, forward_fn, *rest, **named)
        clip = self._clip or self._first(tiles[indices[0]], len(indices))
        clip.tiles = max(clip.tiles, len(indices))
        done: list[torch.Tensor] = []
        for group in _alike([tiles[index] for index in indices]):
            done += self._together(group, forward_fn, clip)
        return done

    def _first(self, tile: torch.Tensor, count: int) -> Decoded:
        batch = min(count, self._most or count)
        if batch > 1:
            size = self._size or _request(tile)
            room = self._room()
            batch = 1 if size is None else tiles_at_once(size, room, tiles=batch, streaming=self._streaming)
            logger.info("%d of %d tiles of a clip are decoded at once, in %.1f GiB", batch, count, room / GIB)
        self._clip = Decoded(batch=batch)
        return self._clip

    def _together(self, tiles: list[torch.Tensor], decode: Any, clip: Decoded) -> list[torch.Tensor]:
        """Tiles of one shape, in batches of about one size."""
        each = tiles[0].shape[0]
        done: list[torch.Tensor] = []
        while left := tiles[len(done) :]:
            count = _even(len(left), clip.batch)
            out = _tried(decode, left[:count])
            clip.calls += 1
            if out is None:
                clip.batch, clip.reduced = max(1, count // 2), clip.reduced + 1
                logger.warning("memory ran out over %d tiles: %d at once from here on", count, clip.batch)
                _release(tiles[0].device)
                continue
            done += out.split(each)
            clip.tiles_done += count
        return done


def shortcoming(model: Any) -> str:
    """Why a VAE's model cannot be decoded in batches; empty if it can."""
    if model is None:
        return "there is no video VAE on this rank"
    method = getattr(model, _SEAM, None)
    if not callable(method) or not callable(getattr(model, "decode", None)):
        return f"the checkpoint's code has no {_SEAM} and decode"
    names = tuple(inspect.signature(method).parameters)
    if names[: len(_GIVEN)] != _GIVEN or set(names[len(_GIVEN) :]) - {"cls_agg"}:
        return f"{_SEAM} of the checkpoint's code takes {', '.join(names) or 'nothing'}"
    if getattr(model, "decoder_parallel", False):
        return "ranks share each tile"
    return ""


def room_on(device: torch.device, system: MemorySystem, floor: int) -> Room:
    """The room of this rank: what is free, and what the allocator has to spare, over what must stay free.

    Args:
        system: the memory that the model is taken from.
        floor: bytes of it that must stay free, where it is the machine's.
    """
    if device.type == "cpu":
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return lambda: (system.available() - floor) // ranks
    module: Any = torch.get_device_module(device.type)

    def room() -> int:
        spare = int(module.memory_reserved(device) - module.memory_allocated(device))
        if system.unified:
            return system.available() + spare - floor
        return int(module.mem_get_info(device)[0]) + spare - _DISCRETE_FLOOR

    return room


def _request(latent: torch.Tensor) -> RequestSize | None:
    steps, rows, columns = latent.shape[-3:]
    frames = 17 * -(-max(0, steps - 2) // 5) + 5
    try:
        return RequestSize(columns * _LATENT_PIXELS, rows * _LATENT_PIXELS, frames)
    except UsageError:
        return None


def _alike(tiles: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tiles that can be stacked."""
    for _, group in groupby(tiles, key=lambda tile: (tile.shape, tile.dtype)):
        yield list(group)


def _even(left: int, most: int) -> int:
    """The first batch of as few as possible, all of about one size: 28 by at most 10 is 10, 9, 9."""
    return -(-left // -(-left // most))


def _tried(decode: Any, tiles: list[torch.Tensor]) -> torch.Tensor | None:
    """Tiles decoded at once; None where memory ran out over more than one.

    Raises:
        RuntimeError: whatever the decoder does of one tile.
    """
    if len(tiles) == 1:
        out: torch.Tensor = decode(tiles[0])
        return out
    try:
        out = decode(torch.cat(tiles))
    except RuntimeError as exc:
        if not _ran_out(exc):
            raise
        # The frames of the decoder hold its activations for as long as the exception lives.
        traceback.clear_frames(exc.__traceback__)
        return None
    return out


def _ran_out(exc: RuntimeError) -> bool:
    # The CPU's allocator and older ones of other devices raise no class of their own.
    return isinstance(exc, torch.OutOfMemoryError) or any(
        words in str(exc).lower() for words in ("out of memory", "can't allocate memory")
    )


def _release(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).empty_cache()
