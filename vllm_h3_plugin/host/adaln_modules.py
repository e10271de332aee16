# SPDX-License-Identifier: Apache-2.0
"""The host's DiT without AdaLN weights: modules that read a table.

While the DiT is built, :func:`adaln_from_tables` puts two classes in the place of the host's: a timestep embedder that
answers with the table's rows of the step at hand, and a projection without parameters that picks its layer's part of
them. Everything between them (the blocks, TeaCache's extractor, Cache-DiT, regional compile) passes the rows on as it
passes the host's timestep embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit

from vllm_h3_plugin.conditioning.table import FINAL, AdalnTable, TableShape
from vllm_h3_plugin.errors import UsageError

# The host's own classes, whatever stands in their place while a DiT is built.
HostProjection = host_dit.MiniMaxH3AdalnProj
HostTimeEmbedder = host_dit.MiniMaxH3TimeEmbedder


class TableTimeEmbedder(HostTimeEmbedder):  # type: ignore[valid-type,misc]  # the host's types are not followed
    """The host's timestep embedder, answering with table rows. Its parameters are the host's, under the same names."""

    table: AdalnTable | None = None
    known_timesteps: tuple[float, ...] | None = None
    """Values of the step at hand, if the caller knows them; else they are read from the device."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """``[M]`` sorted distinct timesteps -> ``[M, width]`` BF16, a view of the table.

        Raises:
            UsageError: the rows of this step follow no schedule, or no table was made.
        """
        if self.table is None:
            raise UsageError(
                "the DiT was called without an AdaLN table",
                why="a table is made for each request by the pipeline",
                fix='Use a recipe with "adaln": "resident" to call the DiT by itself.',
            )
        return self.table.rows(t.tolist() if self.known_timesteps is None else self.known_timesteps)


class TableProjection(nn.Module):
    """``MiniMaxH3AdalnProj`` without weights: takes its layer's part of the rows. Same arguments, same result."""

    def __init__(
        self,
        arch: Any,
        out_features: int,
        quant_config: Any,
        *,
        expand_ratio: int,
        modality_num: int,
        prefix: str,
        adaln_cache: Any = None,
    ) -> None:
        super().__init__()
        del quant_config, adaln_cache
        self.expand_ratio = expand_ratio
        self.modality_num = modality_num
        self.hidden_size = arch.hidden_size
        shape = TableShape(arch.num_layers, arch.adaln_out_features, arch.final_adaln_out_features)
        layer = shape.layer_of(prefix)
        self.final = layer == FINAL
        self.blocks = (shape.layers, shape.block)
        # A tensor, and no number: a compiled block would be compiled again for every number it meets.
        self.register_buffer("layer", torch.tensor([max(layer, 0)]), persistent=False)

    def forward(self, t_emb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[M, width]`` rows of the table -> ``expand_ratio`` tensors of ``[M * modality_num, H]``."""
        layers, width = self.blocks
        if self.final:
            x = t_emb[:, layers * width :]
        else:
            x = t_emb[:, : layers * width].unflatten(1, (layers, width)).index_select(1, self.layer)
        x = x.reshape(t_emb.shape[0] * self.modality_num, self.expand_ratio * self.hidden_size)
        return tuple(x.chunk(self.expand_ratio, dim=-1))


@contextmanager
def adaln_from_tables() -> Iterator[None]:
    """DiTs that are built inside have no AdaLN weights."""
    host_dit.MiniMaxH3AdalnProj, host_dit.MiniMaxH3TimeEmbedder = TableProjection, TableTimeEmbedder
    try:
        yield
    finally:
        host_dit.MiniMaxH3AdalnProj, host_dit.MiniMaxH3TimeEmbedder = HostProjection, HostTimeEmbedder


def uses_tables(dit: nn.Module) -> bool:
    """Whether a DiT was built under :func:`adaln_from_tables`."""
    return isinstance(dit.time_embedder, TableTimeEmbedder)
