# SPDX-License-Identifier: Apache-2.0
"""What H3 delivers for what was asked: frames, seconds, sizes."""

from __future__ import annotations

import pytest

from vllm_h3_plugin.errors import UsageError
from vllm_h3_plugin.video.geometry import frames_of_seconds, snap_frames, snap_size


@pytest.mark.parametrize(
    ("asked", "delivered"), [(1, 5), (5, 5), (6, 22), (56, 56), (96, 107), (120, 124), (124, 124), (209, 209)]
)
def test_frames_snap_up_to_the_next_17n_plus_5(asked: int, delivered: int) -> None:
    assert snap_frames(asked) == delivered


def test_snapping_equals_the_hosts_loop_for_every_length() -> None:
    for asked in range(1, 500):
        current = asked
        while current % 17 != 5:  # the host's own words: time_request.py, _align_frame_count
            current += 1
        assert snap_frames(asked) == current


@pytest.mark.parametrize("asked", [0, -3])
def test_fewer_than_one_frame_is_refused(asked: int) -> None:
    with pytest.raises(UsageError, match=rf"frames={asked}.*at least one frame"):
        snap_frames(asked)


@pytest.mark.parametrize(("seconds", "delivered"), [(4, 107), (5, 124), (15, 362), (4.0208, 107)])
def test_seconds_round_to_frames_and_then_snap(seconds: float, delivered: int) -> None:
    assert frames_of_seconds(seconds) == delivered


@pytest.mark.parametrize("seconds", [0, 0.01, -1, float("nan"), float("inf")])
def test_a_duration_that_is_no_clip_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"seconds=.*--seconds 5"):
        frames_of_seconds(seconds)


@pytest.mark.parametrize(
    ("asked", "delivered"), [((768, 448), (768, 448)), ((770, 450), (768, 448)), ((95, 64), (64, 64))]
)
def test_sides_are_floored_to_multiples_of_32(asked: tuple[int, int], delivered: tuple[int, int]) -> None:
    assert snap_size(*asked) == delivered


@pytest.mark.parametrize("size", [(0, 448), (768, 31)])
def test_a_side_below_32_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=rf"size {size[0]}x{size[1]}.*32 pixels.*768x448"):
        snap_size(*size)
