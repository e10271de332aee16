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
NPU = SystemFacts("npu", None, ABSENT, Support(True, "INT8 GEMM of torch_npu"))
NPU_WITHOUT_TORCH_NPU = SystemFacts("npu", None, ABSENT, Support(False, "torch_npu cannot be imported"))
XPU = SystemFacts("xpu", None, ABSENT)


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
        (None, XPU, "no quantization backend for device 'xpu'"),
        ("cutlas_fp8", H200, "Did you mean cutlass_fp8?"),
        ("zzz", H200, "Known: cutlass_fp8, npu_int8, reference"),
    ],
)
def test_refusal_says_why_and_what_to_do(name, facts, reason):
    with pytest.raises(BackendError) as caught:
        choose_backend_name(name, facts)
    assert reason in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    ("name", "facts", "chosen", "reason"),
    [
        (None, NPU, "npu_int8", "Ascend device; INT8 GEMM of torch_npu"),
        ("npu_int8", NPU, "npu_int8", "named; INT8 GEMM"),
        (None, CPU, "reference", "the CPU has no INT8 GEMM"),
        ("reference", NPU, "reference", "named"),
    ],
)
def test_choice_for_an_int8_recipe(name, facts, chosen, reason):
    got, why = choose_backend_name(name, facts, "int8")
    assert got == chosen and reason in why


@pytest.mark.parametrize(
    ("facts", "method", "what", "why", "fix"),
    [
        (GB10, "int8", "an int8 recipe on a CUDA device", "SM121 has no INT8 path", "recipe fp8"),
        (H200, "int8", "an int8 recipe on a CUDA device", "INT8 is computed on Ascend only", "recipe fp8"),
        (NPU, "fp8", "an fp8 recipe on an Ascend device", "no FP8 path", "recipe int8"),
        (NPU_WITHOUT_TORCH_NPU, "int8", "'npu_int8' cannot run here", "torch_npu cannot be imported", "bf16"),
    ],
)
def test_a_recipe_of_the_other_accelerator_is_refused_with_the_one_that_fits(facts, method, what, why, fix):
    with pytest.raises(BackendError) as caught:
        choose_backend_name(None, facts, method)
    assert what in caught.value.what and why in caught.value.why and fix in caught.value.fix


def test_the_backend_itself_comes_with_the_reason():
    for name in backend_names():
        facts, method = (NPU, "int8") if name == "npu_int8" else (H200, "fp8")
        backend, reason = choose_backend(name, facts, method)
        assert backend.name == name and reason
    assert choose_backend(None, CPU, "int8")[0].method == "int8"


def test_facts_of_a_cpu_are_collected_without_a_gpu():
    from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts

    facts = system_facts(torch.device("cpu"))
    assert facts.device == "cpu" and facts.capability is None and not facts.cutlass
