# SPDX-License-Identifier: Apache-2.0
"""FP8 linear layers on CUDA through the two compiled operators of vLLM, called directly.

vLLM's own wrappers choose: ``_custom_ops.cutlass_scaled_mm`` takes a Triton kernel when a width is no multiple of 16,
and ``init_fp8_linear_kernel`` may take FlashInfer, Marlin or torch. Here no other kernel can stand in: a layer that
CUTLASS cannot compute is refused by :meth:`CutlassFp8.supports` before any weight is loaded.

Operators (vLLM 0.28.0 and 0.30.0, library ``vllm/_C_stable_libtorch.abi3.so``, loaded by the host)::

    dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()
    cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()
    cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool

What ``cutlass_scaled_mm`` demands (``csrc/.../w8a8/cutlass/scaled_mm_entry.cu``): ``out [M, N]`` and ``a [M, K]``
row-major, ``b [K, N]`` column-major, K and N multiples of 16; FP32 contiguous scales, ``a_scales`` one per row and
``b_scales`` one per column or a single one; ``bias [N]`` contiguous in the output's dtype; output BF16 or FP16.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization import fp8, npu_int8
from vllm_h3_plugin.quantization.activation import QuantizedActivation
from vllm_h3_plugin.quantization.contract import LayerFacts, Packed, QuantBackend, Support, SystemFacts
from vllm_h3_plugin.quantization.precision import Precision

ALIGNMENT = 16
"""CUTLASS reads rows of 16 bytes: both widths must be multiples of 16 elements."""

ROW_BLOCK = 256
"""Long inputs are cut at multiples of the kernels' largest tile."""

_INT32_MAX = 2**31 - 1

_OPERATORS = ("dynamic_per_token_scaled_fp8_quant", "cutlass_scaled_mm", "cutlass_scaled_mm_supports_fp8")


def probe(capability: int | None, ops: Any = None) -> Support:
    """Whether the host's operators are loaded and compiled for this compute capability (``10 * major + minor``)."""
    ops = torch.ops._C if ops is None else ops
    missing = [name for name in _OPERATORS if not hasattr(ops, name)]
    if missing:
        return Support(
            False, f"vLLM's compiled library is not loaded or lacks {', '.join(missing)} (torch.ops._C has none)"
        )
    if capability is None:
        return Support(False, "the device reports no CUDA compute capability")
    if not ops.cutlass_scaled_mm_supports_fp8(capability):
        return Support(False, f"vLLM's CUTLASS FP8 GEMM is not built for compute capability {_dotted(capability)}")
    return Support(True, f"CUTLASS FP8 GEMM for compute capability {_dotted(capability)}")


def system_facts(device: torch.device) -> SystemFacts:
    """Ask torch and the loaded operators once; :func:`choose_backend` decides from the answer."""
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    elif device.type == "npu":
        return SystemFacts(device.type, None, probe(None), npu_int8.probe())
    return SystemFacts(device.type, capability, probe(capability))


