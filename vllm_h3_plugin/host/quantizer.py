# SPDX-License-Identifier: Apache-2.0
"""Between a checkpoint's tensor and a parameter's weight loader: move, order rows, quantize, place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from vllm_h3_plugin.checkpoint.loader import Placement, Shard, call_weight_loader
from vllm_h3_plugin.errors import LoadError
from vllm_h3_plugin.host.linear_method import QuantizedLinearMethod, stored
from vllm_h3_plugin.quantization.fp8 import weight_amax

Sink = Callable[[str, Shard, torch.Tensor], None]
"""Gets (parameter, shard, piece) as each piece is made; the tensor may be reused when the call returns."""

SCALE = "_scale"
"""What a quantized weight's name has more in its scales' name."""


class Quantizer:
    """Makes pieces of a checkpoint's tensors and hands them to the weight loaders."""

    def __init__(
        self,
        methods: Mapping[str, QuantizedLinearMethod],
        params: Mapping[str, torch.Tensor],
        scales: Mapping[str, torch.Tensor],
        sink: Sink,
    ) -> None:
        self._methods = methods
        self._params = params
        self._scales = scales
        self._sink = sink
        self._waiting: dict[str, list[tuple[Placement, torch.Tensor]]] = defaultdict(list)

    def stage(self, targets: tuple[Placement, ...], tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the parameter's device if its rows are ordered or quantized there."""
        worked_on = any(target.rows or target.param in self._methods for target in targets)
        return tensor.to(self._params[targets[0].param].device) if worked_on else tensor

    def put(self, target: Placement, param: torch.Tensor, rows: torch.Tensor) -> None:
        """Quantize and place; a weight with one scale for all its shards waits until the last has come."""
        method = self._methods.get(target.param)
        if method is None:
            self._place(target, param, rows)
        elif method.precision.per_channel:
            q, scale = method.backend.quantize_weight(rows, method.precision, path=method.path)
            if scale.shape != (rows.shape[0], 1):
                raise LoadError(
                    f"{method.path} was quantized with {scale.numel()} scales",
                    why=f"the recipe gives it {method.precision.value}: {rows.shape[0]} scales",
                    fix=f"Backend {method.backend.name} does not do what it says; run `vllm-h3 doctor`.",
                    path=method.path,
                )
            self._place(target, param, q)
            self._place(Placement(target.param + SCALE, target.shard), self._scales[target.param + SCALE], scale)
        else:
            self._put_with_shared_scale(method, target, param, rows)

    def _put_with_shared_scale(
        self, method: QuantizedLinearMethod, target: Placement, param: torch.Tensor, rows: torch.Tensor
    ) -> None:
        shards = self._waiting[target.param]
        # The source may reuse its memory before the last shard comes.
        shards.append((target, rows.clone()))
        wanted = {None: 1, 0: 2, 1: 2}.get(target.shard, 3)  # type: ignore[arg-type]
        if len(shards) < wanted:
            return
        del self._waiting[target.param]
        amax = torch.stack([weight_amax(rows, method.precision) for _, rows in shards]).amax(dim=0)
        for shard_target, shard_rows in shards:
            q, scale = method.backend.quantize_weight(shard_rows, method.precision, path=method.path, amax=amax)
            self._place(shard_target, param, q)
        self._place(Placement(target.param + SCALE), self._scales[target.param + SCALE], scale)

    def _place(self, target: Placement, param: torch.Tensor, piece: torch.Tensor) -> None:
        call_weight_loader(target, param, stored(param, piece))
        self._sink(target.param, target.shard, piece)
