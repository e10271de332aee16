# SPDX-License-Identifier: Apache-2.0
"""The host's DiT with what does not change within a request computed once for it, and no question to the device.

The host refines the prompt, builds the rotary table and finds each modality's rows again in every step. All of it
follows from the request alone. A request is known by its tensors: the host hands the same ones to every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit
from vllm_omni.diffusion.models.minimax_h3 import pipeline_minimax_h3 as host_pipeline

from vllm_h3_plugin.host.denoise_branch import HostBranch, MiniMaxH3DenoiseBranch, known_timesteps
from vllm_h3_plugin.host.fused_block import HostBlock, MiniMaxH3DiTBlock

HostDiT = host_dit.MiniMaxH3DiTModel

# Tensors of a request that the host hands to each of its steps (denoise_loop.py, ``static_kwargs``).
_FIXED = ("prompt_embeds", "img_position_ids", "token_tags")
_POSITIONS = ("img_pos_info", "audio_pos_info", "text_pos_info")


@dataclass(frozen=True, eq=False)
class Rows:
    """Where a modality's tokens are.

    Attributes:
        source: their rows in the packed sequence, ``[n]`` INT64: what is embedded on this rank.
        local: the same in this rank's part of it.
    """

    source: torch.Tensor
    local: torch.Tensor


class Request:
    """What one request's steps have in common."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self._tensors = tuple(weakref.ref(tensor) for tensor in _identity(kwargs))
        self.rope_table: torch.Tensor | None = None
        self.text: torch.Tensor | None = None
        self.rows: dict[str, Rows] = {}

    def is_of(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a step was called with this request's tensors."""
        tensors = _identity(kwargs)
        return len(tensors) == len(self._tensors) and all(
            reference() is tensor for reference, tensor in zip(self._tensors, tensors, strict=True)
        )


def _identity(kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    fixed = [kwargs.get(name) for name in _FIXED]
    positions = [
        info.get("position_ids") if isinstance(info, Mapping) else getattr(info, "position_ids", None)
        for info in (kwargs.get(name) for name in _POSITIONS)
    ]
    return [tensor for tensor in (*fixed, *positions) if isinstance(tensor, torch.Tensor)]


class MiniMaxH3DiTModel(HostDiT):  # type: ignore[valid-type,misc]  # the host's types are not followed
    """See the module's docstring. Results are the host's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The host's memo of projections hashes the timestep embedding on the processor in each step (0.30).
        self.adaln_cache = None
        self._request: Request | None = None
        self._running: Request | None = None

    def forward(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; arguments and result are those of the host's."""
        request = self._request
        if request is None or not request.is_of(kwargs):
            request = self._request = Request(kwargs)
        if kwargs.get("rope_table") is None and kwargs.get("x") is not None:
            if request.rope_table is None:
                request.rope_table = self.prepare_rope_table(kwargs["img_position_ids"], seq_len=kwargs["x"].shape[1])
            kwargs["rope_table"] = request.rope_table
        known = known_timesteps(kwargs["unique_timesteps"]) if "unique_timesteps" in kwargs else None
        self._running, self.time_embedder.known_timesteps = request, known
        try:
            return super().forward(**kwargs)  # type: ignore[no-any-return]
        finally:
            self._running = self.time_embedder.known_timesteps = None

    def forget_request(self) -> None:
        """Drop what is kept of the last request, also what a block that a cache then left out was begun with."""
        self._request = None
        for block in self.blocks:
            if isinstance(block, MiniMaxH3DiTBlock):
                block.forget()

    def _embed(
        self,
        *,
        x: torch.Tensor,
        audio_x: torch.Tensor,
        text_embeddings_selected: torch.Tensor,
        unique_timesteps: torch.Tensor,
        img_pos: torch.Tensor,
        audio_pos: torch.Tensor,
        text_pos: torch.Tensor,
        refiner_cu_seqlens: torch.Tensor,
        refiner_max_seqlen: int,
        seq_len: int,
        device: torch.device,
        local_span: tuple[int, int],
        num_requests: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The host's (T:1456): packed rows ``[S_local, H]`` BF16 and the timestep embedding.

        Where the host adds rows into zeros, they are copied: no two modalities share a row.
        """
        request = self._running or Request({})  # TeaCache calls this without forward()
        if not request.rows:
            positions = {"video": img_pos, "audio": audio_pos, "text": text_pos}
            request.rows = {name: local_rows(rows, local_span, seq_len) for name, rows in positions.items()}
        video, audio, text = (request.rows[name] for name in ("video", "audio", "text"))
        if request.text is None:
            embedded, _ = self.condition_proj(text_embeddings_selected.to(device=device, dtype=host_dit._BF16_DTYPE))
            embedded = self.token_refiner(
                embedded, cu_seqlens=refiner_cu_seqlens, max_seqlen=refiner_max_seqlen, num_requests=num_requests
            )
            if local_span[1] != seq_len:
                inside = (text_pos >= local_span[0]) & (text_pos < sum(local_span))
                embedded = embedded[inside]
            request.text = embedded.to(host_dit._BF16_DTYPE)[: text.local.shape[0]]
        # Latents are embedded in FP32 and rounded once, as the host does.
        video_rows, _ = self.video_patch_proj(x.view(-1, x.shape[-1]).index_select(0, video.source).float())
        audio_rows, _ = self.audio_patch_proj(audio_x.view(-1, audio_x.shape[-1]).index_select(0, audio.source).float())
        embeddings = torch.zeros((local_span[1], self.hidden_size), device=device, dtype=host_dit._BF16_DTYPE)
        embeddings.index_copy_(0, text.local, request.text)
        embeddings.index_copy_(0, video.local, video_rows.to(host_dit._BF16_DTYPE))
        embeddings.index_copy_(0, audio.local, audio_rows.to(host_dit._BF16_DTYPE))
        return embeddings, self.time_embedder(unique_timesteps)


def local_rows(positions: torch.Tensor, span: tuple[int, int], seq_len: int) -> Rows:
    """The rows of a modality that a sequence-parallel rank owns.

    Args:
        positions: ``[n]`` INT64 rows in the packed sequence.
        span: first row and number of rows of this rank.
        seq_len: rows of all ranks.
    """
    start, length = span
    if length == seq_len:
        return Rows(positions, positions)
    inside = positions[(positions >= start) & (positions < start + length)]
    return Rows(inside, inside - start)


@contextmanager
def plugin_dit() -> Iterator[None]:
    """DiTs that are built inside, by the host's pipeline or by name, are this plugin's."""
    host_dit.MiniMaxH3DiTBlock = MiniMaxH3DiTBlock
    host_pipeline.MiniMaxH3DiTModel = MiniMaxH3DiTModel
    try:
        yield
    finally:
        host_dit.MiniMaxH3DiTBlock = HostBlock
        host_pipeline.MiniMaxH3DiTModel = HostDiT


@contextmanager
def plugin_branch() -> Iterator[None]:
    """Requests that are laid out inside tell their timesteps."""
    host_pipeline.MiniMaxH3DenoiseBranch = MiniMaxH3DenoiseBranch
    try:
        yield
    finally:
        host_pipeline.MiniMaxH3DenoiseBranch = HostBranch
