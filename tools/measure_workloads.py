# SPDX-License-Identifier: Apache-2.0
"""Measure adapters and write ``docs/results/workloads.json``: ``python -m tools.measure_workloads``, in a host's
environment.

On the CPU reference platform: Turbo on quantized layers against Turbo on BF16 ones, over a whole denoise, with the code
that tests/contract asserts with; and what 8 steps cost against 50 through the real server. With ``--gpu``, on a machine
that has one: what the adapter costs a step at the real width (``lora_overhead``). What another command measures has its
place there too, and stays as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Cell, Result, load_results, write_result
from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.pins import installed_host

NAME = "workloads"
COMMAND, GPU_COMMAND = "python -m tools.measure_workloads", "python -m tools.measure_workloads --gpu"
LAYERS, HIDDEN, HEADS, FFN = 8, 512, 8, 1024
STEPS, LONG_STEPS = 8, 50
SEEDS = (0, 1)
FACTOR = 32.0
ROUNDS = 5
BACKENDS = ("fp8", "fp8, fused", "int8, fused")
SERVED_SIZE, SERVED_FRAMES = 192, 192
REASONS = {
    "lora_overhead": f"needs a GPU: `{GPU_COMMAND}`",
    "vae_decode_speedup": "needs a GPU: the video VAE at true width against the stock host",
}
NOTES = (
    "Turbo: random weights with outlier rows (1 row in 64 32 times as large, the function unchanged), "
    f"width {HIDDEN}, {LAYERS} blocks and gates of about 0.5, a Turbo file of rank 128 whose low-rank part is half as "
    f"long as what is there; {STEPS} evaluations in the host's own loop, first and last frame given, the same noise. "
    "Compared are final latents with the adapter, quantized against BF16, and what the adapter changed in them (with "
    f"minus without), each the smallest cosine over video, audio and {len(SEEDS)} seeds. `turbo_fp8_cosine` and "
    "`turbo_delta_cosine` are recipe fp8's with the plugin's steps.\n\n"
    f"Steps: through the real server, FP8, {SERVED_SIZE}x{SERVED_SIZE} and {SERVED_FRAMES} frames of a tiny "
    "checkpoint; forwards of the DiT are counted in the worker, seconds are the ledger's `denoising`, the least of "
    f"{ROUNDS} clips of each length in turns: what else a machine does only ever adds. `steps_ratio_error` is "
    f"|(seconds of {STEPS} / seconds of {LONG_STEPS}) / ({STEPS} / {LONG_STEPS}) - 1|."
)
GPU_NOTES = (
    "LoRA on a GPU: blocks of one step at the real width with a Turbo adapter of rank 128 on all linear layers and "
    "without, in turns. Asked are 4 %, which an adapter that stays beside the quantized weights cannot have: it keeps "
    "each activation in BF16 (64.5 kB a token and block), reads it (the same) and adds to each output (read and "
    "written, 243.7 kB). At 13376 tokens these 5.0 GB take 1.04 ms at an H200's 4.8 TB/s, 5.7 % of a block's 18.1 ms. "
    "Folded into the weights before they are quantized it would cost nothing and lose part of its effect to rounding."
)
_PART = "Part"
Found = tuple[list[dict[str, Cell]], dict[str, float | None]]
"""Rows and ratios."""
_TURBO, _STEPS, _GPU = "Turbo against BF16", "Steps through the server", "LoRA on a GPU"


def measure_turbo(device: Any, config: Any, progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Smallest cosines by backend: ``latents`` and ``delta``."""
    from tests.contract import adapter_inputs as served
    from tests.contract import dit_inputs as h3
    from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        turbo = write_adapter(Path(folder), AdapterSpec("turbo", config))
        for seed in SEEDS:
            weights = h3.with_outlier_rows(config, h3.random_weights(config, seed), FACTOR)
            made = {}
            for recipe in ("bf16", *BACKENDS):
                progress(f"seed {seed}: {recipe}")
                server = served.serve(recipe, config, weights, device, steps=STEPS, seed=seed, tasks=("fl2va",))
                server.adapter(turbo)
                latents = server.denoise("fl2va")
                made[recipe] = latents, served.minus(latents, server.before["fl2va"])
            for recipe in BACKENDS:
                kept = found.setdefault(recipe, {"latents": 1.0, "delta": 1.0})
                for name, ours, theirs in zip(kept, made[recipe], made["bf16"], strict=True):
                    kept[name] = min(kept[name], *(h3.cosine(ours[part], theirs[part]) for part in (0, 1)))
    return found


