# SPDX-License-Identifier: Apache-2.0
"""The host's pipeline in this process, without a server, built and loaded by the same calls as in a worker."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed import parallel_state

from vllm_h3_plugin.checkpoint.inventory import Inventory
from vllm_h3_plugin.host.adaln import finish_loading
from vllm_h3_plugin.host.bench.reads import Cold, make_cold, share_of
from vllm_h3_plugin.host.measured import measured_memory
from vllm_h3_plugin.host.pipeline import MiniMaxH3Pipeline
from vllm_h3_plugin.host.weights import Loaded
from vllm_h3_plugin.settings import PREFIX

SNAPSHOT_RING_BYTES = 256 << 20
"""Host memory in which pieces wait for the disk while a snapshot is written (checkpoint/snapshot_writer.py)."""

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class BenchedPipeline(MiniMaxH3Pipeline):
    """The plugin's pipeline; what a load did stays here instead of going to the server's info."""

    loaded: Loaded

    def _report(self, loaded: Loaded) -> None:
        self.loaded = loaded


@dataclass(frozen=True)
class LoadRun:
    """One load of the whole pipeline.

    Attributes:
        origin: ``checkpoint`` or ``snapshot``; ``detail`` says which, or what became of one.
        nbytes: of tensors read by the weights phase.
        build_s: the host's constructor, VAEs included.
        weights_s: the weights phase: DiT and text encoder filled, default table ready.
        ready_s: all, the host's last work on the layers included.
        seconds: of the weights phase, by part.
        vaes: bytes, seconds and way of each VAE.
        parts: bytes resident by part.
        resident_bytes: on the device, of this pipeline.
        device_peak_bytes: the most on the device during the load; None on the CPU.
        host_growth_bytes: the most by which the process grew, the model's own tensors left out; None: see
            ``host_reason``.
        buffer_bytes: host memory that the load may use for buffers.
        cold: the files before it.
        cached: the files after it.
    """

    origin: str
    detail: str
    nbytes: int
    build_s: float
    weights_s: float
    ready_s: float
    seconds: Mapping[str, float]
    vaes: Sequence[Mapping[str, Any]]
    parts: Mapping[str, int]
    resident_bytes: int
    device_peak_bytes: int | None
    host_growth_bytes: int | None
    host_reason: str
    buffer_bytes: int
    cold: Cold
    cached: Cold

    @property
    def rate(self) -> float:
        """Bytes a second of the weights phase."""
        return self.nbytes / self.weights_s


@contextmanager
def omni_world() -> Iterator[None]:
    """vLLM-Omni's own group of all ranks, which the pipeline's constructor asks for. Needs ``single_rank`` around."""
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0)
    try:
        yield
    finally:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None


@contextmanager
def settings_of(**values: object) -> Iterator[None]:
    """``H3_*`` variables while this is open, as a server would be given them."""
    names = {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def weight_files(inventory: Inventory) -> list[Path]:
    """Weight files of every part, VAEs included."""
    return [file.path for partition in inventory.partitions for part in partition.parts for file in part.files]


def load(
    inventory: Inventory, device: torch.device, files: Sequence[Path], **settings: object
) -> tuple[BenchedPipeline, LoadRun]:
    """Build and load a pipeline from cold files. Needs ``single_rank`` and :func:`omni_world` around it.

    Args:
        files: all that may be read: the checkpoint's and, for a restart, the snapshot's and the table's.
        settings: by name without the prefix, such as ``snapshot="off"``.

    Raises:
        H3Error: whatever stops a server's start.
    """
    release()
    cold = make_cold(files)
    with settings_of(**settings):
        base = _start_device(device)
        host = _HostPeak()
        started = time.perf_counter()
        config = OmniDiffusionConfig.from_kwargs(model=str(inventory.path), num_gpus=1, trust_remote_code=True)
        config.enrich_config()
        with device, _default_dtype(config.dtype):
            pipeline = BenchedPipeline(od_config=config)
        built = time.perf_counter()
        pipeline.load_weights(())
        _wait(device)
        filled = time.perf_counter()
        growth = host.growth()
    memory = measured_memory(pipeline)
    parts: dict[str, int] = memory["parts"]
    cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) - base if cuda else None
    cached = share_of(files)
    begun = time.perf_counter()
    finish_loading(pipeline)
    _wait(device)
    loaded = pipeline.loaded
    buffers = min(pipeline._settings.read_buffer_mib << 20, loaded.nbytes)
    if loaded.origin == "checkpoint" and "written" in loaded.detail:
        buffers += min(SNAPSHOT_RING_BYTES, loaded.nbytes)
    if growth is not None and not cuda:
        growth -= sum(parts.values())
    return pipeline, LoadRun(
        origin=loaded.origin,
        detail=loaded.detail,
        nbytes=loaded.nbytes,
        build_s=built - started,
        weights_s=filled - built,
        ready_s=filled - started + time.perf_counter() - begun,
        seconds=dict(loaded.seconds),
        vaes=[asdict(vae) for vae in pipeline._vaes],
        parts=parts,
        resident_bytes=memory["resident_bytes"] - base,
        device_peak_bytes=peak,
        host_growth_bytes=growth,
        host_reason=host.reason,
        buffer_bytes=buffers,
        cold=cold,
        cached=cached,
    )


def release() -> None:
    """Give back what a pipeline that nobody holds any more had on the device and in this process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)


class _HostPeak:
    """By how much this process grows at its largest, from now on."""

    def __init__(self) -> None:
        self.reason = ""
        try:
            _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM to what is resident now
            self._before = _status("VmRSS")
        except OSError as exc:
            self.reason = f"{_CLEAR_REFS} cannot be written: {exc.strerror}"

    def growth(self) -> int | None:
        return None if self.reason else _status("VmHWM") - self._before


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _start_device(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
