# SPDX-License-Identifier: Apache-2.0
"""What a quantization backend is, and how one is chosen. Imports no torch at run time.

A backend turns one linear layer's BF16 weight into its resident form and computes with it::

    q, scale = backend.quantize_weight(weight, precision, path=path)   # [N, K] E4M3 or INT8, [N, 1] or [1] FP32
    packed = backend.pack(q, scale)                                    # what stays in memory
    y = backend.apply(x, packed, bias)                                 # [..., K] -> [..., N]
    y = backend.matmul(quantized, packed, bias)                        # [M, K], quantized by a fused kernel

M is the number of tokens, K the layer's input width, N its output width. Under tensor parallelism K and N are those of
this rank's shard.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization.precision import Method, Precision

if TYPE_CHECKING:
    import torch

    from vllm_h3_plugin.quantization.activation import QuantizedActivation


@dataclass(frozen=True)
class Support:
    """Yes or no, and why. Usable as a condition."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class LayerFacts:
    """One linear layer on one device.

    Attributes:
        path: dotted module path, as in recipes.
        in_features: K of this rank's shard.
        out_features: N of this rank's shard.
        bias: whether the layer adds a bias.
        precision: what the recipe asks for.
        device: torch device type (``"cuda"``, ``"cpu"``, ``"npu"``).
        capability: CUDA compute capability as ``10 * major + minor`` (90 on H200, 121 on GB10), else None.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    precision: Precision
    device: str
    capability: int | None = None


@dataclass(frozen=True)
class SystemFacts:
    """What the choice of a backend depends on, collected once (see ``cutlass_fp8.system_facts``).

    Attributes:
        device: torch device type.
        capability: as in :class:`LayerFacts`.
        cutlass: whether the host's CUTLASS FP8 operators are loaded and compiled for this device.
        npu: whether torch_npu's INT8 operators are loaded.
    """

    device: str
    capability: int | None
    cutlass: Support
    npu: Support = Support(False, "not an Ascend machine")


class Packed(NamedTuple):
    """Resident form of one quantized weight. A plain tuple of tensors, so that a module can own both as parameters.

    Attributes:
        weight: backend's own layout; ``cutlass_fp8`` and ``reference`` keep ``[K, N]`` column-major, that is ``q.t()``.
        scale: FP32, contiguous; ``[N, 1]`` (per channel; ``npu_int8``: ``[N]``) or ``[1]`` (per tensor).
    """

    weight: torch.Tensor
    scale: torch.Tensor


class QuantBackend(ABC):
    """Arithmetic of quantized linear layers on one kind of device. Stateless: one instance serves all layers."""

    name: ClassVar[str]

    @abstractmethod
    def supports(self, layer: LayerFacts) -> Support:
        """Whether this backend computes the layer exactly as asked; if not, why. Never pads, never substitutes."""

    @abstractmethod
    def quantize_weight(
        self, weight: torch.Tensor, precision: Precision, *, path: str, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize one weight.

        Args:
            weight: ``[N, K]`` BF16 (or FP16, FP32), any strides, on the device where it will stay.
            precision: a quantized precision.
            path: module path, for errors.
            amax: absolute maxima over the whole unsharded weight, where this rank holds a shard of it; one for each
                scale that is returned. None: taken from ``weight``.

        Returns:
            ``(q, scale)``: ``[N, K]`` in the backend's element type, contiguous, and FP32 ``[N, 1]`` or ``[1]``.

        Raises:
            RecipeError: the weight holds infinities or NaN.
            BackendError: the precision is not one of this backend's.
        """

    @abstractmethod
    def pack(self, q: torch.Tensor, scale: torch.Tensor) -> Packed:
        """Bring ``(q, scale)`` into the resident form. Copies nothing where a view will do."""

    @abstractmethod
    def quantize_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize activations with one dynamic scale per token.

        Args:
            x: ``[M, K]`` BF16 or FP16, rows contiguous, M may be 0.

        Returns:
            ``(values, scale)``: ``[M, K]`` in the backend's element type, contiguous, and FP32 ``[M, 1]``.
        """

    @abstractmethod
    def matmul(self, x: QuantizedActivation, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias`` of activations that are quantized already.

        Args:
            x: ``[M, K]``; what it keeps of the unquantized activation is not read.
            packed: from :meth:`pack`.
            bias: ``[N]`` in ``x.dtype``, or None.

        Returns:
            ``[M, N]`` in ``x.dtype``, BF16.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``, quantizing ``x`` first.

        Args:
            x: ``[..., K]`` activations in BF16 or FP16, any strides, zero tokens included.
            packed: from :meth:`pack`.
            bias: ``[N]`` in ``x.dtype``, or None.

        Returns:
            ``[..., N]`` in ``x.dtype``.
        """