class CutlassFp8(QuantBackend):
    """See the module's docstring.

    Args:
        ops: namespace that holds the operators; the host's ``torch.ops._C`` unless a test gives its own.
    """

    name: ClassVar[str] = "cutlass_fp8"

    def __init__(self, ops: Any = None) -> None:
        self._given_ops = ops

    @property
    def _ops(self) -> Any:
        # Looked up anew: a module kept as an attribute would make the backend, and configs that hold it, unpicklable.
        return torch.ops._C if self._given_ops is None else self._given_ops

    def supports(self, layer: LayerFacts) -> Support:
        """FP8 layers on CUDA whose widths are multiples of 16, if the operators are there and built for the device."""
        if not layer.precision.quantized:
            return Support(False, f"{layer.path} is {layer.precision.value}, which is not quantized")
        if layer.precision.method != "fp8":
            return Support(False, f"{layer.path} is {layer.precision.value} and cutlass_fp8 computes FP8")
        if layer.device != "cuda":
            return Support(False, f"{layer.path} is on {layer.device!r} and CUTLASS needs a CUDA device")
        widths = {"in_features": layer.in_features, "out_features": layer.out_features}
        odd = [f"{name} {width}" for name, width in widths.items() if width % ALIGNMENT]
        if odd:
            return Support(
                False,
                f"{layer.path} has {' and '.join(odd)} and CUTLASS needs multiples of {ALIGNMENT}; nothing is padded",
            )
        return probe(layer.capability, self._ops)

    def quantize_weight(
        self, weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`vllm_h3_plugin.quantization.fp8.quantize_weight`."""
        return fp8.quantize_weight(weight, precision, path=path, amax=amax)

    def pack(self, q: torch.Tensor, scale: torch.Tensor) -> Packed:
        """``[N, K]`` row-major -> ``[K, N]`` column-major: a view of the same bytes."""
        return Packed(q.contiguous().t(), scale.to(torch.float32).contiguous())

    def quantize_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[M, K]`` -> E4M3 ``[M, K]`` and FP32 ``[M, 1]``, by vLLM's kernel."""
        values = torch.empty(x.shape, dtype=fp8.E4M3, device=x.device)
        scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        if x.shape[0] > 0:  # An empty grid is a CUDA launch error.
            self._ops.dynamic_per_token_scaled_fp8_quant(values, x, scale, None)
        return values, scale

    def matmul(self, x: QuantizedActivation, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[M, K]`` -> ``[M, N]`` BF16.

        Raises:
            BackendError: dtypes or widths that the kernel does not take.
        """
        _check(x, packed, bias)
        return self._multiply(x.values, x.scale, packed, bias, x.dtype)

    def apply(self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``[..., K]`` BF16 or FP16 -> ``[..., N]`` in the same dtype.

        Raises:
            BackendError: dtypes or widths that the kernel does not take.
        """
        _check(x, packed, bias)
        tokens = x.reshape(-1, x.shape[-1])
        if tokens.stride(1) != 1:
            tokens = tokens.contiguous()
        out = self._multiply(*self.quantize_tokens(tokens), packed, bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[1])

    def _multiply(
        self, values: torch.Tensor, scale: torch.Tensor, packed: Packed, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        (k, n), m = packed.weight.shape, values.shape[0]
        out = torch.empty((m, n), dtype=dtype, device=values.device)
        rows = _most_rows(k, n)
        if 0 < m <= rows:
            self._ops.cutlass_scaled_mm(out, values, packed.weight, scale, packed.scale, bias)
        elif m > rows:
            for part, x, x_scale in zip(out.split(rows), values.split(rows), scale.split(rows), strict=True):
                self._ops.cutlass_scaled_mm(part, x, packed.weight, x_scale, packed.scale, bias)
        return out


def _most_rows(k: int, n: int) -> int:
    """Rows of one product: a clip of 15 s at 768p has 109 184, and its fc1 more than 2^31 results. A row's result does
    not depend on the others, and cuts lie between tiles."""
    return max(ROW_BLOCK, _INT32_MAX // max(k, n) // ROW_BLOCK * ROW_BLOCK)


def _check(x: torch.Tensor | QuantizedActivation, packed: Packed, bias: torch.Tensor | None) -> None:
    k, n = packed.weight.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise BackendError(
            f"cutlass_fp8 got {x.dtype} activations", why="its output is BF16 or FP16", fix="Cast the input to BF16."
        )
    if x.shape[-1] != k:
        raise BackendError(f"cutlass_fp8 got activations of width {x.shape[-1]}", why=f"the weight takes {k}")
    if packed.weight.stride(0) != 1:
        raise BackendError(
            f"cutlass_fp8 got a weight of strides {tuple(packed.weight.stride())}",
            why="the kernel reads [K, N] column-major",
            fix="Keep the packed weight as pack() returned it: making it contiguous changes its layout.",
        )
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (n,)):
        raise BackendError(
            f"cutlass_fp8 got a bias {tuple(bias.shape)} of {bias.dtype}", why=f"the kernel takes ({n},) of {x.dtype}"
        )


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
