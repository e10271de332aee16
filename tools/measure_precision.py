# SPDX-License-Identifier: Apache-2.0
"""Measure what precision costs and write ``docs/results/precision.json``: ``python -m tools.measure_precision``.

Runs in a host's environment, on the CPU reference platform, with the code that tests/contract asserts with: one forward
against Diffusers' H3 transformer, and a whole denoise in FP8 against BF16. Minutes on two cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Cell, Result, write_result
from vllm_h3_plugin.pins import installed_host

LAYERS, HIDDEN, HEADS, FFN = 8, 512, 8, 1024
STEPS = 8
SEEDS = (0, 1)
FACTORS = tuple(2.0**power for power in (5, 10, 14, 15))
PLAIN = "plain"
BF16 = "BF16, against FP32"
PER_CHANNEL = "recipe fp8 (per channel)"
PER_TENSOR = "recipe fp8 with one scale per tensor"
ADALN_FP8 = "recipe bf16 with AdaLN in FP8, as the stock host has it"


@dataclass(frozen=True)
class Measured:
    """Relative errors and cosines of video and audio, over all seeds."""

    video_error: float
    audio_error: float
    video_cosine: float
    audio_cosine: float

    def row(self, what: str, weights: str) -> dict[str, Cell]:
        """As a row of the results' table."""
        return {
            "Compared": what,
            "Weights": weights,
            "Video, relative error": float(f"{self.video_error:.3g}"),
            "Audio, relative error": float(f"{self.audio_error:.3g}"),
            "Video, cosine": f"{self.video_cosine:.6f}",
            "Audio, cosine": f"{self.audio_cosine:.6f}",
        }

    @property
    def error(self) -> float:
        """Root mean square of both errors."""
        return ((self.video_error**2 + self.audio_error**2) / 2) ** 0.5


def compare(runs: list[tuple[Any, Any]]) -> Measured:
    """(latents, reference) of each seed -> root mean square of the errors, smallest cosines."""
    from tests.contract import dit_inputs as h3

    errors = [[h3.relative_error(got[part], want[part]) for got, want in runs] for part in (0, 1)]
    cosines = [min(h3.cosine(got[part], want[part]) for got, want in runs) for part in (0, 1)]
    return Measured(*(h3.root_mean_square(values) for values in errors), *cosines)


def measure_diffusers(device: Any, config: Any) -> dict[str, Measured]:
    """One forward of each task, host and Diffusers, FP32 and BF16; the reference is Diffusers in FP32."""
    from tests.contract import dit_inputs as h3

    runs: dict[str, list[tuple[Any, Any]]] = {"host, FP32": [], "host, BF16": [], "Diffusers, BF16": []}
    weights = h3.random_weights(config)
    exact, mixed = (h3.diffusers_dit(config, weights, fp32=fp32) for fp32 in (True, False))
    for task in h3.TASKS:
        request = h3.make_request(task, device)
        inputs = h3.forward_inputs(request, 0.3, 0.6)
        want = h3.diffusers_velocity(exact, request, inputs)
        served = h3.host_dit(config, weights, device)
        runs["host, BF16"].append((h3.host_velocity(served, request, inputs), want))
        with h3.host_in_fp32(served) as widened:
            runs["host, FP32"].append((h3.host_velocity(widened, request, inputs), want))
        runs["Diffusers, BF16"].append((h3.diffusers_velocity(mixed, request, inputs), want))
    return {what: compare(found) for what, found in runs.items()}


