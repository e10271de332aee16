# SPDX-License-Identifier: Apache-2.0
"""Which timesteps a request's forwards see."""

from __future__ import annotations

import pytest
import torch

from vllm_h3_plugin.conditioning.schedule import Roles, Schedule, group_of, schedule

VIDEO = (1.0, 0.96, 0.5, 0.0)
AUDIO = (1.0, 0.8, 0.25, 0.0)


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def test_step_0_has_one_timestep_and_every_other_step_two() -> None:
    made = schedule(VIDEO, AUDIO, Roles())
    assert [len(group) for group in made.groups] == [1, 2, 2]
    assert made.groups[0] == (0.0,)
    assert made.groups[1] == (fp32(1 - 0.96), fp32(1 - 0.8))
    assert made.rows == 5


def test_fifty_steps_of_text_to_video_are_99_rows() -> None:
    ramp = [1 - i / 50 for i in range(51)]
    shifted = [3 * s / (1 + 2 * s) for s in ramp]
    assert schedule([12 * s / (1 + 11 * s) for s in ramp], shifted, Roles()).rows == 1 + 49 * 2


@pytest.mark.parametrize(
    ("roles", "last"),
    [
        (Roles(image=True), (fp32(0.5), fp32(0.75), fp32(0.999))),
        (Roles(reference_audio=True), (fp32(0.5), fp32(0.75), 1.0)),
        (Roles(image=True, reference_audio=True), (fp32(0.5), fp32(0.75), fp32(0.999), 1.0)),
        (Roles(locked_audio=True), (fp32(0.5), 1.0)),
        (Roles(audio=False), (fp32(0.5),)),
    ],
)
def test_each_kind_of_row_brings_its_timestep(roles: Roles, last: tuple[float, ...]) -> None:
    assert schedule(VIDEO, AUDIO, roles).groups[-1] == last


def test_given_frames_follow_the_video_once_it_has_passed_them() -> None:
    late = schedule((0.0005, 0.0), (0.4, 0.0), Roles(image=True))
    assert late.groups == ((fp32(0.6), fp32(0.9995)),)


def test_values_are_rounded_to_fp32_and_equal_ones_fall_together() -> None:
    assert group_of([0.1, 0.1 + 1e-12, 0.3]) == (fp32(0.1), fp32(0.3))


def test_steps_that_repeat_are_one_group() -> None:
    assert schedule((0.5, 0.5, 0.0), (0.5, 0.5, 0.0), Roles()).groups == ((0.5,),)


def test_the_digest_follows_values_and_grouping_and_not_the_label() -> None:
    one = Schedule(((0.0,), (0.25, 0.5)), "a")
    assert one.digest == Schedule(((0.0,), (0.25, 0.5)), "b").digest
    others = [((0.0, 0.25), (0.5,)), ((0.25, 0.5), (0.0,)), ((0.0,), (0.25, 0.5000001))]
    assert len({one.digest, *(Schedule(groups).digest for groups in others)}) == 4


def test_schedules_of_different_lengths_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        schedule((1.0, 0.0), (1.0, 0.5, 0.0), Roles())
