# SPDX-License-Identifier: Apache-2.0
"""What FP8 costs over a whole denoise, and what a scale per channel is worth.

A small DiT goes through the host's own loop: eight evaluations, first and last frame given, the same noise for all.
FP8 is held against BF16 by the final latents of the rows that were denoised, for four seeds of weights and noise.
Gates are about 0.5, so that the error of every block reaches the output (see ``random_weights``).

One linear with E4M3 weights and activations is off by 3.75 % on Gaussian data. Blocks add their errors in squares as
they add their outputs, so the velocity is off by about as much as one block is, and the latents, part of whose length
is the noise they started from, by somewhat less: 2.6 to 3.6 % measured, cosine 0.9994. A ceiling of 4.5 %, which is a
cosine of 0.999, fails if the mantissa loses a single bit (tested below: 7 % and more); a floor of 2 % fails if nothing
was quantized.

Outliers. E4M3 is a floating format: a row that is 30 or 1000 times as large as the others costs them nothing but
exponent range, and per channel and per tensor come out alike. From a factor of about 2^14 on the ordinary rows, whose
weights then lie below 2^-6 of the largest number, become subnormal and lose bits. ``with_outlier_rows`` makes such rows
without changing the function, in BF16 not by a single bit, so that what is left is the weight's scale alone. The two
recipes compared there differ in nothing else.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.contract.dit_inputs import (
    Latents,
    Weights,
    cosine,
    denoise,
    host_dit,
    make_request,
    per_tensor,
    precision_plan,
    random_weights,
    relative_error,
    root_mean_square,
    with_outlier_rows,
)
from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
from vllm_h3_plugin.quantization import fp8
from vllm_h3_plugin.quantization.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_dit(layers=3, refiner_layers=1, hidden=128, heads=4, head_dim=32, ffn=256)
SEEDS = range(4)
STEPS = 8
OUTLIER_FACTOR = 2.0**15
FLOOR, CEILING, COSINE = 0.02, 0.045, 0.999
BY_CHANNEL = load_recipe("fp8")
BY_TENSOR = per_tensor(BY_CHANNEL)


class Subject:
    """One network and one request. Latents are kept: several tests look at the same ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.weights = random_weights(CONFIG, seed)
        self.outliers = with_outlier_rows(CONFIG, self.weights, OUTLIER_FACTOR)
        self.request = make_request("fl2va", device, seed)
        self.device = device
        self.plain = cache(lambda recipe: self.denoise(recipe, self.weights))

    def denoise(self, recipe: Recipe | str, weights: Weights) -> Latents:
        """The host's denoise under a recipe."""
        dit = host_dit(CONFIG, weights, self.device, precision_plan(recipe, CONFIG))
        return denoise(dit, self.request, STEPS)

    def errors(self, got: Latents) -> tuple[float, float]:
        """Relative errors of video and audio against BF16."""
        video, audio = self.plain("bf16")
        return relative_error(got[0], video), relative_error(got[1], audio)

    def close(self, got: Latents) -> bool:
        """Whether latents are as close to BF16 as FP8's should be."""
        cosines = [cosine(a, b) for a, b in zip(got, self.plain("bf16"), strict=True)]
        return max(self.errors(got)) < CEILING and min(cosines) > COSINE


@pytest.fixture(scope="module")
def subjects(device: torch.device) -> list[Subject]:
    return [Subject(seed, device) for seed in SEEDS]


def test_denoising_moves_the_latents(subjects: list[Subject]) -> None:
    """Else closeness would only say that both kept their noise."""
    for subject in subjects:
        request = subject.request
        video, audio = subject.plain("bf16")
        assert relative_error(video, request.noise[0][request.branch.update_mask]) > 0.5
        assert relative_error(audio, request.noise[1]) > 0.5


@pytest.mark.parametrize("recipe", ["fp8", "fp8-tensor"])
def test_fp8_is_close_to_bf16(recipe: str, subjects: list[Subject]) -> None:
    for subject in subjects:
        got = subject.plain(load_recipe(recipe))
        assert subject.close(got), subject.errors(got)
        assert min(subject.errors(got)) > FLOOR


def test_one_bit_of_mantissa_less_is_noticed(subjects: list[Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """E5M2 has two bits where E4M3 has three."""
    quantize_rows = fp8._quantize_rows

    def coarser(values: torch.Tensor, factor: torch.Tensor, **how: bool) -> torch.Tensor:
        return quantize_rows(values, factor, **how).to(torch.float8_e5m2).to(fp8.E4M3)

    monkeypatch.setattr(fp8, "_quantize_rows", coarser)
    for subject in subjects:
        assert not subject.close(subject.denoise("fp8", subject.weights))


def test_per_channel_is_no_worse_than_per_tensor(subjects: list[Subject]) -> None:
    """On plain weights the two are alike; chance makes either better in one run, hence the mean over seeds."""
    channel, tensor = (
        root_mean_square(error for subject in subjects for error in subject.errors(subject.plain(recipe)))
        for recipe in (BY_CHANNEL, BY_TENSOR)
    )
    assert channel < 1.05 * tensor


def test_outlier_rows_do_not_change_the_function(subjects: list[Subject]) -> None:
    subject = subjects[0]
    for got, want in zip(subject.denoise("bf16", subject.outliers), subject.plain("bf16"), strict=True):
        assert torch.equal(got, want)


def test_outlier_rows_cost_nothing_per_channel(subjects: list[Subject]) -> None:
    """Each row's own scale takes the whole factor: the same latents to the bit."""
    for subject in subjects:
        for got, want in zip(subject.denoise(BY_CHANNEL, subject.outliers), subject.plain(BY_CHANNEL), strict=True):
            assert torch.equal(got, want)


def test_outlier_rows_are_clearly_worse_per_tensor(subjects: list[Subject]) -> None:
    for subject in subjects:
        channel = subject.errors(subject.plain(BY_CHANNEL))
        tensor = subject.errors(subject.denoise(BY_TENSOR, subject.outliers))
        assert root_mean_square(tensor) > 2 * root_mean_square(channel)
