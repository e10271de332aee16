# SPDX-License-Identifier: Apache-2.0
"""DiTs with random weights to measure a step with: the stock host's and the plugin's, of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.compile import regionally_compile
from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch as HostBranch
from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3Attention
from vllm_omni.diffusion.models.minimax_h3.packed_sequence import minimax_h3_packed_sequence
from vllm_omni.platforms import current_omni_platform
from vllm_omni.quantization.factory import build_quant_config

from vllm_h3_plugin.checkpoint.dit_placement import ROPE, rope_inv_freq
from vllm_h3_plugin.checkpoint.layout import DitConfig, dit_tensors, linear_layers
from vllm_h3_plugin.checkpoint.synthetic import tiny_text
from vllm_h3_plugin.conditioning.schedule import Roles, schedule
from vllm_h3_plugin.host import loading
from vllm_h3_plugin.host.adaln import LayerProjections, finish_loading
from vllm_h3_plugin.host.attention import MaskedSDPABackend, install
from vllm_h3_plugin.host.denoise_branch import MiniMaxH3DenoiseBranch
from vllm_h3_plugin.host.fused_block import fuse
from vllm_h3_plugin.host.quant_config import H3QuantizationConfig
from vllm_h3_plugin.host.reference.cpu_ops import define_missing_ops
from vllm_h3_plugin.host.standalone import build_dit
from vllm_h3_plugin.host.step_kernels import StepKernels, choose_kernels
from vllm_h3_plugin.memory.requests import FPS, RequestSize
from vllm_h3_plugin.quantization.contract import choose_backend
from vllm_h3_plugin.quantization.cutlass_fp8 import system_facts
from vllm_h3_plugin.quantization.plan import plan
from vllm_h3_plugin.quantization.recipe import load_recipe

SIGMAS = (0.5, 0.7)
"""Of the step that is measured: video and audio."""

_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16}
_LATENTS_PER_S = 40


class RandomWeights:
    """A DiT in the native layout, each tensor made on the device when it is asked for, and alike every time.

    Linears are ``N(0, 1/K)`` and norms ``N(1, 0.1²)``, so that activations keep their scale. AdaLN's biases are
    ``N(0, 0.5²)``: gates near zero would hide whatever goes wrong in a block.
    """

    def __init__(self, config: DitConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.facts = {name: (tuple(spec.shape), _DTYPE[spec.dtype]) for name, spec in dit_tensors(config).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.facts[name]
        if name == ROPE:
            return rope_inv_freq(self.config.rope_inv_freq_len).to(self.device)
        generator = torch.Generator(self.device).manual_seed(crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
        if name.endswith(".bias"):
            return values.mul_(0.5 if ".adaln_proj." in name else 0.1)
        return values.mul_(0.1).add_(1) if len(shape) == 1 else values.mul_(shape[1] ** -0.5)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, one at a time."""
        return ((name, self[name]) for name in self.facts)


@dataclass
class Model:
    """A loaded DiT, of which as many blocks run as are asked for.

    Attributes:
        dit: the host's, or the plugin's.
        blocks: all of them.
        branch: class that lays out its requests.
        kernels: of fused blocks; None on the stock host.
        compiled: whether its blocks are compiled at their first call.
        notes: what its attention and its steps run, for the table.
    """

    dit: Any
    blocks: tuple[nn.Module, ...]
    branch: type[HostBranch]
    kernels: StepKernels | None = None
    compiled: bool = False
    notes: str = ""

    def set_depth(self, layers: int) -> None:
        """Run the first ``layers`` blocks from now on."""
        self.dit.blocks = nn.ModuleList(self.blocks[:layers])
        if self.kernels is not None:
            fuse(self.dit, self.kernels)


def build_stock(weights: RandomWeights, *, fp8: bool, eager: bool) -> Model:
    """The host's own DiT, as its server has it in BF16 or under ``--quantization fp8``."""
    quantization = None
    if fp8:
        if weights.device.type == "cpu":
            define_missing_ops()
        quantization = build_quant_config({"method": "fp8", "activation_scheme": "dynamic", "ignored_layers": []})
    dit: Any = build_dit(weights.config, quantization, weights.device, stock=True)
    with weights.device:
        dit.load_weights(weights.items())
        if fp8:
            from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

            finalize_layerwise_processing(dit, model_config=None)
        finish_loading(dit)
    blocks = tuple(dit.blocks)
    compiled = not eager and current_omni_platform.supports_torch_inductor()
    if compiled:
        # Of two models in one process neither may fall back to eager because the other used the cache up.
        torch._dynamo.config.recompile_limit = 64
        regionally_compile(dit, dynamic=True)
    notes = f"attention {_attention_layers(dit)[0].attn_backend.get_name()}"
    return Model(dit, blocks, HostBranch, compiled=compiled, notes=f"{notes}, {'compiled' if compiled else 'eager'}")