# Backend -> (module, class). Modules are imported when a backend is chosen: they need torch.
_BACKENDS = {
    "cutlass_fp8": ("vllm_h3_plugin.quantization.cutlass_fp8", "CutlassFp8"),
    "npu_int8": ("vllm_h3_plugin.quantization.npu_int8", "NpuInt8"),
    "reference": ("vllm_h3_plugin.quantization.reference", "Reference"),
}
_FAST = {"cuda": "cutlass_fp8", "npu": "npu_int8"}
_METHOD: dict[str, Method] = {"cutlass_fp8": "fp8", "npu_int8": "int8"}


def backend_names() -> tuple[str, ...]:
    """Names that :func:`choose_backend` accepts."""
    return tuple(_BACKENDS)


def choose_backend_name(name: str | None, facts: SystemFacts, method: Method = "fp8") -> tuple[str, str]:
    """Which backend computes quantized layers on this machine, and why. Pure: depends on its arguments alone.

    A named backend is taken or refused, never replaced. Without a name CUDA means ``cutlass_fp8``, Ascend ``npu_int8``
    and the CPU ``reference``; an accelerator without its operators is an error, because the reference would be
    silently slow, and so is a recipe of a method that the accelerator has no backend for.

    Args:
        method: what the recipe quantizes by.

    Raises:
        BackendError: unknown name, or the backend cannot run here; the message says why.
    """
    if name is not None and name not in _BACKENDS:
        near = difflib.get_close_matches(name, _BACKENDS, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(_BACKENDS)}."
        raise BackendError(f"unknown quantization backend {name!r}", fix=fix, backend=name)
    if name == "reference":
        return name, "named; plain torch runs on any device, slowly"
    if name is None and facts.device == "cpu":
        gemm = method.upper()
        return "reference", f"the CPU has no {gemm} GEMM; the reference computes the same arithmetic in plain torch"
    chosen = name or _FAST.get(facts.device)
    if chosen is None:
        raise BackendError(
            f"no quantization backend for device {facts.device!r}",
            why=f"cutlass_fp8 needs CUDA, npu_int8 needs Ascend, and the reference is not meant for {facts.device}",
            fix="Use the bf16 recipe.",
            device=facts.device,
        )
    device = next(kind for kind, backend in _FAST.items() if backend == chosen)
    probed = facts.cutlass if device == "cuda" else facts.npu
    label = {"cuda": "CUDA device", "npu": "Ascend device"}[device]
    if facts.device == device:
        check_method(method, device, facts.capability)
        if probed:
            return chosen, f"{'named' if name else label}; {probed.reason}"
        refusal = probed.reason
    else:
        article = "an" if label[0] in "AE" else "a"
        refusal = f"it needs {article} {label} and this one is {facts.device!r}"
    raise BackendError(
        f"quantization backend {chosen!r} cannot run here",
        why=refusal,
        fix="Use the bf16 recipe; `vllm-h3 doctor` shows what this device has.",
        backend=chosen,
        device=facts.device,
    )


def check_method(method: Method, device: str, capability: int | None) -> None:
    """Refuse a recipe of a method that an accelerator has no backend for.

    Args:
        device: torch device type.
        capability: as in :class:`LayerFacts`; None also where it is not known yet.

    Raises:
        BackendError: names the recipe that there is in its place.
    """
    fast = _FAST.get(device)
    if fast is None or _METHOD[fast] == method:
        return
    if device == "npu":
        raise BackendError(
            "an fp8 recipe on an Ascend device",
            why="there is no FP8 path for it here: npu_int8 multiplies INT8 weights with INT8 activations",
            fix="Use recipe int8 (text encoder in BF16) or int8-text.",
            method=method,
            device=device,
        )
    if capability is None:
        why = "INT8 is computed on Ascend only; GB10 (SM121) and other Blackwell chips have no INT8 path in vLLM at all"
    elif capability >= 100:
        # vllm/_C_stable_libtorch.abi3.so: "Int8 not supported on SM... Use FP8 quantization instead".
        why = f"SM{capability} has no INT8 path: vLLM builds its INT8 GEMM for SM90 and older only"
    else:
        why = "INT8 is computed on Ascend only; on CUDA weights of the same size are FP8"
    raise BackendError(
        "an int8 recipe on a CUDA device",
        why=why,
        fix="Use recipe fp8 (or fp8-text-bf16, which keeps the text encoder in BF16 as int8 does).",
        method=method,
        device=device,
    )


def choose_backend(name: str | None, facts: SystemFacts, method: Method = "fp8") -> tuple[QuantBackend, str]:
    """:func:`choose_backend_name`, with the backend itself in place of its name."""
    chosen, reason = choose_backend_name(name, facts, method)
    module, attribute = _BACKENDS[chosen]
    made = getattr(import_module(module), attribute)
    backend: QuantBackend = made(method) if chosen == "reference" else made()
    return backend, reason
