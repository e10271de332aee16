# SPDX-License-Identifier: Apache-2.0
"""From files into the host's modules: a checkpoint's tensors, quantized on the way, or a snapshot's pieces as they are.

Both ways end in the same calls. What a parameter's weight loader is given is a *piece*: one shard of the whole,
unsharded parameter in its resident form. From a checkpoint, a piece is made: moved to the device, its rows ordered,
quantized with the scales of whole tensors. A snapshot is the list of pieces that a load made; to load it is to make the
same calls again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from vllm_h3_plugin.checkpoint.dit_placement import ROPE, Place, diffusers_placement, native_placement, rope_inv_freq
from vllm_h3_plugin.checkpoint.layout import DitConfig
from vllm_h3_plugin.checkpoint.loader import (
    LoadReport,
    Placement,
    Shard,
    call_weight_loader,
    fill,
    plan,
    tensors_of,
)
from vllm_h3_plugin.errors import LoadError
from vllm_h3_plugin.host.adaln import ADALN
from vllm_h3_plugin.host.adopt import adopt
from vllm_h3_plugin.host.linear_method import RESIDENT_DTYPE, QuantizedLinearMethod, is_filled, stored
from vllm_h3_plugin.host.quantizer import SCALE, Quantizer, Sink
from vllm_h3_plugin.quantization.plan import PrecisionPlan

Tensors = Iterable[tuple[str, torch.Tensor]]
AdalnSink = Callable[[str, torch.Tensor], None]
"""Gets (native name, tensor on the CPU) of each AdaLN tensor that is read for a table."""


@dataclass(frozen=True)
class Piece:
    """One call of a weight loader: which shard of which parameter, its shape and its dtype."""

    param: str
    shard: Shard
    shape: tuple[int, ...]
    dtype: torch.dtype


class PartLoader:
    """Fills one module of the pipeline.

    Args:
        module: the host's, its parameters unfilled.
        part: ``transformer`` or ``text_encoder``, for messages.
        params: what has to be filled, by name, without scales.
        tensors: (name, shape, dtype) of every tensor that the module takes from the checkpoint.
        place: where each goes.

    Raises:
        LoadError: tensors and parameters do not match one to one; nothing has been read.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        part: str,
        params: Mapping[str, torch.Tensor],
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        place: Place,
    ) -> None:
        self.module = module
        self.part = part
        self._params = params
        self._tensors = tensors
        self._methods: dict[str, QuantizedLinearMethod] = {
            f"{name}.weight": layer.quant_method
            for name, layer in module.named_modules()
            if isinstance(getattr(layer, "quant_method", None), QuantizedLinearMethod)
        }
        self._scales = {
            f"{param}{SCALE}": module.get_parameter(f"{param}{SCALE}") for param in self._methods if param in params
        }
        self.placements = plan(tensors, params, place)

    def pieces(self) -> tuple[Piece, ...]:
        """Every call that a load makes, in the order of the checkpoint's tensors."""
        result = []
        tensor_scales = set()
        for name, targets in self.placements.items():
            shape, dtype = self._tensors[name]
            for target in targets:
                whole = torch.empty(shape, dtype=dtype, device="meta")
                rows = target.rows(whole) if target.rows else whole
                method = self._methods.get(target.param)
                if method is None:
                    result.append(Piece(target.param, target.shard, tuple(rows.shape), dtype))
                    continue
                resident = RESIDENT_DTYPE[method.precision]
                result.append(Piece(target.param, target.shard, tuple(rows.shape), resident))
                scale = target.param + SCALE
                if method.precision.per_channel:
                    result.append(Piece(scale, target.shard, (rows.shape[0], 1), torch.float32))
                elif scale not in tensor_scales:
                    tensor_scales.add(scale)
                    result.append(Piece(scale, None, (1,), torch.float32))
        return tuple(result)

    def from_checkpoint(self, tensors: Tensors, *, sink: Sink = lambda param, shard, piece: None) -> LoadReport:
        """Fill from the checkpoint's tensors, quantizing those that the recipe quantizes.

        Args:
            tensors: (name, tensor on the CPU), each valid until the next is taken.
            sink: sees every piece.

        Raises:
            LoadError: a tensor comes twice, not at all, or does not fit.
            RecipeError: a weight holds NaN or infinity.
        """
        quantizer = Quantizer(self._methods, self._params, self._scales, sink)
        report = fill(self._params, tensors, self.placements, stage=quantizer.stage, put=quantizer.put)
        self._require_filled()
        return report

    def from_pieces(
        self, pieces: Iterable[tuple[str, Shard, torch.Tensor]], *, views: Mapping[str, torch.Tensor] | None = None
    ) -> LoadReport:
        """Fill from pieces that an earlier load made; there must be one for each of :meth:`pieces`.

        Args:
            views: parameter -> what takes its place as it is, whole; its pieces do not come.

        Raises:
            LoadError: a piece comes twice, not at all, or does not fit.
        """
        views = views or {}
        waiting = {(piece.param, piece.shard) for piece in self.pieces() if piece.param not in views}
        adopted = adopt(self.module, self.targets, views)
        self._params = {**self._params, **{name: p for name, p in adopted.items() if name in self._params}}
        self._scales = {**self._scales, **{name: p for name, p in adopted.items() if name in self._scales}}
        targets = self.targets
        count = nbytes = 0
        for param, shard, tensor in pieces:
            if (param, shard) not in waiting:
                raise LoadError(
                    f"piece {param}[{shard}] came twice or is not the model's", why="the snapshot is foreign"
                )
            waiting.discard((param, shard))
            call_weight_loader(Placement(param, shard), targets[param], stored(targets[param], tensor))
            count += 1
            nbytes += tensor.nbytes
        if waiting:
            param, shard = min(waiting, key=str)
            raise LoadError(f"piece {param}[{shard}] never came", why=f"{len(waiting)} pieces are missing")
        self._require_filled(frozenset(adopted))
        return LoadReport(frozenset(targets), count, nbytes + sum(view.nbytes for view in adopted.values()))

    def pack(self) -> None:
        """Give quantized layers their backend's resident form. After this nothing can be filled again."""
        for layer in self.module.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizedLinearMethod):
                method.process_weights_after_loading(layer)

    @property
    def targets(self) -> dict[str, torch.Tensor]:
        """What a load fills, by name, scales included."""
        return {**self._params, **self._scales}

    @property
    def filled(self) -> frozenset[str]:
        """Names of every parameter and buffer that a load fills, scales included."""
        return frozenset((*self._params, *self._scales))

    def _require_filled(self, adopted: frozenset[str] = frozenset()) -> None:
        """A weight loader that was called and placed only a part of what it was given is noticed here."""
        for name, tensor in tensors_of(self.module).items():
            if tensor.is_meta:
                raise LoadError(f"{self.part}.{name} was never materialized", why="its tensors did not come", path=name)
        for param, method in self._methods.items():
            if {param, param + SCALE} <= adopted:
                continue
            if param in self._params and not is_filled(self._params[param], self._scales[param + SCALE], method.method):
                raise LoadError(
                    f"{self.part}.{param.removesuffix('.weight')} is filled only in part",
                    why="its weight loader was called for every shard and left rows or scales as they were",
                    fix="Another plugin or a host of another version changed the layer; run `vllm-h3 doctor`.",
                    path=f"{self.part}.{param}",
                )