def measure_steps(progress: Callable[[str], None]) -> tuple[dict[int, float], dict[int, int]]:
    """(least seconds of the denoise, forwards of the DiT) by number of steps, through the real server."""
    import httpx

    from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
    from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
    from vllm_h3_plugin.serving.command import server_command
    from vllm_h3_plugin.serving.profile import load_profile
    from vllm_h3_plugin.serving.server import Server, free_port

    seconds: dict[int, list[float]] = {STEPS: [], LONG_STEPS: []}
    forwards: dict[int, int] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = write_checkpoint(folder / "h3", SynthSpec()).partitions[0]
        profile = load_profile("reference").model_copy(update={"checkpoint": checkpoint, "port": free_port()})
        (folder / "run").mkdir()
        command = server_command(profile, checkpoint, run_dir=folder / "run", environ=os.environ)
        own = {"H3_CACHE_DIR": str(folder / "cache"), "VLLM_OMNI_SERVER_STORAGE__PATH": str(folder / "storage")}
        server = Server(replace(command, environment={**command.environment, **own}), log=folder / "log")
        stack.callback(server.stop, 5)
        progress("starting the server")
        server.start()
        server.wait_ready(600)
        http = stack.enter_context(httpx.Client(base_url=command.url, timeout=1200))
        size = f"{SERVED_SIZE}x{SERVED_SIZE}"
        for turn in range(ROUNDS + 1):
            for steps in (STEPS, LONG_STEPS) if turn % 2 else (LONG_STEPS, STEPS):
                progress(f"round {turn}: {steps} steps")
                form = {"prompt": "a red kite", "size": size, "num_frames": str(SERVED_FRAMES), "seed": "1"}
                answer = http.post("/v1/videos/sync", data={**form, "num_inference_steps": str(steps)})
                answer.raise_for_status()
                ledger = http.get(f"/v1/videos/{answer.headers['x-request-id']}").json()["ledger"]
                forwards[steps] = len(ledger["steps_s"])
                if turn:  # the first builds tables and warms what is to be warmed
                    seconds[steps].append(float(ledger["phases"]["denoising"]))
    return {steps: min(taken) for steps, taken in seconds.items()}, forwards


def steps_on_cpu(progress: Callable[[str], None]) -> Found:
    """Rows and ratios of what steps cost."""
    seconds, forwards = measure_steps(progress)
    for steps, count in forwards.items():
        if count != steps:
            raise H3Error(f"{steps} steps were {count} forwards", why="the host counts otherwise than it did")
    rows: list[dict[str, Cell]] = [
        {_PART: _STEPS, "What": f"{steps} steps", "Forwards": forwards[steps], "Denoise, s": round(taken, 3)}
        for steps, taken in seconds.items()
    ]
    error = abs(seconds[STEPS] / seconds[LONG_STEPS] / (STEPS / LONG_STEPS) - 1)
    return rows, {"steps_ratio_error": float(f"{error:.3g}")}


def turbo_on_cpu(progress: Callable[[str], None]) -> Found:
    """Rows and ratios of Turbo on quantized layers."""
    from vllm_h3_plugin.checkpoint.synthetic import tiny_dit
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    config = tiny_dit(layers=LAYERS, refiner_layers=2, hidden=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, ffn=FFN)
    register()
    with single_rank() as device:
        turbo = measure_turbo(device, config, progress)
    rows: list[dict[str, Cell]] = [
        {
            _PART: _TURBO,
            "What": recipe,
            "Latents, cosine": f"{found['latents']:.6f}",
            "Adapter's change, cosine": f"{found['delta']:.6f}",
        }
        for recipe, found in turbo.items()
    ]
    ours = turbo["fp8, fused"]
    return rows, {
        "turbo_fp8_cosine": float(f"{ours['latents']:.6g}"),
        "turbo_delta_cosine": float(f"{ours['delta']:.6g}"),
    }


