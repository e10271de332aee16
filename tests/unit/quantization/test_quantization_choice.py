# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen on which machine, with the reason, and that a named one is never replaced."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.quantization.contract import (
    Support,
    SystemFacts,
    backend_names,
    choose_backend,
    choose_backend_name,
)

BUILT = Support(True, "CUTLASS FP8 GEMM for compute capability 9.0")
ABSENT = Support(False, "vLLM's compiled library is not loaded")

H200 = SystemFacts("cuda", 90, BUILT)
GB10 = SystemFacts("cuda", 121, BUILT)
A100 = SystemFacts("cuda", 80, Support(False, "vLLM's CUTLASS FP8 GEMM is not built for compute capability 8.0"))
CUDA_WITHOUT_OPS = SystemFacts("cuda", 90, ABSENT)
CPU = SystemFacts("cpu", None, ABSENT)
NPU = SystemFacts("npu", None, ABSENT)


@pytest.mark.parametrize(
    ("name", "facts", "chosen", "reason"),
    [
        (None, H200, "cutlass_fp8", "CUDA device; CUTLASS FP8 GEMM for compute capability 9.0"),
        (None, GB10, "cutlass_fp8", "CUDA device"),
        ("cutlass_fp8", H200, "cutlass_fp8", "named; CUTLASS FP8 GEMM"),
        (None, CPU, "reference", "the CPU has no FP8 GEMM"),
        ("reference", CPU, "reference", "named"),
        ("reference", H200, "reference", "named"),
        ("reference", NPU, "reference", "named"),
    ],
)
def test_choice(name, facts, chosen, reason):
    got, why = choose_backend_name(name, facts)
    assert got == chosen and reason in why


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("cutlass_fp8", CPU, "it needs a CUDA device and this one is 'cpu'"),
        ("cutlass_fp8", NPU, "it needs a CUDA device and this one is 'npu'"),
        ("cutlass_fp8", A100, "not built for compute capability 8.0"),
        ("cutlass_fp8", CUDA_WITHOUT_OPS, "library is not loaded"),
        (None, A100, "not built for compute capability 8.0"),
        (None, CUDA_WITHOUT_OPS, "library is not loaded"),
        (None, NPU, "no quantization backend for device 'npu'"),
        ("cutlas_fp8", H200, "Did you mean cutlass_fp8?"),
        ("zzz", H200, "Known: cutlass_fp8, reference"),
    ],
)
def test_refusal_says_why_and_what_to_do(name, facts, reason):
    with pytest.raises(BackendError) as caught:
        choose_backend_name(name, facts)
    assert reason in str(caught.value) and caught.value.fix


def test_the_backend_itself_comes_with_the_reason():
    for name in backend_names():
        backend, reason = choose_backend(name, H200)
        assert backend.name == name and reason


def test_facts_of_a_cpu_are_collected_without_a_gpu():
    from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

    facts = system_facts(torch.device("cpu"))
    assert facts.device == "cpu" and facts.capability is None and not facts.cutlass