def measure_denoise(device: Any, config: Any, progress: Callable[[str], None]) -> dict[tuple[str, str], Measured]:
    """A whole denoise by (precision, weights); the reference is BF16, and FP32 for BF16 itself."""
    from tests.contract import dit_inputs as h3
    from vllm_h3_plugin.quantization.recipe import load_recipe

    channel = h3.precision_plan("fp8", config)
    tensor = h3.precision_plan(h3.per_tensor(load_recipe("fp8")), config)
    bf16 = h3.precision_plan("bf16", config)
    cases = [
        (PER_CHANNEL, PLAIN, channel),
        (PER_TENSOR, PLAIN, tensor),
        ("recipe fp8-tensor", PLAIN, h3.precision_plan("fp8-tensor", config)),
        (ADALN_FP8, PLAIN, h3.adaln_in_fp8(bf16)),
        ("recipe fp8 with AdaLN in FP8", PLAIN, h3.adaln_in_fp8(channel)),
        *((PER_TENSOR, outliers(factor), tensor) for factor in FACTORS),
        (PER_CHANNEL, outliers(FACTORS[-1]), channel),
        ("recipe bf16", outliers(FACTORS[-1]), bf16),
    ]
    factors = {outliers(factor): factor for factor in FACTORS}
    runs: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for seed in SEEDS:
        plain = h3.random_weights(config, seed)
        request = h3.make_request("fl2va", device, seed)
        served = h3.host_dit(config, plain, device)
        progress(f"seed {seed}: BF16")
        reference = h3.denoise(served, request, STEPS)
        progress(f"seed {seed}: FP32")
        with h3.host_in_fp32(served) as widened:
            runs.setdefault((BF16, PLAIN), []).append((reference, h3.denoise(widened, request, STEPS)))
        for what, weights, precisions in cases:
            progress(f"seed {seed}: {what}, {weights}")
            used = plain if weights == PLAIN else h3.with_outlier_rows(config, plain, factors[weights])
            got = h3.denoise(h3.host_dit(config, used, device, precisions), request, STEPS)
            runs.setdefault((what, weights), []).append((got, reference))
    return {case: compare(found) for case, found in runs.items()}


def outliers(factor: float) -> str:
    """Weights with outlier rows, in words."""
    return f"1 row in 64 × {factor:.0f}"


def ratios(forward: dict[str, Measured], denoised: dict[tuple[str, str], Measured]) -> dict[str, float | None]:
    """The figures that runs are compared by."""
    channel, tensor = denoised[PER_CHANNEL, PLAIN], denoised[PER_TENSOR, PLAIN]
    adaln = denoised[ADALN_FP8, PLAIN]
    figures = {
        "host_fp32_error": forward["host, FP32"].error,
        "host_bf16_error": forward["host, BF16"].error,
        "host_bf16_over_diffusers_bf16": forward["host, BF16"].error / forward["Diffusers, BF16"].error,
        "bf16_denoise_error": denoised[BF16, PLAIN].error,
        "fp8_video_error": channel.video_error,
        "fp8_audio_error": channel.audio_error,
        "fp8_video_cosine": channel.video_cosine,
        "fp8_audio_cosine": channel.audio_cosine,
        "tensor_over_channel_plain": tensor.error / channel.error,
        **{
            f"tensor_over_channel_outliers_{factor:.0f}": denoised[PER_TENSOR, outliers(factor)].error / channel.error
            for factor in FACTORS
        },
        "adaln_fp8_alone_error": adaln.error,
    }
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def main() -> int:
    """Measure and write."""
    os.environ["H3_REFERENCE"] = "1"  # before vLLM is imported: it discovers its platform once
    host = installed_host()

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    config = tiny_dit(layers=LAYERS, refiner_layers=2, hidden=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, ffn=FFN)
    register()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, single_rank() as device:
        task = bar.add_task("one forward against Diffusers", total=None)
        forward = measure_diffusers(device, config)
        denoised = measure_denoise(device, config, lambda what: bar.update(task, description=what))
    reference = "Diffusers, FP32"
    result = Result(
        title="Precision: the DiT against Diffusers' own, and FP8 against BF16 over a whole denoise",
        command="python -m tools.measure_precision",
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions("diffusers"),
        rows=[
            *(found.row(f"one forward: {what}, against {reference}", PLAIN) for what, found in forward.items()),
            *(found.row(f"denoise: {what}", weights) for (what, weights), found in denoised.items()),
        ],
        ratios=ratios(forward, denoised),
        notes=f"Random weights, host {host.name}, width {HIDDEN}, {LAYERS} blocks, gates of about 0.5 so that no block "
        "is hidden by a small one. One forward: text, first and last frame, and references, root mean square over the "
        f"three. Denoise: {STEPS} evaluations in the host's own loop, first and last frame given, the same noise, "
        f"against BF16 unless said; errors are the root mean square over {len(SEEDS)} seeds, cosines the smallest. "
        "Outlier rows leave the function as it is, to the bit in BF16 (a gate behind them is divided by what they are "
        "multiplied with); E4M3 keeps a row 1000 times the others apart by its exponent alone, so that one scale per "
        "tensor loses only from about 2^14 on. Per channel such rows change nothing, to the bit. Whether the real "
        "weights have such rows is not known here.",
    )
    print(write_result(RESULTS, "precision", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
