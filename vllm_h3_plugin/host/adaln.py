# SPDX-License-Identifier: Apache-2.0
"""Tables for a DiT without AdaLN weights: built through the host's own projection, found again, made the active one.

To build a table, the host's projection is made for one layer at a time, filled through its own weight loader and called
with the rows of one step at a time, so that each value is what the eager host computes, to the bit, on any device and
at any tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as host_dit

from vllm_h3_plugin.checkpoint.loader import Placement, call_weight_loader
from vllm_h3_plugin.conditioning.schedule import Schedule
from vllm_h3_plugin.conditioning.store import TableStore
from vllm_h3_plugin.conditioning.table import FINAL, AdalnTable, TableBuilder, TableShape
from vllm_h3_plugin.host.adaln_modules import HostProjection, HostTimeEmbedder
from vllm_h3_plugin.host.worker_memory import release_host_buffers

logger = init_logger(__name__)

ADALN = ".adaln_proj.linear."
"""Part of every native name of an AdaLN tensor."""

# (native name, tensor) of every AdaLN tensor; the second argument reports bytes done and in all.
Stream = Callable[[Callable[[int, int], None]], Iterable[tuple[str, torch.Tensor]]]


class LayerProjections:
    """Projects AdaLN layers as their tensors arrive, one layer's weights on the device at a time.

    Args:
        dit: a DiT without AdaLN weights; it may be unfilled.
        schedule: what the table is for.
        embedder: the four tensors of ``time_embedder`` by their native names.
    """

    def __init__(self, dit: Any, schedule: Schedule, embedder: Mapping[str, torch.Tensor]) -> None:
        self._arch = dit.arch
        self._device = dit.time_embedder.proj_in.weight.device
        self._shape = TableShape(
            self._arch.num_layers, self._arch.adaln_out_features, self._arch.final_adaln_out_features
        )
        with torch.inference_mode():
            self._builder = TableBuilder(self._shape, schedule, self._time_embedder(embedder), self._device)
        self._open: dict[str, tuple[nn.Module, set[str]]] = {}

    @torch.inference_mode()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one AdaLN tensor.

        Args:
            name: native, such as ``blocks.0.adaln_proj.linear.weight``.
            tensor: on the CPU; not needed any more when this returns.
        """
        module, _, parameter = name.rpartition(".")
        if module not in self._open:
            projection = self._projection(module)
            self._open[module] = projection, {key for key, _ in projection.linear.named_parameters()}
        projection, waiting = self._open[module]
        param = getattr(projection.linear, parameter)
        call_weight_loader(Placement(name), param, tensor)
        waiting.discard(parameter)
        if not waiting:
            del self._open[module]
            self._project(self._shape.layer_of(module), projection)

    def finish(self) -> AdalnTable:
        """The table, when every layer has come."""
        return self._builder.finish()

    def _time_embedder(self, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        """The host's embedder, apart from the DiT's own, which is not ready before the host has finished loading."""
        with _host_defaults(self._device):
            embedder: nn.Module = HostTimeEmbedder(self._arch, prefix="time_embedder")
        params = dict(embedder.named_parameters())
        for name, tensor in tensors.items():
            name = name.removeprefix("time_embedder.")
            call_weight_loader(Placement(name), params.pop(name), tensor)
        if params:
            raise AssertionError(f"tensors of the timestep embedder are missing: {sorted(params)}")
        finish_loading(embedder)
        return embedder

    def _projection(self, module: str) -> nn.Module:
        block = self._shape.layer_of(module) != FINAL
        with _host_defaults(self._device):
            return HostProjection(
                self._arch,
                self._shape.block if block else self._shape.final,
                None,
                expand_ratio=6 if block else 2,
                modality_num=host_dit.MINIMAX_H3_ADALN_MODALITY_NUM if block else 1,
                prefix=module.removesuffix(".linear"),
            )

    def _project(self, layer: int, projection: nn.Module) -> None:
        finish_loading(projection)

        def project(embedding: torch.Tensor) -> torch.Tensor:
            return torch.cat(projection(embedding), dim=-1).view(embedding.shape[0], -1)

        self._builder.add(layer, project)
        for param in projection.parameters():
            # A host layer is a reference cycle (parameter, weight loader, layer) and would keep its weights until the
            # collector comes by: at true width every layer's at once.
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)