def on_gpu(progress: Callable[[str], None], machine: str, layers: int, width: int, height: int, frames: int) -> Found:
    """Rows and ratios of what takes a GPU: the blocks of a step at the real width, with a Turbo adapter and without."""
    import torch

    from vllm_h3_plugin.checkpoint.configs import DitConfig
    from vllm_h3_plugin.host.bench.lora import measure_overhead
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank
    from vllm_h3_plugin.memory.requests import RequestSize

    if not torch.cuda.is_available():
        raise H3Error("no CUDA device", why="torch sees none", fix="Run this where there is one.")
    register()
    size = RequestSize(width, height, frames)
    with single_rank() as device, tempfile.TemporaryDirectory() as folder:
        progress(f"{layers} blocks at the real width, {size.tokens} tokens")
        found = measure_overhead(replace(DitConfig(), num_layers=layers), size, device, Path(folder))
    row: dict[str, Cell] = {
        _PART: _GPU,
        "What": f"{width}x{height}, {frames} frames, {found.tokens} tokens, {layers} of 50 blocks",
        "On": f"{machine}; torch {torch.__version__}",
        "Without, ms": round(found.without_ms, 2),
        "With Turbo, ms": round(found.with_ms, 2),
    }
    return [row], {"lora_overhead": float(f"{found.share:.4g}")}


def merged(made: Result, kept: Result | None) -> Result:
    """A new measurement, and what other commands have put into the same file."""
    old = kept.ratios if kept is not None else {}
    names = ("turbo_fp8_cosine", "turbo_delta_cosine", "lora_overhead", "steps_ratio_error", "vae_decode_speedup")
    ratios = {name: made.ratios.get(name, old.get(name)) for name in dict.fromkeys([*names, *old, *made.ratios])}
    parts = {row.get(_PART) for row in made.rows}
    rows = [*(row for row in (kept.rows if kept is not None else []) if row.get(_PART) not in parts), *made.rows]
    reasons = {**(kept.reasons if kept is not None else {}), **made.reasons}
    missing = f"not measured yet: `{COMMAND}`"
    commands = [*(kept.command.split("; ") if kept is not None else []), made.command]
    notes = [*(kept.notes.split("\n\n") if kept is not None else []), *made.notes.split("\n\n")]
    return replace(
        made,
        # Rows of a GPU say themselves what they were measured with.
        versions=kept.versions if kept is not None and made.command == GPU_COMMAND else made.versions,
        command="; ".join(dict.fromkeys(commands)),
        hardware="; ".join(dict.fromkeys([*(kept.hardware.split("; ") if kept is not None else []), made.hardware])),
        rows=rows,
        ratios=ratios,
        reasons={name: reasons.get(name, missing) for name, value in ratios.items() if value is None},
        notes="\n\n".join(dict.fromkeys(note for note in notes if note)),
    )


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="measure lora_overhead, and nothing else")
    parser.add_argument("--only", choices=("steps", "turbo"), help="measure one of the two that a CPU can tell")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=448)
    parser.add_argument("--frames", type=int, default=124)
    options = parser.parse_args()
    if not options.gpu:
        os.environ["H3_REFERENCE"] = "1"  # before vLLM is imported: it discovers its platform once
    host = installed_host()

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("begin", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what)

        if options.gpu:
            from vllm_h3_plugin.host.bench import report

            machine = report.hardware()
            rows, ratios = on_gpu(progress, machine, options.layers, options.width, options.height, options.frames)
        else:
            machine = hardware()
            # The server first: this process has no threads yet that would take a core from it.
            parts = {"steps": steps_on_cpu, "turbo": turbo_on_cpu}
            rows, ratios = [], {}
            for measure in [parts[options.only]] if options.only else parts.values():
                found = measure(progress)
                rows, ratios = rows + found[0], ratios | found[1]
    made = Result(
        title="Workloads: adapters on quantized weights, and what few steps cost",
        command=GPU_COMMAND if options.gpu else COMMAND,
        date=date.today().isoformat(),
        hardware=machine,
        versions=versions(),
        rows=rows,
        ratios=ratios,
        reasons=REASONS,
        notes=GPU_NOTES if options.gpu else f"{NOTES}\n\nHost {host.name}.",
    )
    path = write_result(RESULTS, NAME, merged(made, load_results(RESULTS).get(NAME)))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
