# SPDX-License-Identifier: Apache-2.0
"""The Ascend operators that ``npu_int8`` calls, as torch_npu 2.10.0.post4 declares them. Imports no torch at run time.

The strings are those of that wheel's ``libtorch_npu.so``; tests hold them against the wheel, and ``vllm-h3 doctor``
against the operators that are loaded on an Ascend machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_h3_plugin.errors import BackendError

if TYPE_CHECKING:
    import torch

TORCH_NPU = "2.10.0.post4"
"""Version of torch_npu in the Ascend image, from which the table was taken."""

FRACTAL_NZ = 29
"""``ACL_FORMAT_FRACTAL_NZ``: weights in the blocks that the matrix units read."""

MAX_WIDTH = 65535
"""Largest last dimension of either operand of ``npu_quant_matmul`` (torch_npu ``_op_plugin_docs.py``, constraints)."""

OPERATORS = {
    "npu_dynamic_quant": (
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
        'str quant_mode="pertoken", float dst_type_max=0.0) -> (Tensor, Tensor)'
    ),
    "npu_quant_matmul": (
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
        "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
        "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) "
        "-> Tensor"
    ),
    "npu_format_cast": (
        "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor"
    ),
}
"""Operator -> schema."""


def check_operators(live: Callable[[str], torch.FunctionSchema | None]) -> str:
    """Hold loaded operators against the table.

    Args:
        live: the schema of an operator of the ``npu`` namespace; None if it is not there.

    Returns:
        One sentence.

    Raises:
        BackendError: an operator is missing, or cannot be called as the table says; names all of them.
    """
    import torch

    faults, newer = [], []
    for name, text in OPERATORS.items():
        found, wanted = live(name), torch._C.parse_schema(f"npu::{text}")
        if found is None:
            faults.append(f"{name} is missing")
        elif found == wanted:
            continue
        elif found.is_backward_compatible_with(wanted):
            newer.append(name)
        else:
            faults.append(f"{name} is {found}, wanted {wanted}")
    if faults:
        raise BackendError(
            "torch_npu's operators are not those that npu_int8 was written for",
            why="; ".join(faults),
            fix=f"Use the pinned Ascend image, which has torch_npu {TORCH_NPU}.",
            operators=faults,
        )
    more = f"; with further options: {', '.join(newer)}" if newer else ""
    return f"{', '.join(OPERATORS)} are declared as in torch_npu {TORCH_NPU}{more}"


def loaded_schema(name: str) -> torch.FunctionSchema | None:
    """The schema of an operator in this process's ``torch.ops.npu``; None if it is not there."""
    import torch

    packet = getattr(torch.ops.npu, name, None)
    return None if packet is None else packet.default._schema
