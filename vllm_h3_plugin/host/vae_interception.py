# SPDX-License-Identifier: Apache-2.0
"""What a VAE's own code meets while it is built: empty parameters, and files that are read straight to the device.

Everything that is replaced here is put back when the block is left, in names that were imported meanwhile too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate.utils
import safetensors
import torch
from accelerate import init_empty_weights
from torch import nn

from vllm_h3_plugin.checkpoint.inventory import PartInventory
from vllm_h3_plugin.checkpoint.reader import Progress, ReadOptions, WeightSource
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord
from vllm_h3_plugin.errors import CheckpointError

_PYTORCH = frozenset({"pt", "torch", "pytorch"})  # safetensors' names for it


class VaeFiles:
    """One VAE's weight files, read to one device.

    Attributes:
        taken: names of the tensors that were handed out.
        verifies: whether files are held against digests.
        fault: why a file could not be read, whatever the VAE's own code made of it.
    """

    def __init__(
        self,
        part: PartInventory,
        device: torch.device,
        *,
        progress: Progress,
        options: ReadOptions | None,
        digests: Mapping[Path, str] | None,
    ) -> None:
        self.part = part
        self.device = device
        self.taken: set[str] = set()
        self.fault: CheckpointError | None = None
        self.verifies = digests is not None
        self._digests = digests
        self._unverified = {file.path: file for file in part.files} if self.verifies else {}
        self._by_path = {os.path.realpath(file.path): file for file in part.files}
        self._progress = progress
        # On the CPU the tensors that are read are those that stay: they cannot lie in a buffer that is used again.
        self._options = None if device.type == "cpu" else options
        self._done = 0

    def find(self, path: Any) -> ShardFile | None:
        """The weight file of that name, through links."""
        return self._by_path.get(os.path.realpath(path)) if isinstance(path, str | os.PathLike) else None

    def read_all(self, file: ShardFile) -> dict[str, torch.Tensor]:
        """The file's tensors, on the device, each with memory of its own; the file is held against its digest."""
        tensors = self._read(file, self._digests)
        self._unverified.pop(file.path, None)
        return tensors

    def read_one(self, file: ShardFile, record: TensorRecord) -> torch.Tensor:
        """One tensor of the file, likewise; no digest."""
        return self._read(replace(file, tensors=(record,)), None)[record.name]

    def verify_the_rest(self) -> None:
        """Hold those files against their digests that were not read as a whole.

        Raises:
            CheckpointError: a file has another digest, or none.
        """
        for file in self._unverified.values():
            part = replace(self.part, files=(file,), tensors=file.tensors)
            for _ in WeightSource(part, options=ReadOptions(), file_digests=self._digests):
                pass

    def _read(self, file: ShardFile, digests: Mapping[Path, str] | None) -> dict[str, torch.Tensor]:
        part = replace(self.part, files=(file,), tensors=file.tensors)
        try:
            source = WeightSource(part, options=self._options, progress=self._advance(self._done), file_digests=digests)
            # The host may be under a default device; the reader's buffers are host memory.
            with torch.device("cpu"):
                tensors = {name: tensor.to(self.device) for name, tensor in source}
        except CheckpointError as exc:
            self.fault = exc
            raise
        self._done += sum(record.nbytes for record in file.tensors)
        self.taken |= tensors.keys()
        return tensors

    def _advance(self, before: int) -> Progress:
        return lambda done, total: self._progress(before + done, self.part.nbytes)


class _OpenedFile:
    """What ``safetensors.safe_open`` returns, for a file of a VAE."""

    def __init__(self, files: VaeFiles, file: ShardFile, metadata: Callable[[], dict[str, str] | None]) -> None:
        self._files = files
        self._file = file
        self._records = {record.name: record for record in file.tensors}
        self._whole: dict[str, torch.Tensor] = {}
        self.metadata = metadata

    def __enter__(self) -> _OpenedFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._whole = {}

    def keys(self) -> list[str]:
        """Names in alphabetical order."""
        return sorted(self._records)

    def offset_keys(self) -> list[str]:
        """Names in the order of the file."""
        return list(self._records)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors; ``safetensors.torch.load_file`` ends here."""
        return self._files.read_all(self._file)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        record = self._record(name)
        if not self._files.verifies:
            return self._files.read_one(self._file, record)
        # A digest takes the whole file, so the first tensor brings the others.
        if not self._whole:
            self._whole = self.get_tensors()
        return self._whole[name]

    def get_slice(self, name: str) -> _Slice:
        """One tensor, read when it is indexed."""
        return _Slice(self, self._record(name))

    def _record(self, name: str) -> TensorRecord:
        if name not in self._records:
            raise safetensors.SafetensorError(f"File does not contain tensor {name}")
        return self._records[name]


@dataclass(frozen=True)
class _Slice:
    file: _OpenedFile
    record: TensorRecord

    def get_shape(self) -> list[int]:
        return list(self.record.shape)

    def get_dtype(self) -> str:
        return self.record.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.file.get_tensor(self.record.name)[index]


@contextmanager
def intercepted(files: VaeFiles) -> Iterator[None]:
    """Meta parameters, streamed files and assignment instead of copies, until this is left."""
    register, fill = nn.Module.register_parameter, nn.Module._load_from_state_dict
    open_mapped, place = safetensors.safe_open, accelerate.utils.set_module_tensor_to_device
    active = True
    with init_empty_weights(include_buffers=False):
        register_empty = nn.Module.register_parameter

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # Once there are weights, a new parameter may be made of them (remove_weight_norm): it keeps its value.
        (register if files.taken else register_empty)(module, name, param)

    def load_from_state_dict(module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        before = {name: tensor.dtype for name, tensor in _own_tensors(module)}
        fill(module, state, prefix, {**metadata, "assign_to_params_buffers": True}, *rest)
        for name, tensor in _own_tensors(module):
            if tensor.dtype is not before.get(name, tensor.dtype):
                tensor.data = tensor.data.to(before[name])  # as a copy into the old tensor would have done

    def safe_open(filename: Any, framework: str, *args: Any, **kwargs: Any) -> Any:
        file = files.find(filename) if active and framework in _PYTORCH else None
        if file is None:
            return open_mapped(filename, framework, *args, **kwargs)

        def metadata() -> dict[str, str] | None:
            with open_mapped(filename, framework) as mapped:
                return mapped.metadata()

        return _OpenedFile(files, file, metadata)

    def set_module_tensor(module: nn.Module, name: str, device: Any, value: Any = None, **kwargs: Any) -> None:
        # diffusers' from_pretrained places on the CPU what it was not told to place elsewhere.
        arrived = active and isinstance(value, torch.Tensor) and value.device.type == files.device.type
        place(module, name, value.device if arrived else device, value=value, **kwargs)

    try:
        with (
            replaced(nn.Module, "register_parameter", register_parameter),
            replaced(nn.Module, "_load_from_state_dict", load_from_state_dict),
            _swapped_everywhere(open_mapped, safe_open),
            _swapped_everywhere(place, set_module_tensor),
        ):
            yield
    finally:
        active = False


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor) for name, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None
    ]


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _swapped_everywhere(function: Any, stand_in: Any) -> Iterator[None]:
    """Replace a function under every name that a module has for it, those imported in the meantime included."""
    _swap(function, stand_in)
    try:
        yield
    finally:
        _swap(stand_in, function)


def _swap(old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for name in [name for name, value in list(namespace.items()) if value is old]:
            namespace[name] = new
