# SPDX-License-Identifier: Apache-2.0
"""Tensors over a read-only mapping, which no operator of torch can write to.

``torch.frombuffer`` gives a writable tensor over a mapping that is not: a write kills the process with SIGSEGV (tried
in torch 2.13). A private mapping would take the write and silently keep a copy of the page. Here every
operator passes ``__torch_dispatch__``, which reads from its schema whether it writes one of these tensors, and raises
before it runs. Views of such a tensor are such tensors. Ways round the operators are closed one by one: storage,
DLPack, NumPy. What is left is what no operator sees, and a write through it is SIGSEGV: ``data_ptr()``, a capsule of
``torch.utils.dlpack.to_dlpack``, and a plain tensor that was given one of these by ``plain.data = mapped`` (torch
copies what the tensor looks at and not what it is). Make a parameter of it instead: ``torch.nn.Parameter(mapped)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from vllm_h3_plugin.errors import LoadError


class ReadOnlyTensor(torch.Tensor):
    """A view of memory that cannot be written; make it with :func:`read_only`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that only reads; results that share the memory are read-only too.

        Raises:
            LoadError: it writes one of these tensors; nothing has run.
        """
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        for position, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[position] if position < len(args) else None)
                if any(isinstance(tensor, ReadOnlyTensor) for tensor in _flat(value)):
                    _refuse(str(func))
        if func.overloadpacket is torch.ops.aten.set_:
            # A plain tensor that looks at the mapping would be written without passing here again.
            _refuse(str(func))
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        shared = {_address(tensor) for tensor in _flat((*args, *kwargs.values())) if isinstance(tensor, ReadOnlyTensor)}
        return _closed(result, shared)

    def untyped_storage(self) -> NoReturn:
        """Refused: what it returns can be written.

        Raises:
            LoadError: always.
        """
        _refuse("untyped_storage()")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        _refuse("DLPack")

    def as_subclass(self, cls: Any) -> NoReturn:
        """Refused, as :meth:`untyped_storage`."""
        _refuse("as_subclass()")

    def numpy(self, **kwargs: Any) -> NoReturn:
        """Refused, as :meth:`untyped_storage`."""
        _refuse("numpy()")

    def __array__(self, dtype: Any = None) -> NoReturn:
        _refuse("numpy()")

    def tolist(self) -> Any:
        """The values."""
        return self.clone().tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"ReadOnlyTensor({self.clone()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def read_only(tensor: torch.Tensor) -> ReadOnlyTensor:
    """A tensor that shares memory with ``tensor`` and cannot be written. ``tensor`` itself must not be kept."""
    return torch.Tensor._make_subclass(ReadOnlyTensor, tensor, False)


def _refuse(what: str) -> NoReturn:
    raise LoadError(
        f"{what} would write a tensor of the shared read-only base",
        why="all ranks of this machine map the same bytes",
        fix="Write to a copy: tensor.clone().",
    )


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _address(tensor: torch.Tensor) -> int:
    return int(torch.Tensor.untyped_storage(tensor).data_ptr())


def _closed(result: Any, shared: set[int]) -> Any:
    """The result with whatever shares memory with an argument made read-only: an operator's schema need not tell."""
    if isinstance(result, torch.Tensor):
        if isinstance(result, ReadOnlyTensor) or result.layout is not torch.strided or result.is_meta:
            return result
        return read_only(result) if _address(result) in shared else result
    if isinstance(result, (list, tuple)):
        closed = [_closed(item, shared) for item in result]
        return type(result)(closed) if type(result) in (list, tuple) else type(result)(*closed)
    return result
