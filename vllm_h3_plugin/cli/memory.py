# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 memory``: what a model and a request need, what fits, and how a running server compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_h3_plugin.errors import ServerError, UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.memory.activations import Peak
    from vllm_h3_plugin.memory.prediction import Prediction
    from vllm_h3_plugin.memory.requests import RequestSize
    from vllm_h3_plugin.memory.weights import ModelShapes, Resident

# What fits is shown for these unless --gib names one; a GB10's 128 GB are 119 GiB to the system.
_MOST_GIB = 1e6
_GIB_CHOICES = (64.0, 80.0, 96.0, 119.0)


def memory(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CKPT",
            help="FL2VA or Ref2VA folder, or the root that holds both (then two DiTs are counted). Only configs and "
            "headers are read.",
            show_default=False,
        ),
    ] = None,
    true_size: Annotated[bool, typer.Option("--true-size", help="The real model, without any checkpoint.")] = False,
    both: Annotated[bool, typer.Option("--both", help="With --true-size: both partitions in one server.")] = False,
    lora: Annotated[
        Path | None,
        typer.Option(help="Adapter that is loaded at start; one that is fused takes nothing.", show_default="none"),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME|PATH", help="Precision recipe.")] = "fp8",
    gib: Annotated[
        float | None,
        typer.Option(
            "--gib", min=1, help="GiB of memory to fit into.", show_default="64, 80, 96 and 119 (a 128 GB GB10)"
        ),
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="WxH", help="The request's size in pixels.")] = "768x448",
    frames: Annotated[
        int | None, typer.Option("--frames", help="The request's frames at 24 fps, snapped up to 17 n + 5.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Its length in seconds instead.", show_default="5")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=200, help="Its denoise steps.")] = 50,
    images: Annotated[int, typer.Option("--images", min=0, max=12, help="Pictures that condition it.")] = 0,
    audio_seconds: Annotated[
        float, typer.Option("--audio-seconds", min=0, help="Seconds of sound that condition it.")
    ] = 0.0,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size; bytes are of one rank.")] = 1,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Show what this running server measured beside the prediction."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="VLLM_API_KEY", help="The server's key, if it wants one.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw the bar as a PNG. Never overwrites.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout instead of tables.")] = False,
) -> None:
    """Predict what a checkpoint and a request need, and what fits.

    Counts the resident bytes of every part from configs, headers and the recipe, adds what a request takes on top in
    its widest phase, and finds the longest clip that fits at 768x448 and 1344x768. No weights are read, nothing is
    started and no GPU is needed. GiB are 2^30 bytes. What fits is reckoned for unified memory: device and host
    together, with H3_MEMORY_FLOOR_GIB (6 GiB by default) left free.

    \b
    Examples:
      vllm-h3 memory --true-size                                the real model, default recipe
      vllm-h3 memory --true-size --recipe bf16 --gib 128
      vllm-h3 memory --true-size --both
      vllm-h3 memory /models/H3/FL2VA --size 1344x768 --seconds 10 --steps 30 --images 1
      vllm-h3 memory /models/H3/FL2VA --server http://127.0.0.1:8000
      vllm-h3 memory --true-size --picture memory.png
      vllm-h3 memory --true-size --json | jq .resident.gib
    """
    from vllm_h3_plugin.cli import memory_chart
    from vllm_h3_plugin.cli.console import emit_json
    from vllm_h3_plugin.cli.memory_model import shapes_asked
    from vllm_h3_plugin.memory.requests import RequestSize

    if picture is not None:
        memory_chart.check_target(picture)
    if gib is not None and not gib <= _MOST_GIB:
        raise UsageError(f"--gib {gib:g}", why="no machine has it", fix=f"Give at most {_MOST_GIB:g}.")
    shapes = shapes_asked(checkpoint, true_size, both, lora)
    width, height = _size(size)
    request = RequestSize(width, height, _frames(frames, seconds), steps, images, audio_seconds)
    prediction = _predict(shapes, recipe, request, tp, (gib,) if gib else _GIB_CHOICES)
    workers = [] if server is None else _workers(server, api_key)
    if picture is not None:
        memory_chart.draw(prediction, picture, gib)
    if as_json:
        emit_json(
            True,
            **_fields(prediction),
            server=server,
            measured=[_measured_fields(prediction.resident, worker) for worker in workers],
            picture=None if picture is None else str(picture),
        )
        return
    memory_chart.show(prediction, gib)
    for worker in workers:
        memory_chart.show_measured(compare(prediction.resident, worker), worker)
    if picture is not None:
        from vllm_h3_plugin.cli.console import stdout

        stdout().print(f"\npicture: {picture}", markup=False)


