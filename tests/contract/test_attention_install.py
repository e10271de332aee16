# SPDX-License-Identifier: Apache-2.0
"""What the plugin puts into the host's attention layers, and when it leaves them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3Attention

from tests.contract.dit_inputs import forward_inputs, host_dit, host_velocity, make_request, random_weights
from vllm_h3_plugin.attention.choice import Chooser
from vllm_h3_plugin.attention.exact import Kernel, pinned_sdpa
from vllm_h3_plugin.checkpoint.synthetic.spec import tiny_dit
from vllm_h3_plugin.errors import BackendError
from vllm_h3_plugin.host import attention as attention_room
from vllm_h3_plugin.host.attention import ChosenBackend, Fp8Backend, Kit, MaskedSDPABackend, PrefixImpl, install
from vllm_h3_plugin.quantization.contract import Support
from vllm_h3_plugin.quantization.recipe import AttentionPrecision

CONFIG = replace(tiny_dit(layers=2), token_refiner_num_layers=1)


def no_low_bit(precision: AttentionPrecision) -> Any:
    raise AssertionError("attention in few bits was asked for")


class Calls:
    """A kit whose kernel counts its calls and notes how many keys it was given."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.said: list[str] = []
        kernel = Kernel("math", Support(True, "always"), self._run)
        self.chooser = Chooser([kernel], timer=self._time, report=self.said.append)
        self.kit = Kit(self.chooser, no_low_bit)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.keys.append(k.shape[1])
        return pinned_sdpa("math")(q, k, v, scale)

    def _time(self, run: Callable[[], object], times: int) -> float:
        for _ in range(times):
            run()
        return 1.0


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def dit(device: torch.device, one_thread: None) -> torch.nn.Module:
    return host_dit(CONFIG, random_weights(CONFIG), device)


def layers(dit: torch.nn.Module, part: str = "") -> Iterator[Any]:
    for name, module in dit.named_modules():
        if isinstance(module, MiniMaxH3Attention) and name.startswith(part):
            yield module.attention


def name_backend(dit: torch.nn.Module, name: str, backend: Any = None) -> None:
    """What a user's ``--diffusion-attention-backend`` leaves in the layers of either host."""
    for layer in layers(dit):
        layer.backend_pref = name
        if hasattr(layer, "backend_explicit"):
            layer.backend_explicit = True
        if backend is not None:
            layer.attn_backend = backend
            layer.attention = backend.get_impl_cls()(num_heads=4, head_size=64, softmax_scale=layer.softmax_scale)


def test_layers_without_a_named_backend_run_what_is_chosen_on_the_valid_rows(dit, calls, device):
    request = make_request("t2va", device)
    before = host_velocity(dit, request, forward_inputs(request, 0.3, 0.5))
    # A new request: the text of an old one would not pass through the refiner again.
    request = make_request("t2va", device)
    inputs = forward_inputs(request, 0.3, 0.5)
    installed = install(dit, kit=calls.kit)
    assert (installed.blocks, installed.refiner) == ("chosen by measurement", "chosen by measurement")
    assert installed.chooser is calls.chooser and all(layer.attn_backend is ChosenBackend for layer in layers(dit))
    after = host_velocity(dit, request, inputs)
    for got, want in zip(after, before, strict=True):
        assert ((got - want).norm() / want.norm()).item() < 0.02
    # One layer of the refiner on the text, two blocks on the rest, each after a trial of its size; never a pad row.
    text, used = 21, request.branch.used_len
    assert calls.keys == [text, text, used, used, used] and used < request.branch.seq_len
    assert len(calls.said) == 2, "one sentence a size, not a layer"


def test_nothing_changes_off_cuda(dit):
    before = [(layer.attn_backend, layer.attention) for layer in layers(dit)]
    installed = install(dit)
    assert before == [(layer.attn_backend, layer.attention) for layer in layers(dit)]
    assert installed.chooser is None and "SDPA" in installed.blocks


def test_few_bits_off_cuda_are_refused_by_name(dit):
    with pytest.raises(BackendError, match=r'"attention": "fp8" cannot run here.*CUDA.*"exact"'):
        install(dit, precision=AttentionPrecision.FP8)