def build_plugin(weights: RandomWeights, recipe: str = "fp8") -> Model:
    """The plugin's DiT as its pipeline builds it: quantized by recipe, AdaLN in a table, fused blocks."""
    config, device = weights.config, weights.device
    precisions = plan(load_recipe(recipe), linear_layers(config, tiny_text()))
    backend, _ = choose_backend(None, system_facts(device))
    dit: Any = build_dit(config, H3QuantizationConfig(precisions, backend), device, tables=True)
    loader = loading.dit_loader(dit, weights.facts, config=config, diffusers=False)
    video, audio = SIGMAS
    layers = LayerProjections(
        dit,
        schedule((video, 0.0), (audio, 0.0), Roles()),
        {name: weights[name] for name in weights.facts if name.startswith("time_embedder.")},
    )
    loader.from_checkpoint(loading.dit_stream(weights.items(), config=config, diffusers=False, adaln=layers.add))
    dit.time_embedder.table = layers.finish()
    finish_loading(dit)
    kernels = choose_kernels(device, backend)
    refused = fuse(dit, kernels)
    installed = install(dit)
    notes = [f"attention {installed.blocks}"]
    notes += [f"not fused: {refused}"] if refused else []
    notes += [f"{probe.name}: {probe.reason}" for probe in kernels.probes if not probe.ok]
    return Model(dit, tuple(dit.blocks), MiniMaxH3DenoiseBranch, None if refused else kernels, notes="; ".join(notes))


class Request:
    """One request's tensors on a model, and what a step of it consists of.

    Args:
        size: of the clip, with its number of text tokens.

    Attributes:
        step: what the branch lays out as ``inputs``, which a step of the model takes.
    """

    def __init__(self, model: Model, size: RequestSize, device: torch.device) -> None:
        self.model = model
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        packed = minimax_h3_packed_sequence(
            text_len=size.text_tokens,
            latent_t=size.latent_frames,
            latent_h=size.height // 16,
            latent_w=size.width // 16,
            audio_t=round(size.frames / FPS * _LATENTS_PER_S),
            include_keyframe_cond=False,
        )
        config = model.dit.arch
        self.branch = model.branch(
            packed=packed,
            text_embeddings=normal(size.text_tokens, config.text_dim, dtype=torch.bfloat16),
            token_tags=packed["token_tags"],
            device=device,
        )
        self.tokens, self.used = self.branch.seq_len, self.branch.used_len
        video, audio = (1.0 - sigma for sigma in SIGMAS)
        self.step: dict[str, Any] = {
            "video_rows": normal(len(self.branch.img_pos), 96),
            "audio_rows": normal(len(self.branch.audio_pos), 32),
            "t_video": video,
            "t_audio": audio,
            "imgvid_cond_timestep": max(video, 0.999),
            "audio_ref_cond_timestep": 1.0,
        }
        self.inputs = self.branch.forward_kwargs(**self.step)
        self._into_blocks: tuple[torch.Tensor, dict[str, Any]] | None = None

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A step: video and audio rows."""
        result: tuple[torch.Tensor, torch.Tensor] = self.model.dit(**self.inputs)
        return result

    def outside(self) -> object:
        """A step without its blocks: embedding, refiner and heads."""
        blocks = self.model.dit.blocks
        self.model.dit.blocks = nn.ModuleList()
        try:
            return self.forward()
        finally:
            self.model.dit.blocks = blocks

    def blocks(self) -> torch.Tensor:
        """The blocks alone, on what a step gives them."""
        if self._into_blocks is None:
            catch, blocks = _Catch(), self.model.dit.blocks
            self.model.dit.blocks = nn.ModuleList([catch])
            try:
                self.forward()
            finally:
                self.model.dit.blocks = blocks
            assert catch.seen is not None
            self._into_blocks = catch.seen
        hidden, rest = self._into_blocks
        for block in self.model.dit.blocks:
            hidden = block(hidden, **rest)
        return hidden


class _Catch(nn.Module):
    """Stands for the blocks and keeps what they are called with."""

    seen: tuple[torch.Tensor, dict[str, Any]] | None = None

    def forward(self, hidden: torch.Tensor, **rest: Any) -> torch.Tensor:
        self.seen = hidden, rest
        return hidden


def _attention_layers(dit: nn.Module) -> list[Any]:
    return [module.attention for module in dit.modules() if isinstance(module, MiniMaxH3Attention)]


@contextmanager
def attention_as(dit: nn.Module, change: Callable[[], object]) -> Iterator[None]:
    """Other attention in a DiT's layers while this is open; ``change`` puts it there."""
    layers = _attention_layers(dit)
    before = [(layer.attn_backend, layer.attention) for layer in layers]
    try:
        change()
        yield
    finally:
        for layer, (backend, attention) in zip(layers, before, strict=True):
            layer.attn_backend, layer.attention = backend, attention


def put_masked_sdpa(dit: nn.Module) -> None:
    """The host's SDPA with its mask over pad rows, as where it finds no other kernel."""
    backend = SDPABackend if current_omni_platform.is_cuda() else MaskedSDPABackend
    for layer in _attention_layers(dit):
        layer.attn_backend = backend
        layer.attention = backend.get_impl_cls()(
            num_heads=layer.num_heads,
            head_size=layer.head_size,
            softmax_scale=layer.softmax_scale,
            causal=False,
            num_kv_heads=layer.num_kv_heads,
        )
