# SPDX-License-Identifier: Apache-2.0
"""torch_npu's own declarations as operators on the CPU: its schemas and its meta functions, without torch_npu.

Schemas are strings in ``libtorch_npu.so``. Meta functions are in ``_meta_registrations.py``, which is run here with
stand-ins for the few modules that it imports and with a ``Library`` that only takes notes, so that nothing of torch
itself is changed. Both are put together in a namespace of the tests' own: torch's dispatcher then checks a call's
arguments against the schema, and the meta function its shapes and dtypes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tools.oracle import LIBRARY, META, oracle_folder, wheel_pin

NAMESPACE = "h3_npu_oracle"


def read_schemas(names: Iterable[str], library: Path | None = None) -> dict[str, str]:
    """Schemas of operators, as strings in the library."""
    data = (library or oracle_folder(wheel_pin()) / LIBRARY).read_bytes()
    found = {}
    for name in names:
        matches = set(re.findall(rb"\x00(" + name.encode() + rb"\([ -~]*\) -> [ -~]+?)\x00", data))
        assert len(matches) == 1, f"{name}: {len(matches)} schemas"
        found[name] = matches.pop().decode()
    return found


@cache
def meta_functions() -> dict[str, Callable[..., Any]]:
    """Name -> meta function of every operator in ``_meta_registrations.py``."""
    notes: dict[str, Callable[..., Any]] = {}

    class Library:
        def __init__(self, namespace: str, kind: str, dispatch_key: str = "") -> None:
            self.namespace = namespace

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    def impl(library: Library, name: str, *_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def note(function: Callable[..., Any]) -> Callable[..., Any]:
            if library.namespace == "npu":
                notes[name] = function
            return function

        return note

    folder = oracle_folder(wheel_pin())
    with (
        _stand_ins(folder),
        mock.patch("torch.library.Library", Library),
        mock.patch("torch.library.impl", impl),
        mock.patch("torch.fx.node.has_side_effect", lambda function: function),
        mock.patch.dict(torch.ops.__dict__, {"npu": mock.MagicMock()}),
    ):
        space: dict[str, Any] = {"__name__": "npu_meta_registrations"}
        exec(compile((folder / META).read_text(encoding="utf-8"), str(folder / META), "exec"), space)
    return notes


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Modules that the file imports; gone again afterwards."""

    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(names)
        return made

    class Packed:
        """Numbers of element types that torch does not have; none is one of ours."""

        int4, hifloat8, float8_e8m0fnu, float4_e2m1fn_x2, float4_e1m2fn_x2 = 285, 290, 293, 296, 297
        float4_e2m1, float4_e1m2, float8_e4m3fn, float8_e5m2, uint8 = -1, -2, 292, 291, 0

    numbers = {name: value for name, value in vars(Packed).items() if not name.startswith("_")}
    error_code = module("torch_npu.utils._error_code")
    modules = {
        "torch_npu": module("torch_npu", **numbers),
        "torch_npu.utils": module("torch_npu.utils"),
        "torch_npu.utils.utils": module("torch_npu.utils.utils", _is_interactive_command_line=lambda: False),
        "torch_npu.utils._error_code": error_code,
        "torch_npu.npu": module("torch_npu.npu"),
        "torch_npu.npu.utils": module(
            "torch_npu.npu.utils", get_cann_version=lambda *_: "8.5.0", _is_gte_cann_version=lambda *_: True
        ),
        "torch_npu.npu._backends": module("torch_npu.npu._backends", get_soc_version=lambda: 223),
    }
    for name, made in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, made)
    with mock.patch.dict(sys.modules, modules):
        source = folder / "torch_npu/utils/_error_code.py"
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), error_code.__dict__)
        yield


class Oracle:
    """``torch_npu``'s operators on meta tensors. Owns a library, which :meth:`close` takes down."""

    def __init__(self, names: Iterable[str]) -> None:
        self.library = torch.library.Library(NAMESPACE, "DEF")
        self.schemas = read_schemas(names)
        functions = meta_functions()
        for name, schema in self.schemas.items():
            self.library.define(schema)
            # A change of layout; the wheel has no meta function for it.
            self.library.impl(name, functions.get(name, _same), "Meta")
        self.calls: dict[str, int] = dict.fromkeys(self.schemas, 0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self.__dict__.get("schemas", {}):
            raise AttributeError(name)
        operator = getattr(getattr(torch.ops, NAMESPACE), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return operator(*args, **kwargs)

        return call

    def close(self) -> None:
        """Take the operators out of the dispatcher."""
        self.library._destroy()


def _same(input: torch.Tensor, acl_format: int, **_: Any) -> torch.Tensor:
    return torch.empty_like(input)