def test_few_bits_run_in_the_blocks_and_the_refiner_stays_exact(dit, calls, device):
    asked = []

    def low_bit(precision: AttentionPrecision) -> Any:
        asked.append(precision)
        return lambda q, k, v, scale: torch.zeros_like(q)

    installed = install(dit, precision=AttentionPrecision.FP8, kit=replace(calls.kit, low_bit=low_bit))
    assert asked == [AttentionPrecision.FP8], "made once for all layers"
    assert (installed.blocks, installed.refiner) == ("fp8", "chosen by measurement")
    assert {layer.attn_backend for layer in layers(dit, "blocks.")} == {Fp8Backend}
    assert {layer.attn_backend for layer in layers(dit, "token_refiner.")} == {ChosenBackend}
    request = make_request("t2va", device)
    host_velocity(dit, request, forward_inputs(request, 0.3, 0.5))
    assert set(calls.keys) == {21}


def test_few_bits_and_a_named_backend_contradict_each_other(dit, calls):
    name_backend(dit, "TORCH_SDPA", MaskedSDPABackend)
    with pytest.raises(BackendError, match="TORCH_SDPA was named"):
        install(dit, precision=AttentionPrecision.INT8, kit=calls.kit)


def test_a_named_sdpa_stays_and_loses_its_mask(dit, calls, device):
    name_backend(dit, "TORCH_SDPA", MaskedSDPABackend)
    request = make_request("t2va", device)
    inputs = forward_inputs(request, 0.3, 0.5)
    masked = host_velocity(dit, request, inputs)
    installed = install(dit, kit=calls.kit)
    assert installed.blocks == "SDPA: TORCH_SDPA was named, without a mask" and installed.chooser is None
    assert all(layer.attn_backend.supports_prefix_kv_slicing for layer in layers(dit))
    sliced = host_velocity(dit, request, inputs)
    for got, want in zip(sliced, masked, strict=True):
        assert ((got - want).norm() / want.norm()).item() < 0.02
    assert not calls.keys


class NoKernelImpl(SDPAImpl):
    def forward(self, query, key, value, attn_metadata=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("no kernel image is available for execution on the device\nand more")


class NoKernelBackend(SDPABackend):
    @staticmethod
    def get_name() -> str:
        return "CUDNN_ATTN"

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return NoKernelImpl


def test_a_named_backend_that_cannot_run_is_refused_with_the_reason_and_what_runs(dit, calls):
    name_backend(dit, "CUDNN_ATTN", NoKernelBackend)
    with pytest.raises(BackendError) as caught:
        install(dit, kit=calls.kit)
    message = str(caught.value)
    assert "attention backend CUDNN_ATTN cannot run" in message and "no kernel image is available" in message
    assert "TORCH_SDPA" in message and "--diffusion-attention-backend" in message
    assert not any(layer.skip_sequence_parallel for layer in layers(dit, "blocks."))


def test_a_substitute_of_the_hosts_is_refused(dit, calls):
    """0.28 answers a FLASH_ATTN that it cannot run with SDPA and a warning."""
    name_backend(dit, "FLASH_ATTN", MaskedSDPABackend)
    with pytest.raises(BackendError, match="FLASH_ATTN was named and the host would run SDPA"):
        install(dit, kit=calls.kit)


class MultiDocument(MaskedSDPABackend):
    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        return True


def test_a_backend_that_keeps_requests_apart_stays_when_they_may_share_a_forward(dit, calls):
    for layer in layers(dit):
        layer.attn_backend = MultiDocument
    assert "several requests" in install(dit, kit=calls.kit, batched=True).blocks
    assert {layer.attn_backend for layer in layers(dit)} == {MultiDocument}
    assert install(dit, kit=calls.kit, batched=False).blocks == "chosen by measurement"


def test_ring_attention_stays_the_hosts(dit, calls):
    for layer in layers(dit):
        layer.use_ring = True
    before = [layer.attention for layer in layers(dit)]
    assert "ring attention" in install(dit, kit=calls.kit).blocks
    assert before == [layer.attention for layer in layers(dit)]
    with pytest.raises(BackendError, match="ring attention"):
        install(dit, precision=AttentionPrecision.FP8, kit=calls.kit)


def test_quantized_keys_of_the_hosts_are_not_dropped_in_silence(dit, calls):
    for layer in layers(dit):
        layer._kv_cache_dtype = "fp8"
    assert "fp8 keys" in install(dit, kit=calls.kit).blocks
    assert not any(isinstance(layer.attention, PrefixImpl) for layer in layers(dit))


def test_a_mask_is_an_error_and_not_ignored():
    impl = PrefixImpl(lambda q, k, v, scale: q, 1.0)
    q = torch.zeros(1, 4, 1, 8)
    metadata = attention_room.AttentionMetadata(attn_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="takes no mask"):
        impl.forward(q, q, q, metadata)