def dit_loader(
    dit: torch.nn.Module,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    config: DitConfig,
    diffusers: bool,
) -> PartLoader:
    """The loader of the host's DiT, for either layout.

    Args:
        dit: the host's ``MiniMaxH3DiTModel``; one without AdaLN weights takes no AdaLN tensors.
        tensors: (shape, dtype) of every tensor of the checkpoint's DiT.
        config: the checkpoint's DiT config.
        diffusers: whether the names are those of the Diffusers layout.

    Raises:
        LoadError: see :class:`PartLoader`.
    """
    place = dit_place(config, diffusers)
    wanted = dict(tensors)
    if diffusers:
        wanted[ROPE] = ((config.rope_inv_freq_len,), torch.float32)
    params = {name: tensor for name, tensor in tensors_of(dit).items() if not name.endswith(f".weight{SCALE}")}
    if not any(ADALN in name for name in params):
        wanted = {name: facts for name, facts in wanted.items() if adaln_name(name, place) is None}
    return PartLoader(dit, "transformer", params, wanted, place)


def dit_place(config: DitConfig, diffusers: bool) -> Place:
    """Where tensors of a DiT go, for either layout."""
    return diffusers_placement(config) if diffusers else native_placement(config)


def adaln_name(name: str, place: Place) -> str | None:
    """Native name of an AdaLN tensor of either layout; None for any other tensor."""
    targets = place(name) or ()
    return next((target.param for target in targets if ADALN in target.param), None)