def compare(resident: Resident, worker: dict[str, Any]) -> list[tuple[str, int, int, float | None]]:
    """(part, predicted bytes, measured bytes, difference in percent of the measured) for one worker, total last.

    A part that only one side knows has 0 on the other; the difference is None where nothing was measured.
    """
    measured = {str(name): int(size) for name, size in worker["memory"].get("parts", {}).items()}
    predicted = dict(resident.parts)
    if "vaes" in predicted:  # sizes of each are known to a checkpoint alone
        measured["vaes"] = measured.pop("video_vae", 0) + measured.pop("audio_vae", 0) + measured.pop("vaes", 0)
    names = [*predicted, *(name for name in measured if name not in predicted)] if measured else []
    rows = [(name, predicted.get(name, 0), measured.get(name, 0)) for name in names]
    rows.append(("total", resident.nbytes, int(worker["memory"]["resident_bytes"])))
    return [(name, ours, theirs, 100 * (ours - theirs) / theirs if theirs else None) for name, ours, theirs in rows]


def _size(text: str) -> tuple[int, int]:
    from vllm_h3_plugin.video.geometry import snap_size

    match = re.fullmatch(r"(\d{1,5})[x×](\d{1,5})", text.strip())
    if match is None:
        raise UsageError(f"--size {text!r}", why="it is no size", fix="Write WxH in pixels, such as 768x448.")
    return snap_size(int(match[1]), int(match[2]))


def _frames(frames: int | None, seconds: float | None) -> int:
    from vllm_h3_plugin.video.geometry import frames_of_seconds, snap_frames

    if frames is not None and seconds is not None:
        raise UsageError(
            f"--frames {frames} and --seconds {seconds:g}", why="both say how long the clip is", fix="Give one of them."
        )
    return snap_frames(frames) if frames is not None else frames_of_seconds(5 if seconds is None else seconds)


def _predict(
    shapes: ModelShapes, recipe: str, request: RequestSize, tp: int, memories: tuple[float, ...]
) -> Prediction:
    from dataclasses import replace

    from vllm_h3_plugin.checkpoint.layout import linear_layers
    from vllm_h3_plugin.memory.activations import predict_peak
    from vllm_h3_plugin.memory.fit import FIT_SIZES, free_for_requests, longest_clip
    from vllm_h3_plugin.memory.prediction import Prediction
    from vllm_h3_plugin.memory.table import DEFAULT_STEPS, table_size
    from vllm_h3_plugin.memory.weights import predict_resident
    from vllm_h3_plugin.quantization.plan import plan
    from vllm_h3_plugin.quantization.precision import Precision
    from vllm_h3_plugin.quantization.recipe import load_recipe
    from vllm_h3_plugin.settings import load

    precision = plan(load_recipe(recipe), linear_layers(shapes.dit, shapes.text))
    resident = predict_resident(shapes, precision, tp=tp)

    def predict(wanted: RequestSize) -> Peak:
        new = resident.table is not None and (wanted.steps != DEFAULT_STEPS or bool(wanted.roles))
        table = table_size(shapes.dit, wanted.steps, wanted.roles) if new else None
        wide = precision.vision is Precision.FP32
        quantized = bool(precision.quantized)
        return predict_peak(shapes, wanted, quantized=quantized, vision_fp32=wide, new_table=table, tp=tp)

    floor = load().memory_floor_gib
    fits = {
        memory_gib: [
            longest_clip(
                predict,
                replace(request, width=width, height=height),
                free_for_requests(memory_gib, resident.nbytes, floor),
            )
            for width, height in dict.fromkeys((*FIT_SIZES, (request.width, request.height)))
        ]
        for memory_gib in memories
    }
    return Prediction(shapes, precision.recipe, resident, predict(request), fits, floor)


