# SPDX-License-Identifier: Apache-2.0
"""The decoder's blocks with FP16 weights and operators in the place of their steps: the same clip to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_h3_plugin.checkpoint.synthetic import tiny_vit
from vllm_h3_plugin.checkpoint.synthetic.vaes import write_vaes

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.fixture(scope="module")
def ours(device: torch.device) -> Any:
    """The module under test, imported when there is a world for the host to find."""
    from vllm_h3_plugin.host import decoder_operators

    return decoder_operators


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vae")
    write_vaes(root, tiny_vit(tile=64, overlap=16))
    return root / "video_vae"


@pytest.fixture
def vae(folder: Path) -> Any:
    from vllm_h3_plugin.host.bench.decode import build

    return build(folder, CPU)


def decoded(vae: Any) -> torch.Tensor:
    z = torch.randn(1, 24, 7, 6, 10, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        frames: torch.Tensor = vae.decode_latent(z)
    return frames


def test_the_clip_is_the_same_to_the_bit_and_half_of_the_weights_are_gone(ours: Any, vae: Any) -> None:
    want = decoded(vae)
    before = sum(value.nbytes for value in vae.model.decoder.transformer_blocks.parameters())
    assert ours.install(vae, ours.PLAIN) == "the host's operators, given by the plugin"
    after = sum(value.nbytes for value in vae.model.decoder.transformer_blocks.parameters())
    assert after < 0.51 * before
    assert torch.equal(decoded(vae), want)


def test_an_operator_that_does_not_take_a_shape_leaves_it_to_plain_torch(ours: Any, vae: Any) -> None:
    want = decoded(vae)
    asked: list[str] = []

    def refuses(name: str) -> Any:
        return lambda *given: asked.append(name)

    names = ("qk_norm_rope", "scaled_residual", "silu_mul")
    ours.install(vae, ours.Operators(*map(refuses, names)))
    assert torch.equal(decoded(vae), want)
    assert set(asked) == set(names)


@pytest.mark.parametrize("name", ["qk_norm_rope", "scaled_residual", "silu_mul"])
def test_every_operator_is_what_a_block_computes_with(ours: Any, vae: Any, name: str) -> None:
    """A test that could not see one of them left out would prove nothing of the first."""
    want, plain = decoded(vae), getattr(ours.PLAIN, name)

    def doubled(*given: Any) -> Any:
        made = plain(*given)
        return (2 * made[0], made[1]) if isinstance(made, tuple) else 2 * made

    ours.install(vae, replace(ours.PLAIN, **{name: doubled}))
    assert not torch.equal(decoded(vae), want)


def test_other_decoders_keep_their_own_steps_and_the_reason_is_told(ours: Any, vae: Any) -> None:
    assert ours.install(None, ours.PLAIN) == "nothing: there is no video VAE on this rank"
    assert "no decoder by that name" in ours.install(SimpleNamespace(model=object()), ours.PLAIN)
    assert "for CUDA devices" in ours.install(vae, None)
    strange = SimpleNamespace(model=SimpleNamespace(decoder=SimpleNamespace(transformer_blocks=[torch.nn.Identity()])))
    assert "neither the released code's nor Diffusers'" in ours.install(strange, ours.PLAIN)
    hosts = SimpleNamespace(model=SimpleNamespace(decoder=SimpleNamespace(_omni_h3_vae_optimizations_installed=True)))
    assert ours.install(hosts, ours.PLAIN) == "the host's operators"
    vae._decoder_stager = object()
    assert "kept on the host" in ours.install(vae, ours.PLAIN)
    vae._decoder_stager = None
    ours.install(vae, ours.PLAIN)
    assert "not FP32" in ours.install(vae, ours.PLAIN), "given twice, halves would change places again"


def test_only_operators_with_plain_torchs_bits_are_taken(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.models.minimax_h3.ops.vae import qk_norm_rope, scaled_residual

    found = ours.operators_on(CPU)
    assert {tried.name: tried.ok for tried in found.probes} == {
        "qk_norm_rope": False,
        "scaled_residual": False,
        "silu_mul": True,
    }
    assert found.qk_norm_rope is ours.qk_norm_rope, "the host's kernels are not made for a CPU"
    near = lambda residual, branch, scale: torch.addcmul(residual, branch.float(), scale) * (1 + 1e-6)  # noqa: E731
    monkeypatch.setattr(qk_norm_rope, "try_qk_norm_rope_exact", ours.qk_norm_rope)
    monkeypatch.setattr(scaled_residual, "try_scaled_residual_exact", near)
    found = ours.operators_on(CPU)
    assert [tried.ok for tried in found.probes] == [True, False, True]
    assert "values differ" in found.probes[1].reason and found.scaled_residual is ours.scaled_residual


def test_a_device_that_the_hosts_table_leaves_out_is_added_and_others_are_not(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.diffusion.models.minimax_h3.ops.vae import dispatch

    monkeypatch.setattr(ours, "operators_on", lambda device: ours.PLAIN)
    table = dispatch.H3_VAE_OPERATOR_TABLE
    monkeypatch.setattr(dispatch, "H3_VAE_OPERATOR_TABLE", table)
    assert ours.offer(CPU) is None and dispatch.H3_VAE_OPERATOR_TABLE is table
    cuda = torch.device("cuda", 0)
    assert dispatch.resolve_h3_vae_operators(cuda) is None
    assert ours.offer(cuda) is ours.PLAIN
    taken = dispatch.resolve_h3_vae_operators(cuda)
    assert taken is not None and taken.qk_norm_rope is ours.qk_norm_rope
    assert dispatch.resolve_h3_vae_operators(CPU) is None
    ours.offer(cuda)
    assert len(dispatch.H3_VAE_OPERATOR_TABLE) == len(table) + 1, "offered once"
    monkeypatch.setattr(ours, "operators_on", lambda device: pytest.fail("tried where the host has its own"))
    assert ours.offer(cuda) is None
