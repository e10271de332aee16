# SPDX-License-Identifier: Apache-2.0
"""Read the VAEs in the host's constructor without a second copy of them in host memory or in the page cache.

The host builds each VAE on the CPU, fills it from a mapped file and then moves it (``minimax_h3/vae.py``
``_load_remote_component``): 10 GiB of random numbers, 10 GiB of cached pages and 10 GiB on the device. How a VAE reads
its weights is code that comes with the checkpoint, so nothing about it can be planned. Instead, while that code runs:

- parameters are created on the meta device,
- safetensors files of this VAE are opened by a stand-in that reads tensors with :class:`WeightSource` and puts each on
  the target device,
- modules take the tensors that they are given, where they would have copied them.

If a VAE's code does not go along with that, it is built once more in the host's own way, and the reason is kept.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm
from vllm.logger import init_logger
from vllm_omni.diffusion.models.minimax_h3 import vae as host_vae

from vllm_h3_plugin.checkpoint.inventory import PartInventory, PartitionInventory
from vllm_h3_plugin.checkpoint.page_cache import drop
from vllm_h3_plugin.checkpoint.reader import Progress, ReadOptions
from vllm_h3_plugin.host.vae_interception import VaeFiles, intercepted, replaced

logger = init_logger(__name__)

# The host's functions that build a VAE from its folder, their first argument. 0.28 has the first alone.
_HOST_LOADERS = ("_load_remote_component", "_load_video_vae_encoder", "_load_audio_vae_encoder")


@dataclass(frozen=True)
class VaeLoad:
    """How one VAE was read.

    Attributes:
        part: ``video_vae`` or ``audio_vae``.
        streamed: False: in the host's own way, through host memory and mapped files.
        reason: why it was not streamed; empty if it was.
        nbytes: bytes of its tensors on disk.
        seconds: for building and filling it, a failed attempt included.
    """

    part: str
    streamed: bool
    reason: str
    nbytes: int
    seconds: float


def _no_progress(name: str) -> Progress:
    return lambda done, total: None


@contextmanager
def streamed_vaes(
    partitions: Sequence[PartitionInventory],
    device: torch.device,
    *,
    progress: Callable[[str], Progress] = _no_progress,
    options: ReadOptions | None = None,
    file_digests: Mapping[Path, str] | None = None,
) -> Iterator[list[VaeLoad]]:
    """While this is open, the host's VAE adapters get modules whose tensors were streamed to ``device``.

    Args:
        partitions: those of the inventory; a VAE is found among them by its folder.
        device: where the host moves the VAEs. Another one costs a copy, not correctness.
        progress: called with a name at the start of each VAE; returns what :class:`WeightSource` reports to.
        options: how the files are read to a device. On the CPU each tensor is read into memory of its own instead.
        file_digests: path as in the inventory -> SHA-256 of the file. Every file of a VAE is held against its digest,
            whatever way the VAE was read.

    Yields:
        A list that holds one entry for each VAE that was built.

    Raises (from the host's constructor):
        CheckpointError: a VAE's file changed, cannot be read, or has another digest or none.
    """
    loads: list[VaeLoad] = []

    def streaming(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def load_streamed(component_path: str, *args: Any, **kwargs: Any) -> nn.Module:
            part = _part_at(partitions, Path(component_path))
            if part is None:
                return load(component_path, *args, **kwargs)
            report = progress(f"loading {part.name}")
            files = VaeFiles(part, device, progress=report, options=options, digests=file_digests)
            module, result = _build(lambda: load(component_path, *args, **kwargs), files)
            loads.append(result)
            return module

        return load_streamed

    with ExitStack() as stack:
        for name in _HOST_LOADERS:
            if hasattr(host_vae, name):
                stack.enter_context(replaced(host_vae, name, streaming(getattr(host_vae, name))))
        yield loads


def _part_at(partitions: Sequence[PartitionInventory], folder: Path) -> PartInventory | None:
    parts = (part for partition in partitions for part in partition.parts)
    return next((part for part in parts if part.path.exists() and part.path.samefile(folder)), None)


def _build(build: Callable[[], nn.Module], files: VaeFiles) -> tuple[nn.Module, VaeLoad]:
    started = time.perf_counter()
    try:
        module, reason = _try_streamed(build, files)
        if module is None:
            # What the attempt left behind is as large as the VAE.
            gc.collect()
            logger.warning("%s is read in the host's way, through host memory: %s", files.part.name, reason)
            module = build()
        files.verify_the_rest()
    finally:
        drop(file.path for file in files.part.files)
    seconds = time.perf_counter() - started
    load = VaeLoad(files.part.name, not reason, reason, files.part.nbytes, round(seconds, 3))
    if load.streamed:
        logger.info("%s: %.2f GiB streamed to %s in %.1f s", load.part, load.nbytes / 2**30, files.device, seconds)
    return module, load


def _try_streamed(build: Callable[[], nn.Module], files: VaeFiles) -> tuple[nn.Module | None, str]:
    """The VAE, or None and why it cannot be had this way. No exception stays alive to hold on to its tensors."""
    try:
        with intercepted(files):
            module = build()
        reason = "" if files.fault else _shortcoming(module, files)
        if not reason and not files.fault:
            return module.to(files.device), ""
    except torch.OutOfMemoryError:
        raise  # the host's way needs as much
    except Exception as exc:  # noqa: BLE001 - the VAE's code is the checkpoint's and may raise anything
        reason = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
    if files.fault:
        # A broken file stays broken when it is mapped; then it ends the process with SIGBUS.
        raise files.fault
    return None, reason


def _shortcoming(module: nn.Module, files: VaeFiles) -> str:
    """Why this module is not the one that the host would have built; empty if it is."""
    if not files.taken:
        return "its code does not read its weights through safetensors"
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            return f"{name} got no value from its files"
    for path, child in module.named_modules():
        _refresh_weight_norm(child)
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules") and _holds_meta(value):
                return f"{path}.{name} was computed from a parameter before that had a value"
    own = module.state_dict().keys()
    for record in files.part.tensors:
        # The host wraps a VAE's network, so names in the module may be longer than in the file.
        wanted = any(name == record.name or name.endswith(f".{record.name}") for name in own)
        if wanted and record.name not in files.taken:
            return f"tensor {record.name} was not read through safetensors"
    return ""


def _refresh_weight_norm(module: nn.Module) -> None:
    # torch.nn.utils.weight_norm keeps the product as a plain attribute and computes it anew before each forward; the
    # one from construction was made of empty parameters.
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            with torch.no_grad():
                setattr(module, hook.name, hook.compute_weight(module))


def _holds_meta(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(_holds_meta(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_meta(item) for item in value)