def _workers(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The workers of a running server that report memory."""
    import httpx

    from vllm_h3_plugin.serving.client import authorization

    address = f"{url.rstrip('/')}/v1/h3/info"
    try:
        answer = httpx.get(address, headers=authorization(api_key), timeout=10)
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        raise ServerError(
            f"{url} does not answer", why=str(exc), fix="Start it with `vllm-h3 serve`, or correct --server."
        ) from exc
    if answer.status_code == 401:
        raise ServerError(
            f"{url} refuses: HTTP 401", why="it wants an API key", fix="Give --api-key or set VLLM_API_KEY."
        )
    try:
        info = answer.json() if answer.status_code == 200 else None
    except ValueError:
        info = None
    workers = info.get("workers") if isinstance(info, dict) else None
    if not isinstance(workers, list):
        raise ServerError(
            f"{address} gave HTTP {answer.status_code} and no workers",
            why="a server without this plugin has no such page",
            fix="Start the server with `vllm-h3 serve`.",
        )
    reporting = [worker for worker in workers if isinstance(worker, dict) and worker.get("memory")]
    if not reporting:
        raise ServerError(
            f"{url} reports no memory",
            why=f"none of its {len(workers)} workers has measured it",
            fix="Wait until the model is loaded, and see that server and command line are of one version.",
        )
    return reporting


def _fields(prediction: Prediction) -> dict[str, Any]:
    from vllm_h3_plugin.memory.coefficients import DEFAULT
    from vllm_h3_plugin.quantization.footprint import GIB

    resident, peak, request = prediction.resident, prediction.peak, prediction.peak.request
    return {
        "model": prediction.shapes.name,
        "recipe": prediction.recipe.name,
        "adaln": prediction.recipe.adaln.value,
        "tp": resident.tp,
        "resident": {
            "parts": dict(resident.parts),
            "bytes": resident.nbytes,
            "gib": round(resident.gib, 3),
            "load_peak_bytes": resident.load_peak_bytes,
            "table_rows": None if resident.table is None else resident.table.rows,
        },
        "request": {
            **vars(request),
            "tokens": request.tokens,
            "phases": [
                {"name": phase.name, "device": dict(phase.device), "host": dict(phase.host), "bytes": phase.nbytes}
                for phase in peak.phases
            ],
            "widest": peak.widest.name,
            "device_bytes": peak.device_bytes,
            "unified_bytes": peak.unified_bytes,
            "gib": round(peak.gib, 3),
        },
        "floor_gib": prediction.floor_gib,
        "process_bytes": DEFAULT.process_bytes,
        "fits": [
            {
                "memory_gib": memory_gib,
                "size": f"{fit.width}x{fit.height}",
                "frames": None if fit.longest is None else fit.longest.request.frames,
                "seconds": round(fit.seconds, 2),
                "free_gib": round(fit.free_bytes / GIB, 3),
                "missing_gib": round(fit.missing_bytes / GIB, 3),
            }
            for memory_gib, fits in prediction.fits.items()
            for fit in fits
        ],
    }


def _measured_fields(resident: Resident, worker: dict[str, Any]) -> dict[str, Any]:
    rows = compare(resident, worker)
    return {
        **worker["memory"],
        "difference_percent": {name: None if off is None else round(off, 3) for name, _, _, off in rows},
    }
