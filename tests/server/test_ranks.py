# SPDX-License-Identifier: Apache-2.0
"""Ranks over gloo behind the real server: one base for all, one rank's clip, and an end when one of them is lost.

The DiT's tokens are cut between the ranks (Ulysses), the text encoder's tensors and the video VAE's tiles too, as role
map ``four`` has it. Two ranks in every run; four ranks and twenty prompts with `make soak`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.processes import assert_gone
from tests.server.conftest import BUSY, HANGS_S, Running, Servers, request
from vllm_h3_plugin.checkpoint.synthetic import tiny_text
from vllm_h3_plugin.errors import H3Error, ServerError
from vllm_h3_plugin.serving.ranks import wait_with_ranks
from vllm_h3_plugin.video.decode import decoded_frames

MOST_PIXEL, MOST_SOUND = 6.0, 0.06
"""Mean difference of a pixel (of 255) and of a sample (relative, RMS) between clips of one and of several ranks. The
text encoder's row-parallel layers add in another order; H.264 and AAC make more of it. Another seed differs by 10 times
as much."""

CODE = 512 << 10
"""Bytes that a server may read of programs and libraries whose pages a busy machine has dropped; the text encoder's
weights alone, read once, are ten times that."""


def cut_between(ranks: int) -> dict[str, tuple[int, ...]]:
    """As role map ``four``."""
    cards = tuple(range(ranks))
    return {"dit": cards, "text_encoder": cards, "video_vae": cards, "audio_vae": (ranks - 1,)}


@pytest.fixture(scope="module")
def two(servers: Servers, fl2va: Path) -> Running:
    return servers.start(fl2va, recipe="fp8", executor="mp", devices=2, roles=cut_between(2))


def test_one_rank_builds_the_base_and_both_map_it(two: Running) -> None:
    workers = sorted(two.info["workers"], key=lambda worker: worker["rank"])
    bases = [worker["load"]["base"] for worker in workers]
    assert [worker["rank"] for worker in workers] == [0, 1] and len({worker["pid"] for worker in workers}) == 2
    assert sorted(base["built_here"] for base in bases) == [False, True] and len({base["id"] for base in bases}) == 1
    assert all(base["viewed_bytes"] > 0 and base["copied_bytes"] > 0 for base in bases)
    # Whole parameters are views, the text encoder's slices are copies; a rank holds no more than that.
    assert all(base["viewed_bytes"] + base["copied_bytes"] <= 1.01 * base["nbytes"] for base in bases)
    assert "serves any tensor-parallel size" in bases[0]["note"]
    assert "quantizes the weights for this machine" in two.log


def test_two_ranks_make_one_ranks_clip_within_the_tolerance(two: Running, fp8: Running, tmp_path: Path) -> None:
    one = fp8.make(request(seed=5), tmp_path / "one.mp4")
    pixels, sound = differences(one, two.make(request(seed=5), tmp_path / "two.mp4"))
    assert pixels <= MOST_PIXEL and sound <= MOST_SOUND
    other, _ = differences(one, two.make(request(seed=6), tmp_path / "other.mp4"))
    assert other > 2 * MOST_PIXEL, "another seed is as near: the tolerance says nothing"


def test_prompts_in_a_row_read_no_weights(two: Running, tmp_path: Path) -> None:
    assert reads(two, tmp_path, prompts=3) <= CODE


def test_a_rank_killed_in_a_request_is_a_failure_with_a_name_and_an_end(two: Running, tmp_path: Path) -> None:
    """Last in this module: the server is gone afterwards."""
    workers = two.info["workers"]
    lost = next(worker for worker in workers if worker["rank"] == 1)
    answers: list[BaseException] = []

    def ask() -> None:
        try:
            two.make(BUSY, tmp_path / "lost.mp4")
        except (H3Error, OSError) as exc:
            answers.append(exc)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: two.client.info()["progress"]["phase"] == "denoising")
    psutil.Process(lost["pid"]).kill()
    said: list[str] = []
    try:
        # A server that sees it first ends by itself, and says so with its exit code.
        assert wait_with_ranks(two.server, workers, grace_s=HANGS_S, say=said.append) != 0
    except ServerError as exc:
        assert f"rank 1 (pid {lost['pid']}) ended while the server was running" in exc.what
    assert f"rank 1 (pid {lost['pid']}) has ended" in " ".join(said)
    two.server.stop(3)
    asking.join(timeout=HANGS_S)
    assert answers and not asking.is_alive()
    assert_gone(worker["pid"] for worker in workers)


def test_stages_that_take_turns_make_the_same_clip_to_the_byte(
    own_servers: Servers, fl2va: Path, fp8: Running, tmp_path: Path
) -> None:
    staged = own_servers.start(fl2va, recipe="fp8", resident="stage", cache=None)
    for seed in (1, 2):
        asked = request(seed=seed)
        one = fp8.make(asked, tmp_path / f"all{seed}.mp4").read_bytes()
        assert staged.make(asked, tmp_path / f"stage{seed}.mp4").read_bytes() == one
    assert reads(staged, tmp_path, prompts=3) <= CODE
    stages = staged.client.info()["workers"][0]["stages"]
    assert all(stage["reloads"] >= 2 for stage in stages.values())
    assert stages["dit"]["host_copy_bytes"] < stages["dit"]["nbytes"], "the DiT comes back from the base"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_ranks_twenty_prompts(
    own_servers: Servers, checkpoint_of: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    """The second start of each maps what the first one built. The text encoder has a key/value head for each rank."""
    partition = checkpoint_of(partition="fl2va", text=replace(tiny_text(), num_key_value_heads=ranks))
    alone = own_servers.start(partition, recipe="fp8")
    one = alone.make(request(seed=5), tmp_path / "one.mp4")
    alone.server.stop(3)
    roles = cut_between(ranks)
    first = own_servers.start(partition, recipe="fp8", executor="mp", devices=ranks, roles=roles)
    first.server.stop(3)
    again = own_servers.start(partition, recipe="fp8", executor="mp", devices=ranks, roles=roles, cache=first.cache)
    assert not any(worker["load"]["base"]["built_here"] for worker in again.info["workers"])
    pixels, sound = differences(one, again.make(request(seed=5), tmp_path / "many.mp4"))
    assert pixels <= MOST_PIXEL and sound <= MOST_SOUND
    assert reads(again, tmp_path, prompts=20) <= CODE


def reads(running: Running, folder: Path, prompts: int) -> int:
    """Bytes that the workers read from the disk over that many prompts, after one that warms them up."""
    running.make(request(seed=100), folder / "warm.mp4")
    processes = [psutil.Process(worker["pid"]) for worker in running.info["workers"]]
    before = sum(process.io_counters().read_bytes for process in processes)
    for seed in range(prompts):
        running.make(request(seed=seed), folder / f"prompt{seed}.mp4")
    return sum(process.io_counters().read_bytes for process in processes) - before


def differences(one: Path, other: Path) -> tuple[float, float]:
    """Mean difference of pixels, and of samples relative to the first clip's."""
    (pixels, sound), (more_pixels, more_sound) = decoded(one), decoded(other)
    assert pixels.shape == more_pixels.shape and sound.shape == more_sound.shape
    moved = float(np.sqrt(np.mean((sound - more_sound) ** 2)) / np.sqrt(np.mean(sound**2)))
    return float(np.abs(pixels - more_pixels).mean()), moved


def decoded(clip: Path) -> tuple[np.ndarray, np.ndarray]:
    frames, samples = [], []
    for frame in decoded_frames(clip):
        if hasattr(frame, "to_image"):
            frames.append(frame.to_ndarray(format="rgb24").astype(np.float32))  # type: ignore[call-arg]
        else:
            samples.append(frame.to_ndarray())
    return np.stack(frames), np.concatenate(samples, axis=-1)


def until(reached: object, seconds: float = HANGS_S) -> None:
    deadline = time.monotonic() + seconds
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)
