# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 demo``: the main job from end to end, on a machine with or without an accelerator."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
    from vllm_h3_plugin.serving.profile import Profile

_STEPS = 8
# The smallest size that both hosts take a first frame at: 0.28 holds the fitted frame to 256 pixels a side.
_SIZE = 256
_FRAMES = 96


@dataclass(frozen=True)
class Clip:
    """One finished clip of the demo."""

    name: str
    path: Path
    sheet: Path
    sha256: str
    request_s: float


def demo(
    out: Path = typer.Option(Path("demo-output"), "--out", "-o", help="Folder for clips, contact sheets and the log."),
    checkpoint: Path | None = typer.Option(
        None, "--checkpoint", "-c", help="Serve this checkpoint. [default: a small random one, made for the demo]"
    ),
    profile: str = typer.Option("reference", help="Launch profile. `reference` runs on any CPU."),
    recipe: str | None = typer.Option(None, help="Precision recipe. [default: the profile's]"),
    size: int = typer.Option(_SIZE, min=_SIZE, help="Width and height in pixels, a multiple of 32."),
    frames: int = typer.Option(_FRAMES, min=96, max=360, help="Frames at 24 fps; snapped up to 17 n + 5."),
    steps: int = typer.Option(_STEPS, min=1, max=200, help="Denoise steps."),
    seed: int = typer.Option(1, help="Seed of both requests."),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line."),
) -> None:
    """Make and verify two clips on this machine: one from a prompt, one from a prompt and a first frame.

    Writes a small random checkpoint, starts the real `vllm serve --omni` with the plugin on a free loopback port, asks
    for the clips over HTTP, verifies them, draws contact sheets, and stops the server. The weights are random:
    the pictures are abstract, the path is the real one. Nothing is overwritten: each run gets its own folder below OUT.

    \b
    vllm-h3 demo
    vllm-h3 demo --recipe bf16 --frames 124
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.cli.serve import stop_on_sigterm
    from vllm_h3_plugin.video.tools import find_ffmpeg

    started = time.monotonic()
    if size % 32:
        raise UsageError(f"--size {size}", why="H3 makes sides that are multiples of 32", fix=f"Use {size // 32 * 32}.")
    find_ffmpeg()
    stop_on_sigterm()
    console = stderr()
    folder = _new_folder(out)
    console.print(f"demo in {folder}", markup=False)
    plan = _profile(profile, recipe, checkpoint or _make_checkpoint(folder, console))
    # A checkpoint of one run is never met again: what is kept of it goes where the run goes.
    cache = folder / "cache" if checkpoint is None and not os.environ.get("H3_CACHE_DIR") else None
    ready_s, clips = _serve_and_make(plan, folder, cache, console, size=size, frames=frames, steps=steps, seed=seed)
    total = time.monotonic() - started
    for clip in clips:
        stdout().print(
            f"{clip.name}: {clip.path} verified in full, {clip.request_s:.1f} s, sheet {clip.sheet}", markup=False
        )
    stdout().print(
        f"ok: {len(clips)} clips in {folder} | server ready {ready_s:.1f} s, whole demo {total:.1f} s", markup=False
    )
    if as_json:
        emit_json(
            True,
            folder=folder,
            clips=[vars(clip) for clip in clips],
            ready_s=round(ready_s, 2),
            demo_s=round(total, 2),
        )


def _new_folder(out: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = out / (stamp if attempt == 0 else f"{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as exc:
            raise UsageError(
                f"cannot make a folder in {out}", why=exc.strerror or str(exc), fix="Choose another with --out."
            ) from exc
        return folder.absolute()
    raise UsageError(f"no free folder name in {out}", fix="Choose another with --out.")


def _make_checkpoint(folder: Path, console: Console) -> Path:
    from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
    from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint

    with console.status("writing a small random checkpoint"):
        made = write_checkpoint(folder / "checkpoint", SynthSpec())
    console.print(f"checkpoint: {made.bytes / 1e6:.0f} MB, real layout, random weights", markup=False)
    return made.partitions[0]


def _profile(name: str, recipe: str | None, checkpoint: Path) -> Profile:
    from vllm_h3_plugin.serving.profile import load_profile
    from vllm_h3_plugin.serving.server import free_port

    update: dict[str, Any] = {"checkpoint": checkpoint, "port": free_port()}
    if recipe is not None:
        update["recipe"] = recipe
    return load_profile(name).model_copy(update=update)


def _serve_and_make(
    profile: Profile,
    folder: Path,
    cache: Path | None,
    console: Console,
    *,
    size: int,
    frames: int,
    steps: int,
    seed: int,
) -> tuple[float, list[Clip]]:
    from vllm_h3_plugin.cli.serve import check_before_start
    from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
    from vllm_h3_plugin.serving.command import server_command
    from vllm_h3_plugin.serving.server import Server

    partition = check_before_start(profile)
    run_dir = folder / "run"
    run_dir.mkdir()
    command = server_command(profile, partition, run_dir=run_dir, environ=os.environ)
    if cache is not None:
        command = replace(command, environment={**command.environment, "H3_CACHE_DIR": str(cache)})
    console.print(str(command), markup=False)
    log = folder / "server.log"
    with Server(command, log=log) as server, VideoClient(command.url) as client:
        with console.status(f"server is starting (log: {log})") as status:
            info = server.wait_ready(
                profile.ready_timeout_s,
                lambda waited, _: status.update(f"server is starting, {waited:.0f} s (log: {log})"),
            )
        assert server.ready_s is not None
        worker = info["workers"][0]
        console.print(
            f"server ready after {server.ready_s:.1f} s: recipe {worker['recipe']} on backend {worker['backend']}, "
            f"attention {worker['attention']}",
            markup=False,
        )
        request = VideoRequest("a red kite over a harbour at dusk", size, size, frames, steps, seed)
        first = _make(client, "t2va", request, folder, info, console)
        still = _first_frame(first.path, folder / "t2va-first-frame.png")
        guided = VideoRequest("the kite dives", size, size, frames, steps, seed, references=(still,))
        second = _make(client, "fl2va", guided, folder, info, console)
        return server.ready_s, [first, second]


def _make(
    client: VideoClient, name: str, request: VideoRequest, folder: Path, info: dict[str, Any], console: Console
) -> Clip:
    from vllm_h3_plugin.cli.making import make_shown
    from vllm_h3_plugin.serving.clip_order import Order
    from vllm_h3_plugin.serving.clip_record import server_facts
    from vllm_h3_plugin.video.sheet import write_sheet

    started = time.monotonic()
    made = make_shown(client, Order(name, request), folder, console, server=server_facts(info))
    request_s = time.monotonic() - started
    sheet = write_sheet(made.path, made.path.with_suffix(".png"))
    console.print(f"{made.path.name}: {made.frames} frames with sound, made and verified", markup=False)
    return Clip(name, made.path, sheet, made.sha256, round(request_s, 2))


def _first_frame(clip: Path, out: Path) -> Path:
    """The first picture of a clip as a PNG: the second request continues from it."""
    from av import VideoFrame

    from vllm_h3_plugin.video.decode import decoded_frames

    frame = next(frame for frame in decoded_frames(clip) if isinstance(frame, VideoFrame))
    frame.to_image().save(out)
    return out
