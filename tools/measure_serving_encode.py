# SPDX-License-Identifier: Apache-2.0
"""Measure encoding through the server against the stock host's: ``python -m tools.measure_serving_encode``.

Both servers stand side by side on the CPU reference platform with the same synthetic checkpoint, whose VAE gives frames
of the real type (FP32 in [0, 1]) at the real size; its DiT is small. Requests alternate, and the server that is not
asked is stopped (SIGSTOP) meanwhile. Figures go into ``docs/results/serving.json``; what else stands there is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tools.environment import ROOT
from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Cell, Result, load_results, write_result
from tools.stock_timed import TIMES
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.errors import HostError
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.serving.command import ServerCommand, server_command
from vllm_h3_plugin.serving.profile import load_profile
from vllm_h3_plugin.serving.server import Server, free_port
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

NAME = "serving"
WIDTH, HEIGHT, FRAMES = 1344, 768, 124
_READY_S, _REQUEST_S, _TICK_S, _BEFORE_S = 600, 1800, 0.01, 2.0


@dataclass(frozen=True)
class Took:
    """One request: seconds, and ``/health`` in milliseconds while it was decoded and encoded.

    Attributes:
        tail_s: from the last denoise step to the clip in the client's hands.
        after_s: of it, what is left once the VAE has given its last frame.
        before_ms: 99th percentile of ``/health`` in the seconds before, while it denoised.
    """

    tail_s: float
    after_s: float
    p99_ms: float
    worst_ms: float
    before_ms: float
    nbytes: int


class Health:
    """Asks ``/health`` every 10 ms, from a process's thread of its own.

    An answer is late by the time since it was *due*: a server that hangs for a second keeps a hundred askers waiting.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self.seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.time()
        with httpx.Client(base_url=self._url, timeout=_REQUEST_S) as client:
            while not self._end.is_set():
                client.get("/health").raise_for_status()
                now = time.time()
                while due <= now:
                    self.seen.append((due, now - due))
                    due += _TICK_S
                time.sleep(max(0.0, due - time.time()))

    def between(self, first: float, last: float) -> tuple[float, float]:
        """99th percentile and worst, in ms, of what was due then."""
        late = [seconds * 1000 for due, seconds in self.seen if first <= due <= last]
        return (float(np.percentile(late, 99)), max(late)) if late else (float("nan"), float("nan"))


@dataclass
class Side:
    """A server that is compared."""

    name: str
    server: Server
    url: str
    times: Path | None

    @contextmanager
    def alone(self, others: list[Side]) -> Iterator[None]:
        """While the others stand still."""
        for other in others:
            other.server.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                other.server.signal(signal.SIGCONT)

    def make(self, seed: int, path: Path) -> Took:
        """One clip."""
        form = {
            "prompt": "a red kite over a harbour",
            "size": f"{WIDTH}x{HEIGHT}",
            "aspect_ratio": "16:9",
            "num_frames": str(FRAMES),
            "num_inference_steps": "2",
            "seed": str(seed),
        }
        if self.times is not None:
            self.times.write_text("", encoding="utf-8")
        with Health(self.url) as health, httpx.Client(base_url=self.url, timeout=_REQUEST_S) as client:
            with client.stream("POST", "/v1/videos/sync", data=form) as answer:
                # The clip is there; what follows is its way through a socket.
                ended = time.time()
                path.write_bytes(answer.read())
                answer.raise_for_status()
                job = answer.headers.get("x-request-id")
            if self.times is None:
                ledger = client.get(f"/v1/videos/{job}").json()["ledger"]
        if self.times is not None:
            calls = [json.loads(line) for line in self.times.read_text(encoding="utf-8").splitlines()]
            (diffused,), (decoded,) = (
                [call for call in calls if call["name"] == name] for name in ("diffuse", "decode")
            )
            (encoding,) = (call for call in calls if call["name"] == "_encode_video_bytes")
            began, after_s = diffused["ended"], ended - decoded["ended"]
            window = (encoding["began"], encoding["ended"])
        else:
            phases = ledger["phases"]
            # From the worker's first frame on: all the time that an encoder runs.
            inside = sum(phases.get(name, 0.0) for name in ("decoding", "decoding and encoding", "encoding video"))
            began = ended - ledger["save_s"] - _delivery_s(ledger) - inside
            after_s = phases.get("encoding video", 0.0) + ledger["save_s"] + _delivery_s(ledger)
            window = (began, ended)
        p99, worst = health.between(*window)
        # A machine that others use is slow to answer whatever the server does.
        before, _ = health.between(began - _BEFORE_S, began)
        return Took(ended - began, after_s, p99, worst, before, path.stat().st_size)


