# SPDX-License-Identifier: Apache-2.0
"""INT8 linear layers (W8A8) on Ascend through torch_npu's operators, called directly.

    values, scale = npu_dynamic_quant(x)                                                     INT8 [M, K], FP32 [M]
    y = npu_quant_matmul(values, weight, weight_scale, pertoken_scale=scale, bias=bias, output_dtype=x.dtype)

``weight`` is ``[K, N]`` INT8, cast to FRACTAL_NZ (not transposed, as ``_op_plugin_docs.py`` advises for A2 and A3) or
contiguous where the cast is refused. What the operator demands (same file, table of dtypes, and its meta function in
``op_plugin/meta/_meta_registrations.py``): FP32 scales of one dimension, one a column and one a token; an output dtype,
without which it returns INT8; a bias in the output's dtype or FP32. An INT32 bias would be added before the scales and
means something else.

The meta function lets pass what fails or goes wrong on the card: per-token scales of another length, operands that are
not INT8, FP16 scales, last dimensions above 65535, input of one dimension or in FP32, a missing output dtype. All of
that is refused here.

A layer wider than 65535 is kept as equal parts, ``[parts, K, N / parts]``, and multiplied part by part: columns do not
depend on each other, so the result is the same to the bit. Cutting along K is not exact, since each part's result is
rounded; row-parallel layers under tensor parallelism are cut that way and so not bit-equal to one card.

torch_npu is imported when the first operator is looked up, and never on another device.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, ClassVar

import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization import int8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed, QuantBackend, Support
from vllm_h3_plugin.quantization.npu_operators import FRACTAL_NZ, MAX_WIDTH, OPERATORS
from vllm_h3_plugin.quantization.precision import Precision

logger = logging.getLogger(__name__)

ROW_BLOCK = 256
_INT32_MAX = 2**31 - 1


def probe(ops: Any = None) -> Support:
    """Whether torch_npu is installed and has the operators."""
    if ops is None:
        try:
            ops = import_module("torch_npu")
        except (ImportError, OSError) as exc:  # OSError: a library of CANN is missing
            return Support(False, f"torch_npu cannot be imported ({exc})")
    missing = [name for name in OPERATORS if not hasattr(ops, name)]
    if missing:
        return Support(False, f"torch_npu lacks {', '.join(missing)}")
    return Support(True, "INT8 GEMM of torch_npu, weights per channel, activations per token")


class NpuInt8(QuantBackend):
    """See the module's docstring.

    Args:
        ops: what holds the operators; the module ``torch_npu`` unless a test gives its own.
    """

    name: ClassVar[str] = "npu_int8"

    def __init__(self, ops: Any = None) -> None:
        self._given_ops = ops
        self._plain_reason: str | None = None

    @property
    def _ops(self) -> Any:
        # Looked up anew: a module kept as an attribute would make the backend, and configs that hold it, unpicklable.
        return import_module("torch_npu") if self._given_ops is None else self._given_ops

    @property
    def weight_format(self) -> str:
        """Layout of packed weights, for people; before the first is packed, the one that will be tried."""
        return "FRACTAL_NZ" if self._plain_reason is None else f"ND, {self._plain_reason}"

    def keep_plain(self, reason: str) -> None:
        """Pack what comes from now on without the cast: a weight in FRACTAL_NZ is not only its bytes."""
        self._plain_reason = reason

    def supports(self, layer: LayerFacts) -> Support:
        """INT8 layers on an NPU whose input is at most 65535 wide, and whose output is or divides into such parts."""
        if layer.precision.method != "int8":
            return Support(False, f"{layer.path} is {layer.precision.value} and npu_int8 computes int8")
        if layer.device != "npu":
            return Support(False, f"{layer.path} is on {layer.device!r} and npu_int8 needs an Ascend card")
        if layer.in_features > MAX_WIDTH:
            return Support(
                False,
                f"{layer.path} has in_features {layer.in_features} and npu_quant_matmul takes at most {MAX_WIDTH}; "
                "cutting it along K would round each part",
            )
        if parts_of(layer.out_features) is None:
            return Support(
                False,
                f"{layer.path} has out_features {layer.out_features}, above {MAX_WIDTH} and without equal parts",
            )
        return probe(self._given_ops)

    def quantize_weight(
        self, weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.int8.quantize_weight`."""
        return int8.quantize_weight(weight, precision, path=path, amax=amax)

    def pack(self, q: torch.Tensor, scale: torch.Tensor) -> Packed:
        """``[N, K]`` -> ``[K, N]`` in FRACTAL_NZ, or contiguous; above 65535 ``[parts, K, N / parts]``, contiguous.

        Raises:
            BackendError: more than 65535 columns that have no equal parts.
        """
        n, k = q.shape
        parts = parts_of(n)
        if parts is None:
            raise BackendError(f"npu_int8 got a weight of {n} columns", why=f"above {MAX_WIDTH} without equal parts")
        scale = scale.to(torch.float32).reshape(-1).contiguous()
        if parts > 1:
            # A part of a tensor in FRACTAL_NZ is no tensor in FRACTAL_NZ.
            return Packed(q.view(parts, n // parts, k).transpose(1, 2).contiguous(), scale)
        return Packed(self._cast(q.t().contiguous()), scale)

    def quantize_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[M, K]`` -> INT8 ``[M, K]`` and FP32 ``[M, 1]``.

        Raises:
            BackendError: activations that the operator does not take.
        """
        _check_activation(x)
        if x.shape[0] == 0:
            return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((0, 1), dtype=torch.float32)
        values, scale = self._ops.npu_dynamic_quant(x.contiguous())
        return values, scale.reshape(-1, 1)

    def matmul(self, x: QuantizedActivation, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[M, K]`` -> ``[M, N]`` BF16.

        Raises:
            BackendError: dtypes or shapes that the operator does not take.
        """
        return self._multiply(x.values, x.scale, packed, bias, x.dtype)

    def apply(self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[..., K]`` BF16 or FP16 -> ``[..., N]`` in the same dtype.

        Raises:
            BackendError: dtypes or shapes that the operator does not take.
        """
        values, scale = self.quantize_tokens(x.reshape(-1, x.shape[-1]))
        out = self._multiply(values, scale, packed, bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[1])

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        if self._plain_reason is None:
            try:
                return self._ops.npu_format_cast(weight, FRACTAL_NZ)
            except RuntimeError as exc:
                said = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
                self._plain_reason = f"the cast was refused: {said}"
                logger.warning("npu_int8 keeps weights in ND: the cast to FRACTAL_NZ was refused: %s", exc)
        return weight

    def _multiply(
        self, values: torch.Tensor, scale: torch.Tensor, packed: Packed, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        weights = tuple(packed.weight) if packed.weight.ndim == 3 else (packed.weight,)
        scale = scale.reshape(-1)
        _check_operands(values, scale, weights, packed.scale, bias, dtype)
        m, (k, width), n = values.shape[0], weights[0].shape, packed.scale.shape[0]
        if m == 0:
            return values.new_empty((0, n), dtype=dtype)
        scales = packed.scale.split(width)
        biases = (None,) * len(weights) if bias is None else bias.split(width)
        rows, ops = _most_rows(k, n), self._ops
        blocks = []
        for x, x_scale in zip(values.split(rows), scale.split(rows), strict=True):
            columns = [
                ops.npu_quant_matmul(x, w, s, pertoken_scale=x_scale, bias=b, output_dtype=dtype)
                for w, s, b in zip(weights, scales, biases, strict=True)
            ]
            blocks.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def parts_of(out_features: int) -> int | None:
    """Into how few equal parts of at most 65535 columns a layer divides; None if there are no such parts."""
    least = -(-out_features // MAX_WIDTH)
    return next((parts for parts in range(least, 2 * least + 8) if out_features % parts == 0), None)


def _most_rows(k: int, n: int) -> int:
    """Rows of one product, so that none has more than 2^31 results. A row's result does not depend on the others."""
    return max(ROW_BLOCK, _INT32_MAX // max(k, n) // ROW_BLOCK * ROW_BLOCK)


def _check_activation(x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise BackendError(
            f"npu_int8 got {x.dtype} activations",
            why="npu_dynamic_quant takes BF16 and FP16",
            fix="Cast the input to BF16.",
        )
    if x.ndim != 2:
        raise BackendError(
            f"npu_int8 got activations of shape {tuple(x.shape)}", why="tokens are rows of two dimensions"
        )


def _check_operands(
    values: torch.Tensor,
    scale: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Everything that npu_quant_matmul demands, of which its meta function checks little."""
    m, k = values.shape
    n = sum(weight.shape[1] for weight in weights)
    faults = []
    if dtype not in (torch.bfloat16, torch.float16):
        faults.append(f"an output of {dtype}; with per-token scales it is BF16 or FP16")
    if values.dtype is not torch.int8 or any(weight.dtype is not torch.int8 for weight in weights):
        faults.append(f"operands of {values.dtype} and {weights[0].dtype}; both are INT8")
    if any(weight.shape[0] != k for weight in weights):
        faults.append(f"activations of width {k}; the weight takes {weights[0].shape[0]}")
    if max(k, *(weight.shape[1] for weight in weights)) > MAX_WIDTH:
        faults.append(f"operands {k} and {weights[0].shape[1]} wide; at most {MAX_WIDTH}")
    if scale.dtype is not torch.float32 or scale.shape != (m,):
        faults.append(f"per-token scales {tuple(scale.shape)} of {scale.dtype}; ({m},) of FP32")
    if weight_scale.dtype is not torch.float32 or weight_scale.shape != (n,):
        faults.append(f"per-channel scales {tuple(weight_scale.shape)} of {weight_scale.dtype}; ({n},) of FP32")
    if bias is not None and (bias.dtype not in (dtype, torch.float32) or bias.shape != (n,)):
        faults.append(f"a bias {tuple(bias.shape)} of {bias.dtype}; ({n},) of {dtype} or FP32")
    if not all(weight.is_contiguous() for weight in weights):
        faults.append("a weight whose layout is not what pack() returned")
    if faults:
        raise BackendError(
            f"npu_int8 got {faults[0]}",
            why="; ".join(faults[1:]) or "npu_quant_matmul takes nothing else",
            fix="Use what quantize_weight(), pack() and quantize_tokens() return, unchanged.",
        )