class AdalnTables:
    """Gives a DiT the table of each request.

    Args:
        dit: built under :func:`adaln_from_tables`, loaded.
        store: where its tables are kept.
        stream: reads the AdaLN tensors anew.
        embedder: reads the four tensors of ``time_embedder``, by their native names.
    """

    def __init__(
        self, dit: Any, store: TableStore, stream: Stream, embedder: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        self._dit = dit
        self.store = store
        self._stream = stream
        self._embedder = embedder
        self.built = 0
        """Tables that were built rather than found."""

    @property
    def active(self) -> AdalnTable | None:
        """The table that the next forward reads."""
        table: AdalnTable | None = self._dit.time_embedder.table
        return table

    def activate(self, schedule: Schedule, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Make a schedule's table the one that the DiT reads; build it if it is not there.

        Args:
            progress: called with bytes read and in all while it is built.
        """
        active = self.active
        if active is not None and active.schedule.groups == schedule.groups:
            return
        table = self.store.resident(schedule)
        if table is None:
            self._dit.time_embedder.table = active = None  # its memory may be needed
            table = self._find(schedule, lambda: self._build(schedule, progress))
        self._dit.time_embedder.table = table

    def begin(self, schedule: Schedule) -> LayerProjections:
        """Begin to build a table from tensors that somebody else reads."""
        return LayerProjections(self._dit, schedule, self._embedder())

    def adopt(self, table: AdalnTable) -> None:
        """Take a table that was built while the weights were loaded, and keep its file."""
        self.built += 1
        self.store.keep(table)
        if _is_first_rank():
            self.store.save(table)
        self._dit.time_embedder.table = table

    def _find(self, schedule: Schedule, build: Callable[[], AdalnTable]) -> AdalnTable:
        if get_tensor_model_parallel_world_size() == 1:
            return self.store.get(schedule, build)
        # A projection is a collective there: all ranks build, or none does, and none waits for another's lock.
        self.store.make_room(schedule)
        table = self.store.load(schedule)
        found: list[bool] = [False] * get_tensor_model_parallel_world_size()
        torch.distributed.all_gather_object(found, table is not None, group=get_tp_group().cpu_group)
        if table is None or not all(found):
            table = None  # its memory is needed
            table = build()
            if _is_first_rank():
                self.store.save(table)
        self.store.keep(table)
        return table

    def _build(self, schedule: Schedule, progress: Callable[[int, int], None]) -> AdalnTable:
        logger.info("AdaLN table of %s: %d rows are built from the weights on disk", schedule.label, schedule.rows)
        layers = self.begin(schedule)
        for name, tensor in self._stream(progress):
            layers.add(name, tensor)
        self.built += 1
        release_host_buffers()
        return layers.finish()


def finish_loading(module: nn.Module) -> None:
    """What the host does once all tensors have come (diffusers_loader.py ``_process_weights_after_loading``)."""
    for layer in module.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


@contextmanager
def _host_defaults(device: torch.device) -> Iterator[None]:
    """The default device and dtype that the host builds its layers under."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


def math_identity(device: torch.device) -> Mapping[str, object]:
    """Everything beside weights and timesteps that may decide how a projection rounds."""
    facts: dict[str, object] = {
        "torch": str(torch.__version__),
        "device": device.type,
        "tensor_parallel": get_tensor_model_parallel_world_size(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
            "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "reduced_precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }
    else:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        facts["threads"] = torch.get_num_threads()
    return facts


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