def dit_stream(
    tensors: Tensors, *, config: DitConfig, diffusers: bool, adaln: AdalnSink | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A DiT's tensors for :meth:`PartLoader.from_checkpoint`: AdaLN is led aside if asked, and RoPE is put in.

    Args:
        adaln: gets the AdaLN tensors; None: they stay in the stream.
    """
    place = dit_place(config, diffusers)
    for name, tensor in tensors:
        native = adaln_name(name, place) if adaln else None
        if adaln is not None and native is not None:
            adaln(native, tensor)
        else:
            yield name, tensor
    if diffusers:
        yield ROPE, rope_inv_freq(config.rope_inv_freq_len)


def text_encoder_loader(encoder: Any, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> PartLoader:
    """The loader of the host's text encoder, whose own name map says what goes where (encoder.py)."""

    def place(name: str) -> tuple[Placement, ...]:
        mapped = encoder._map_weight_name(name)
        return () if mapped is None else (Placement(*mapped),)

    params = {name: p for name, p in encoder.named_parameters() if not name.endswith(f".weight{SCALE}")}
    return PartLoader(encoder, "text_encoder", params, tensors, place)


def load_dit(
    dit: torch.nn.Module, source: Mapping[str, torch.Tensor], *, config: DitConfig, diffusers: bool
) -> LoadReport:
    """Fill a DiT from tensors in memory: for the contract checks, tests and measurements."""
    loader = dit_loader(dit, facts_of(source), config=config, diffusers=diffusers)
    resident = any(ADALN in name for name in loader.filled)
    drop: AdalnSink | None = None if resident else lambda name, tensor: None
    return loader.from_checkpoint(dit_stream(source.items(), config=config, diffusers=diffusers, adaln=drop))


def facts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of tensors in memory."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_precisions(module: torch.nn.Module, part: str, plan: PrecisionPlan) -> dict[str, int]:
    """Hold every loaded linear layer against the plan: element type and number of scales.

    Args:
        module: a loaded DiT or text encoder.
        part: ``transformer`` or ``text_encoder``.

    Returns:
        Number of linear layers by precision.

    Raises:
        LoadError: a layer is resident in another precision than the recipe gives it.
    """
    counts: dict[str, int] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, (LinearBase, torch.nn.Linear)):
            continue
        path = f"{part}.{name}"
        precision = plan[path].precision
        wanted, found = RESIDENT_DTYPE[precision], layer.weight.dtype
        scales = getattr(layer, "weight_scale", None)
        rows = max(layer.weight.shape) if scales is None else layer.output_size_per_partition
        want_scales = precision.scale_count(rows)
        if found is not wanted or (0 if scales is None else scales.numel()) != want_scales:
            raise LoadError(
                f"{path} is resident as {found} with {0 if scales is None else scales.numel()} scales",
                why=f"the recipe gives it {precision.value}: {wanted} with {want_scales} scales",
                fix="Another plugin or a host of another version changed the layer; run `vllm-h3 doctor`.",
                path=path,
            )
        counts[precision.value] = counts.get(precision.value, 0) + 1
    return counts


def shapes_of(part: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of a part's tensors that are used, from its headers."""
    from vllm_h3_plugin.checkpoint.reader import TORCH_DTYPES

    records: Sequence[Any] = [record for record in part.tensors if record.name not in part.ignored]
    return {record.name: (record.shape, TORCH_DTYPES[record.dtype]) for record in records}
