# SPDX-License-Identifier: Apache-2.0
"""What an adapter of each published kind holds, for a DiT of any shape: names and shapes from the model's own tables.

============ ========================================= =========================================================
kind         recognised by                             layers
============ ========================================= =========================================================
``turbo``    file name, ``lora_A.default`` names       every block linear but AdaLN, in Diffusers names, rank 128
``flashgen`` metadata ``key_format=minimax-h3-native`` every block linear and AdaLN, in native names, rank 64
``fasth3``   metadata ``format=fastvideo-lora-v2``     low-rank factors and whole differences, in Diffusers names
``peft``     ``adapter_config.json`` beside the file   whatever it names, in native names
============ ========================================= =========================================================

Sources: vLLM-Omni 0.30.0 ``diffusion/models/minimax_h3/lora.py``, ``npu/lora.py`` and ``fasth3.py``; 0.28.0 has the
first for one file only. A test holds the tables of the real model against the host's constants. Importing this module
does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from vllm_h3_plugin.checkpoint.layout import DitConfig, TextEncoderConfig, dit_tensors, linear_layers, to_diffusers

Kind = Literal["turbo", "flashgen", "fasth3", "peft"]
KINDS: tuple[Kind, ...] = ("turbo", "flashgen", "fasth3", "peft")

TURBO_RANK, FLASHGEN_RANK = 128, 64
TURBO_DEFAULT_ALPHA = 8.0
"""Of a file that declares none: LightX2V's own default (``lora.py`` ``_TURBO_DEFAULT_ALPHA``)."""
FLASHGEN_ALPHA = 64.0
FLASHGEN_STEPS = FASTH3_STEPS = 4
PEFT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Buffer ranks of the host (vLLM ``config/lora.py`` ``MaxLoRARanks``); an adapter of another rank takes the next."""

TURBO_FORMAT, FLASHGEN_FORMAT, FASTH3_FORMAT = "minimax-h3-diffusers", "minimax-h3-native", "fastvideo-lora-v2"
FLASHGEN_FILE = "minimax_h3_t2va_flashgen_4step_v1.0_768p_bf16.safetensors"
FASTH3_MODEL = "FastVideo/FastVideo-FastH3-4-step-Preview-v1-Dense-DataFree"
BASE_MODEL = "MiniMaxAI/MiniMax-H3"
FLASHGEN_POSITIONS = (0.999, 0.749, 0.5, 0.25, 0.0)
"""For synthetic files; a published one declares its own."""

DEFAULT_A, DEFAULT_B = ".lora_A.default.weight", ".lora_B.default.weight"
PLAIN_A, PLAIN_B = ".lora_A.weight", ".lora_B.weight"
ROLES = {PLAIN_A: "a", PLAIN_B: "b", ".diff_b": "diff_b", ".diff": "diff", ".set_weight": "set"}
"""Ends of a FastH3 tensor's name, in the order in which they are tried."""

_TURBO_NAME = re.compile(
    r"^minimax_h3_(?P<task>fl2v|ref2v)_turbo_(?P<steps>[1-9]\d*)step_v\d+\.\d+(?P<res>_768p)?(?:_bf16)?\.safetensors$"
)


@dataclass(frozen=True)
class TurboName:
    """What a Turbo file's name says, the only place that says it.

    Attributes:
        tasks: kinds of clip that it was distilled for.
        steps: denoise evaluations.
        video_shift, audio_shift: of the schedule.
    """

    tasks: tuple[str, ...]
    steps: int
    video_shift: float
    audio_shift: float = 3.0


@dataclass(frozen=True)
class Factors:
    """One layer of an adapter: ``B A`` with A ``[rank, wide]`` and B ``[high, rank]`` is added to its weight."""

    wide: int
    high: int


def parse_turbo_name(name: str) -> TurboName | None:
    """The contract in a Turbo file's name; None if it is no such name (``lora.py`` ``parse_turbo_filename``)."""
    match = _TURBO_NAME.match(name)
    if match is None:
        return None
    tasks = ("ref2va",) if match["task"] == "ref2v" else ("t2va", "fl2va")
    # The 768p files were trained at a shorter shift (lora.py _TURBO_VIDEO_SHIFT_768P).
    return TurboName(tasks, int(match["steps"]), 6.0 if match["res"] else 12.0)


def turbo_file(steps: int, task: str = "fl2v", *, res_768p: bool = True) -> str:
    """A file name that says so."""
    return f"minimax_h3_{task}_turbo_{steps}step_v1.0{'_768p' if res_768p else ''}_bf16.safetensors"


@cache
def native_linears(config: DitConfig) -> Mapping[str, Factors]:
    """Every linear layer of the DiT by its native module name, such as ``blocks.0.attn.qkv_proj``."""
    specs = linear_layers(config, TextEncoderConfig(num_hidden_layers=1))
    return {
        spec.path.removeprefix("transformer."): Factors(spec.in_features, spec.out_features)
        for spec in specs
        if spec.part == "transformer"
    }


def is_block_linear(name: str) -> bool:
    """Whether a native module is an attention or MLP linear of a block or of the token refiner."""
    return re.fullmatch(r"(?:token_refiner\.)?blocks\.\d+\.(?:attn|mlp)\.\w+", name) is not None


@cache
def turbo_layers(config: DitConfig) -> Mapping[str, Factors]:
    """Layers of a Turbo adapter by Diffusers name: all attention and MLP linears, q, k and v apart."""
    found = {}
    for name, whole in native_linears(config).items():
        if is_block_linear(name):
            targets = to_diffusers(f"{name}.weight")
            for target in targets:
                found[target.name.removesuffix(".weight")] = Factors(whole.wide, whole.high // len(targets))
    return found


@cache
def flashgen_layers(config: DitConfig) -> Mapping[str, Factors]:
    """Layers of a FlashGen adapter by native name: all attention and MLP linears, fused as they are, and AdaLN."""
    return {
        name: factors
        for name, factors in native_linears(config).items()
        if is_block_linear(name) or name.endswith("adaln_proj.linear")
    }


@cache
def fasth3_modules(config: DitConfig) -> Mapping[str, tuple[str, dict[str, tuple[int, ...]]]]:
    """What a FastH3 adapter may change, by Diffusers module name.

    Returns:
        module -> (its native name, shapes in the Diffusers layout by ``weight`` and ``bias``).
    """
    found: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {}
    for spec in dit_tensors(config).values():
        targets = to_diffusers(spec.name)
        for target in targets:
            module, _, kind = target.name.rpartition(".")
            shape = (spec.shape[0] // len(targets), *spec.shape[1:])
            found.setdefault(module, (spec.name.rpartition(".")[0], {}))[1][kind] = shape
    return found


def fasth3_role(name: str) -> tuple[str, str] | None:
    """(module, role) of a FastH3 tensor; None for a name of another form."""
    for end, role in ROLES.items():
        if name.endswith(end):
            return name.removesuffix(end), role
    return None


_ADALN = (".adaln_proj.", ".norm_out.linear.")
_EMBEDDER = (".time_embedder.",)


def behind_table(names: Iterable[str]) -> tuple[str | None, str | None]:
    """The first of an adapter's names that changes AdaLN, and the first that changes the timestep embedder.

    Args:
        names: of tensors or modules, in either layout, with any prefix.
    """
    listed = sorted(names)

    def first(parts: tuple[str, ...]) -> str | None:
        return next((name for name in listed if any(part in f".{name}." for part in parts)), None)

    return first(_ADALN), first(_EMBEDDER)
