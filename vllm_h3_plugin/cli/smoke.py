# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 smoke``: two clips through the running server, from request to verified file."""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_h3_plugin.errors import UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.serving.client import VideoRequest
    from vllm_h3_plugin.serving.clip_maker import Made
    from vllm_h3_plugin.serving.clip_order import Order

CLIPS = Path("clips")
"""Where clips go, and where ``vllm-h3 verify`` looks for the newest."""

INTERRUPTED = 130
_FPS = 24
_SHORTEST_S, _LONGEST_S = 4, 15
# Both hosts take a first frame of this size; 0.28 none that is smaller.
_FRAME_SIDE = 256
_SEEDS = 2**31

# (width, height, seconds, steps). The reference platform makes clouds in any number of steps. On a device: the size
# that most figures in docs/RESULTS.md are of, the shortest clip that H3 makes, and enough steps for a picture.
_TINY = (256, 256, 4.0, 8)
_SMALL = (768, 448, 4.0, 20)
_FULL = (1344, 768, 5.0, 50)


class Kind(StrEnum):
    """What kind of clip."""

    t2va = "t2va"
    first_frame = "first-frame"


_TASKS = {Kind.t2va: "t2va", Kind.first_frame: "fl2va"}
_PROMPTS = {Kind.t2va: "a red kite over a harbour at dusk", Kind.first_frame: "the kite dives"}


def smoke(
    url: str | None = typer.Option(
        None,
        help="Address of the server. [default: the container's by .env of this folder, else http://127.0.0.1:8000]",
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Folder for the clips. [default: clips; with --request, the folder of that file]"
    ),
    only: Kind | None = typer.Option(None, help="Make one of the two clips."),
    first_frame: Path | None = typer.Option(
        None, "--first-frame", metavar="PICTURE", help="First frame of the second clip. [default: one made here]"
    ),
    prompt: str | None = typer.Option(None, help="Prompt of both clips. [default: a kite over a harbour]"),
    size: str | None = typer.Option(
        None, "--size", metavar="WxH", help="Pixels, multiples of 32. [default: 768x448; reference platform: 256x256]"
    ),
    seconds: float | None = typer.Option(None, min=_SHORTEST_S, max=_LONGEST_S, help="Length. [default: 4]"),
    steps: int | None = typer.Option(None, min=1, max=200, help="Denoise steps. [default: 20; reference platform: 8]"),
    seed: int | None = typer.Option(
        None, min=0, max=_SEEDS - 1, help="Seed of both clips. [default: one is drawn, and told]"
    ),
    full: bool = typer.Option(False, "--full", help="Full size instead: 1344x768, 5 s, 50 steps."),
    request: Path | None = typer.Option(
        None, "--request", metavar="NAME.json", help="Make the clip of this record once more, under a new name."
    ),
    again: bool = typer.Option(False, "--again", help="Make another clip even where one is finished and verified."),
    timeout: float | None = typer.Option(
        None, min=0.1, help="Seconds for each clip. [default: what the server predicts, at least 1800]"
    ),
    stall: float = typer.Option(
        120, min=0.1, max=86_400, help="Seconds without a byte after which a connection is dead."
    ),
    reconnect: float = typer.Option(
        900, min=0, max=86_400, help="Seconds for which a server that went away is waited for."
    ),
    max_mib: int = typer.Option(1024, min=1, help="Largest clip that is taken, in MiB."),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line instead of a line for each clip."),
) -> None:
    """Make two clips through the running server and verify them: from a prompt, and from a prompt and a first frame.

    Each clip is fetched as NAME.mp4.part, verified as `vllm-h3 verify` does, and only then named NAME.mp4. Nothing is
    overwritten: where a name is taken, a number is added. Beside it lie NAME.mp4.sha256 and NAME.json, which holds the
    request with its seed, the job, what the server runs and the times; --request makes the clip again from it.

    The same command picks up what an earlier one has begun: a job that runs or is done is not made again, and neither
    is a clip that is finished and verified (--again makes another). If the server was started anew and does not know
    the job any more, it is asked for anew. The server's key, if it has one, is read from H3_API_KEY_FILE, else from
    VLLM_API_KEY; without --url also from the file that VLLM_H3_API_KEY_FILE names in .env.

    \b
    Examples:
      vllm-h3 smoke
      vllm-h3 smoke --only t2va --size 1344x768 --seconds 5 --steps 50 --seed 7
      vllm-h3 smoke --first-frame harbour.png --again
      vllm-h3 smoke --request clips/smoke-t2va.json

    \b
    Exit codes:
      0    both clips are here and verified
      2    an option is wrong, or a file cannot be written
      5    the server runs without this plugin
      7    the server refused, failed, or stayed away; the message says whether the same command picks the job up
      8    a clip is not what was asked for; its bytes stay in NAME.mp4.part
      9    no ffmpeg
      10   the server is busy, or the disk is full
      130  interrupted; the job goes on, and the same command picks it up
    """
    from vllm_h3_plugin.cli.asked_server import find_server, parse_size, prove
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.cli.making import make_shown
    from vllm_h3_plugin.cli.serve import stop_on_sigterm
    from vllm_h3_plugin.serving.client import VideoClient
    from vllm_h3_plugin.serving.clip_record import server_facts
    from vllm_h3_plugin.serving.limits import Limits
    from vllm_h3_plugin.video.tools import find_ffmpeg

    if request is not None:
        _alone(
            prompt=prompt, size=size, seconds=seconds, steps=steps, seed=seed, full=full, only=only, first=first_frame
        )
    if prompt is not None and not _is_text(prompt):
        raise UsageError("--prompt", why="it holds bytes that are not UTF-8", fix="Write it in UTF-8.")
    dimensions = parse_size(size, "--size") if size else None
    folder = out or (request.parent if request else CLIPS)
    find_ffmpeg()
    url, key = find_server(url)
    stop_on_sigterm()
    limits = Limits(total_s=timeout, stall_s=stall, reconnect_s=reconnect, max_bytes=max_mib << 20)
    console = stderr()
    made: list[Made] = []
    try:
        with VideoClient(url, api_key=key, limits=limits) as client, tempfile.TemporaryDirectory() as scratch:
            info = prove(client)
            if request is not None:
                orders = [_recorded(request)]
            else:
                kinds = [only] if only else list(Kind)
                _require_tasks(info, kinds)
                width, height, length, evaluations = _defaults(info, full=full)
                width, height = dimensions or (width, height)
                video = _video(width, height, seconds or length, steps or evaluations, seed)
                orders = [
                    replace(order, any_seed=seed is None, again=again)
                    for order in _orders(video, kinds, prompt, first_frame, Path(scratch))
                ]
            for order in orders:
                made.append(make_shown(client, order, folder, console, server=server_facts(info)))
                if not as_json:
                    stdout().print(_closing(made[-1]), markup=False)
    except KeyboardInterrupt:
        console.print(
            "interrupted: the server goes on with a job that it has begun. The same command picks it up, "
            f"from what is kept in {folder}.",
            markup=False,
        )
        if as_json:
            emit_json(False, interrupted=True, clips=[_as_dict(clip) for clip in made])
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        emit_json(True, url=url, clips=[_as_dict(clip) for clip in made])


