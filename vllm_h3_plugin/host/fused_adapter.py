# SPDX-License-Identifier: Apache-2.0
"""A FastH3 adapter in the stream of a DiT's weights: before rows are ordered, quantized or projected into a table.

The arithmetic is the host's (``fasth3.py`` ``FastH3WeightFusion.fuse``), tensor by tensor on the device. What the host
does around it cannot be used: it wants every tensor in one stream and drops the adapter after it, while a table of
AdaLN is made from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm_omni.diffusion.models.minimax_h3.fasth3 import FastH3WeightFusion

from vllm_h3_plugin.checkpoint.adapter import Adapter
from vllm_h3_plugin.checkpoint.adapter_kinds import fasth3_changes
from vllm_h3_plugin.checkpoint.adapter_layout import DitConfig
from vllm_h3_plugin.errors import AdapterError, LoadError

Stream = Iterable[tuple[str, torch.Tensor]]


class FusedAdapter:
    """What a FastH3 adapter makes of a native DiT's tensors.

    Args:
        adapter: checked, of kind ``fasth3``.
        config: of the DiT.
        fusion: what the host has made of the same file already.

    Raises:
        AdapterError: the host's own reader refuses the file.
    """

    def __init__(self, adapter: Adapter, config: DitConfig, fusion: Any = None) -> None:
        self.adapter = adapter
        self._config = config
        self._changes = fasth3_changes(adapter.file, config)
        self._fusion = fusion

    def stream(self, tensors: Stream, skipped: Callable[[str], bool] = lambda name: False) -> Iterator[Any]:
        """The tensors by native name, those that the adapter changes with its part added.

        Args:
            tensors: (native name, tensor) of a DiT.
            skipped: whether a tensor does not come on purpose.

        Raises:
            LoadError: the stream ends and a tensor that the adapter changes has not come.
        """
        fusion, waiting = self._open(), set(self._changes)
        for name, tensor in tensors:
            waiting.discard(name)
            # On a device the result stays there: it goes to the device next.
            yield name, fusion.fuse(name, tensor)
        lost = sorted(name for name in waiting if not skipped(name))
        if lost:
            raise LoadError(
                f"{self.adapter.file} changes {len(lost)} tensors that never came, first {lost[0]}",
                why="the clip would be neither the base model's nor the adapter's",
                path=str(self.adapter.file),
            )

    def close(self) -> None:
        """Let go of the adapter's tensors."""
        self._fusion = None

    def _open(self) -> Any:
        if self._fusion is None:
            try:
                self._fusion = FastH3WeightFusion.from_path(
                    self.adapter.file,
                    head_dim=self._config.attention_head_dim,
                    num_blocks=self._config.num_layers,
                    num_refiner_blocks=self._config.token_refiner_num_layers,
                )
            except ValueError as exc:
                raise AdapterError(f"adapter {self.adapter.file}", why=str(exc), fix="Use the dense release.") from exc
            if self._fusion is None:
                raise AdapterError(f"adapter {self.adapter.file}", why="the host does not know it as FastH3")
        return self._fusion


def release(fusion: Any) -> None:
    """Empty the host's own fusion of a pipeline, which would keep the adapter in memory for good."""
    for name in ("_patches", "_injections"):
        held = getattr(fusion, name, None)
        if isinstance(held, dict):
            held.clear()