def _delivery_s(ledger: Mapping[str, Any]) -> float:
    """From the worker's last word to the clip in the API process."""
    return float(ledger["encode_s"]) - float(ledger["phases"].get("encoding video", 0.0))


def stock(command: ServerCommand, times: Path) -> ServerCommand:
    """The same command without this plugin's classes; only its CPU platform is left."""
    argv = tuple("tools.stock_timed" if word == "vllm_h3_plugin.host.launch" else word for word in command.argv)
    plugins = "h3_reference,vllm_omni_register_models"
    return replace(command, argv=argv, environment={**command.environment, "VLLM_PLUGINS": plugins, TIMES: str(times)})


def start(stack: ExitStack, folder: Path, checkpoint: Path, name: str) -> Side:
    """Start one side and wait until it is ready."""
    place = folder / name
    (place / "run").mkdir(parents=True)
    profile = load_profile("reference").model_copy(update={"checkpoint": checkpoint, "port": free_port()})
    profile = profile.model_copy(update={"recipe": "bf16"})
    command = server_command(profile, checkpoint, run_dir=place / "run", environ=os.environ)
    variables = {
        **command.environment,
        "H3_CACHE_DIR": str(place / "cache"),
        "VLLM_OMNI_SERVER_STORAGE__PATH": str(place / "storage"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command, times = replace(command, environment=variables), None
    if name == "stock":
        times = place / "times"
        command = stock(command, times)
    server = Server(command, log=place / "log")
    stack.callback(server.stop, 5)
    server.start()
    try:
        server.wait_ready(_READY_S)
    except HostError:
        # It has no /v1/h3/info, which is what makes it the stock host.
        if name != "stock":
            raise
    return Side(name, server, command.url, times)


def compare(rounds: int, folder: Path) -> tuple[dict[str, list[Took]], list[str]]:
    """Make clips in turns; returns what each took, and what the verifier said of the plugin's."""
    checkpoint = write_checkpoint(folder / "checkpoint", SynthSpec(partition="fl2va")).partitions[0]
    took: dict[str, list[Took]] = {"ours": [], "stock": []}
    faults: list[str] = []
    with ExitStack() as stack:
        sides = [start(stack, folder, checkpoint, name) for name in took]
        for number in range(rounds + 1):
            for side in sides:
                path = folder / f"{side.name}.mp4"
                with side.alone([other for other in sides if other is not side]):
                    one = side.make(number, path)
                print(f"round {number}{' (warms up)' if not number else ''}: {side.name} {one}", file=sys.stderr)
                if number:
                    took[side.name].append(one)
            verdict = verify(folder / "ours.mp4", Expectation(WIDTH, HEIGHT, FRAMES))
            if not verdict.ok:
                faults.append(str(verdict))
    return took, faults


@dataclass(frozen=True)
class Alone:
    """An encoder on given frames, from the VAE's type to the file, with nothing beside it: quality against the frames.

    Attributes:
        seconds: the fastest of three.
        decibels: PSNR in RGB.
        ssim: of luma.
    """

    seconds: float
    decibels: float
    ssim: float


def alone() -> dict[str, Alone]:
    """Both encoders on the same frames, one after the other."""
    import torch
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import _prepare_minimax_h3_video_output
    from vllm_omni.entrypoints.openai.video_api_utils import _encode_video_bytes

    from tools.clip_quality import clouds, measure
    from vllm_h3_plugin.host.clips import CHUNK
    from vllm_h3_plugin.host.planes import on_host, yuv420p
    from vllm_h3_plugin.settings import load
    from vllm_h3_plugin.video.encode import ClipEncoder, ClipFormat
    from vllm_h3_plugin.video.encoders import software

    frames = clouds(FRAMES, HEIGHT, WIDTH)

    def ours() -> bytes:
        clip = ClipFormat(WIDTH, HEIGHT, 24, frames.shape[2])
        with ClipEncoder(clip, software(load().encode_preset)) as running:
            # As the worker hands them on.
            for chunk in frames[0].split(CHUNK, dim=1):
                running.push(on_host(yuv420p(chunk)))
            return running.finish()

    def theirs() -> bytes:
        shown = _prepare_minimax_h3_video_output(frames.clone())[0].numpy()
        return _encode_video_bytes(shown, fps=24, video_codec_options={"preset": "ultrafast", "threads": "0"})

    want = (frames[0].permute(1, 2, 3, 0) * 255).to(torch.float32).numpy()
    found = {}
    for name, encode in (("ours", ours), ("stock", theirs)):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            clip = encode()
            seconds.append(time.perf_counter() - began)
        found[name] = Alone(min(seconds), *measure(clip, want))
    return found


def rows_of(
    took: Mapping[str, list[Took]], shown: Mapping[str, Alone]
) -> tuple[list[dict[str, Cell]], dict[str, float | None]]:
    """Medians as rows, and the ratios."""

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in took[name])

    rows: list[dict[str, Cell]] = [
        {
            "Encode, 124 frames 1344x768": {"ours": "plugin", "stock": "stock host"}[name],
            "Decode and encode, s": round(median(name, "tail_s"), 2),
            "After the last frame, s": round(median(name, "after_s"), 2),
            "Encoder alone, s": round(shown[name].seconds, 2),
            "/health p99, ms": round(median(name, "p99_ms"), 1),
            "/health p99 before, ms": round(median(name, "before_ms"), 1),
            "/health worst, ms": round(max(one.worst_ms for one in took[name]), 1),
            "Clip, MB": round(median(name, "nbytes") / 1e6, 2),
            "PSNR, dB": round(shown[name].decibels, 2),
            "SSIM": round(shown[name].ssim, 4),
        }
        for name in took
    ]

    def faster(field: str) -> float:
        return round(median("stock", field) / median("ours", field), 2)

    return rows, {
        "health_p99_ms_during_encode": round(median("ours", "p99_ms"), 1),
        "encode_speedup_over_stock": faster("after_s"),
        "encode_alone_speedup": round(shown["stock"].seconds / shown["ours"].seconds, 2),
        "decode_and_encode_speedup": faster("tail_s"),
    }


def merged(rows: list[dict[str, Cell]], ratios: dict[str, float | None], reasons: dict[str, str], notes: str) -> Result:
    """The measurement, with what another command has put into the same file."""
    column = next(iter(rows[0]))
    earlier = load_results(RESULTS).get(NAME)
    mine = Result(
        title="Serving on the reference platform",
        command="python -m tools.measure_serving_encode",
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions("av"),
        rows=rows,
        ratios=ratios,
        reasons=reasons,
        notes=notes,
    )
    if earlier is None:
        return mine
    command = earlier.command if mine.command in earlier.command else f"{earlier.command}; {mine.command}"
    kept = {name: why for name, why in earlier.reasons.items() if name not in ratios}
    return replace(
        earlier,
        command=command,
        date=mine.date,
        versions={**earlier.versions, **mine.versions},
        rows=[*(row for row in earlier.rows if column not in row), *rows],
        ratios={**earlier.ratios, **ratios},
        reasons={**kept, **reasons},
        notes=earlier.notes if notes in earlier.notes else f"{earlier.notes}\n\n{notes}".strip(),
    )


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="clips of each side, after one that warms up")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="h3-encode-") as folder:
        took, faults = compare(rounds, Path(folder))
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    rows, ratios = rows_of(took, alone())
    notes = (
        f"Encoding: medians of {rounds} clips a side in turns, host {installed_host().name}; tiny DiT and a synthetic "
        "VAE whose frames have the real type and size. `encode_speedup_over_stock` is what a client waits after the "
        "VAE's last frame, until the clip begins to arrive: the plugin has encoded all but the last frames then, the "
        "stock host begins. `encode_alone_speedup` takes the overlap away: both encoders on the same frames with "
        "nothing beside them, the fastest of three. `/health` was asked every 10 ms and counts from when it was due: "
        "of the plugin's while it decodes and encodes, of the stock host's while it encodes. PSNR (RGB) and SSIM "
        "(luma) are against the frames before encoding, both at x264 CRF 18."
    )
    print(write_result(RESULTS, NAME, merged(rows, ratios, {}, notes)).relative_to(ROOT))
    print(json.dumps(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