def _is_text(words: str) -> bool:
    """Whether it can be written: arguments of other encodings hold half surrogate pairs."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


def _alone(**options: object) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"--request with {', '.join(given)}",
            why="the record says all of it",
            fix="Give --request alone, or the options without it.",
        )


def _defaults(info: dict[str, Any], *, full: bool) -> tuple[int, int, float, int]:
    """Width, height, seconds and steps that suit the server."""
    if full:
        return _FULL
    from vllm_h3_plugin.serving.answers import mapping

    memory = [mapping(mapping(worker).get("memory")) for worker in info["workers"]]
    return _TINY if all(part.get("device") == "cpu" for part in memory) else _SMALL


def _require_tasks(info: dict[str, Any], kinds: list[Kind]) -> None:
    tasks = info["workers"][0].get("supported_tasks")
    if not isinstance(tasks, list):
        return
    for kind in kinds:
        if tasks and _TASKS[kind] not in tasks:
            can = [other.value for other in Kind if _TASKS[other] in tasks]
            raise UsageError(
                f"the server cannot make a clip of the kind {kind.value}",
                why=f"what it serves makes {', '.join(map(str, tasks))}",
                fix=f"Give --only {can[0]}." if can else "Serve the checkpoint's FL2VA folder for a smoke test.",
            )


def _video(width: int, height: int, seconds: float, steps: int, seed: int | None) -> VideoRequest:
    from vllm_h3_plugin.serving.client import VideoRequest

    drawn = secrets.randbelow(_SEEDS) if seed is None else seed
    return VideoRequest("", width, height, round(seconds * _FPS), steps, drawn)


def _orders(
    video: VideoRequest, kinds: list[Kind], prompt: str | None, picture: Path | None, scratch: Path
) -> list[Order]:
    from vllm_h3_plugin.serving.clip_order import Order

    orders = []
    for kind in kinds:
        references: tuple[Path, ...] = ()
        if kind is Kind.first_frame:
            if min(video.width, video.height) < _FRAME_SIDE:
                raise UsageError(
                    f"--size {video.width}x{video.height} with a first frame",
                    why=f"a first frame has sides of {_FRAME_SIDE} pixels and more",
                    fix=f"Use {_FRAME_SIDE}x{_FRAME_SIDE} or more, or --only t2va.",
                )
            references = (picture or _draw(scratch / "first.png", video.width, video.height),)
        words = _PROMPTS[kind] if prompt is None else prompt
        orders.append(Order(f"smoke-{kind.value}", replace(video, prompt=words, references=references)))
    return orders


def _draw(path: Path, width: int, height: int) -> Path:
    """A picture with edges and colours: a disc above a horizon, the same bytes each time."""
    from PIL import Image, ImageDraw

    picture = Image.linear_gradient("L").resize((width, height))
    image = Image.merge("RGB", (picture.point(lambda v: v // 2 + 96), picture, picture.point(lambda v: 255 - v)))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, height * 2 // 3, width, height), fill=(24, 40, 72))
    radius = min(width, height) // 8
    centre = (width // 3, height // 3)
    draw.ellipse((centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius), fill=(220, 48, 32))
    image.save(path)
    return path


def _recorded(path: Path) -> Order:
    from vllm_h3_plugin.serving.clip_order import Order
    from vllm_h3_plugin.serving.clip_record import require_record

    record = require_record(path)
    return Order(record.stem, record.request.request(path.parent), again=True)


def _closing(made: Made) -> str:
    if made.existing:
        how = "made and verified before (--again makes another)"
    else:
        told = {"queue_s": "queue", "generation_s": "generation", "download_s": "download", "total_s": "in all"}
        times = [f"{word} {made.timings[key]:.1f} s" for key, word in told.items() if made.timings.get(key) is not None]
        how = f"{made.frames or ''} frames verified, ".lstrip() + ", ".join(times)
    return f"{made.name}: {made.path} | seed {made.seed} | {how} | sha256 {made.sha256}"


def _as_dict(made: Made) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(made).items()}
