# SPDX-License-Identifier: Apache-2.0
"""Measure a server on two Ray nodes, and write ``docs/results/cluster.json``: ``python -m tools.measure_cluster``.

Both nodes are of this machine, on loopback addresses, with the reference platform: what is measured is what two
machines do differently from one, not how fast they are. Some five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from tests.server import wire
from tests.server.conftest import request
from tests.server.ray_nodes import RayNodes
from tests.server.test_ranks import cut_between
from tools.measure_demo import RESULTS, hardware, versions
from tools.results import Cell, Result, write_result
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.serving.client import VideoRequest
from vllm_h3_plugin.serving.command import server_command
from vllm_h3_plugin.serving.profile import load_profile
from vllm_h3_plugin.serving.server import Server, free_port

OTHER = "127.0.0.30"
STEPS, CLIPS, READY_S, WAIT_S = 8, 9, 600, 600
CLIP = request(steps=STEPS, size=256, seed=3)

_AFTER_STEPS = ("decoding", "encoding video")

MOST = {"wire_bytes_over_formula": 1.05, "tail_over_single": 1.2, "recovery_s": 30.0}
"""What is asked of each figure."""

Figures = dict[str, float | None]


class Asked:
    """A server that is asked for clips, and its run folder."""

    def __init__(self, server: Server) -> None:
        # A server closes what is idle for seconds.
        limits = httpx.Limits(keepalive_expiry=1)
        self.http = httpx.Client(base_url=server.command.url, timeout=120, limits=limits)
        self._run_dir = Path(server.command.environment["H3_RUN_DIR"])

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        """Rank -> what it told."""
        return {worker["rank"]: worker for worker in self.http.get("/v1/h3/info").json()["workers"]}

    @property
    def ledger(self) -> dict[str, Any]:
        """Of the last request."""
        found: dict[str, Any] = json.loads((self._run_dir / "ledger.json").read_text(encoding="utf-8"))
        return found

    def tail(self, asked: VideoRequest) -> float:
        """Seconds from the end of a clip's last step to the first byte of its MP4 at the client."""
        job = self.http.post("/v1/videos", data=asked.form()).json()["id"]
        until(lambda: self._over(job), 0.005)
        with self.http.stream("GET", f"/v1/videos/{job}/content") as answer:
            next(answer.iter_raw())
            first = time.time()
        ledger = self.ledger
        after = {
            name: seconds for name, seconds in ledger["phases"].items() if name.startswith(("decod", "encoding v"))
        }
        return first - ledger["ended_at"] + sum(after.values())

    def _over(self, job: str) -> bool:
        return str(self.http.get(f"/v1/videos/{job}").json()["status"]) in ("completed", "failed")


def until(reached: Any, every: float, seconds: float = WAIT_S) -> None:
    """Wait for something.

    Raises:
        TimeoutError: it did not come.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain")
        time.sleep(every)


@contextmanager
def server(folder: Path, name: str, checkpoint: Path, environment: dict[str, str], **update: Any) -> Iterator[Asked]:
    """A server of the reference platform that is ready."""
    profile = load_profile("reference").model_copy(update={"checkpoint": checkpoint, "port": free_port(), **update})
    run_dir = folder / f"run-{name}"
    run_dir.mkdir()
    command = server_command(profile, checkpoint, run_dir=run_dir, environ=os.environ)
    variables = {
        "H3_CACHE_DIR": str(folder / f"cache-{name}"),
        "VLLM_OMNI_SERVER_STORAGE__PATH": str(folder / f"storage-{name}"),
        **environment,
    }
    command = replace(command, environment={**command.environment, **variables})
    with Server(command, log=folder / f"{name}.log") as started:
        started.wait_ready(READY_S)
        yield Asked(started)


def measure_wire(asked: Asked, counts: Path, checkpoint: Path) -> tuple[float, list[dict[str, Cell]]]:
    """Bytes handed to ``all_to_all`` in the steps of a clip, over what Ulysses needs; of the rank that hands most."""
    dit = take_inventory(checkpoint).partitions[0].dit
    assert dit is not None
    pids = {rank: told["pid"] for rank, told in asked.ranks.items()}
    before = {rank: wire.counted(counts, pid) for rank, pid in pids.items()}
    asked.tail(CLIP)
    ledger = asked.ledger
    steps = len(ledger["steps_s"])
    needed = wire.needed(dit, ledger["tokens"], ranks=len(pids))
    sent = {rank: (wire.counted(counts, pid) - before[rank]) / steps for rank, pid in pids.items()}
    rows: list[dict[str, Cell]] = [
        {"What": f"rank {rank}: bytes handed to all_to_all in a step", "Value": round(each)}
        for rank, each in sent.items()
    ]
    rows.append({"What": f"what Ulysses needs for {ledger['tokens']} tokens", "Value": needed})
    return round(max(sent.values()) / needed, 4), rows


def measure_recovery(asked: Asked) -> float:
    """Seconds from the kill of rank 1 in a request until ``/health`` answers 200 again, and a clip is made."""
    job = asked.http.post("/v1/videos", data=request(steps=150, size=128).form()).json()["id"]
    until(lambda: (asked.http.get(f"/v1/videos/{job}").json().get("step") or 0) >= 2, 0.02)
    os.kill(asked.ranks[1]["pid"], signal.SIGKILL)
    begun = time.monotonic()
    until(lambda: asked.http.get("/health").status_code == 503, 0.01)
    until(lambda: asked.http.get("/health").status_code == 200, 0.02)
    seconds = time.monotonic() - begun
    asked.tail(CLIP)
    return round(seconds, 1)


def main() -> int:
    """Measure each, print it, and write all."""
    os.environ["H3_REFERENCE"] = "1"
    figures: Figures = {}
    rows: list[dict[str, Cell]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = write_checkpoint(folder, SynthSpec(partition="fl2va")).partitions[0]
        counts = folder / "counts"
        counts.mkdir()
        nodes = RayNodes()
        stack.callback(nodes.close)
        nodes.start_head(**wire.counting(counts))
        nodes.add(OTHER, H3_CACHE_DIR=str(folder / "cache-other"), **wire.counting(counts))
        two = stack.enter_context(
            server(
                folder,
                "two",
                checkpoint,
                {"H3_CLUSTER_ADDRESS": nodes.address, "H3_CLUSTER_ON_LOSS": "restart"},
                executor="ray",
                devices=2,
                roles=cut_between(2),
            )
        )
        # They import the host meanwhile, which would slow everything down.
        until(lambda: "event=spares_ready" in (folder / "two.log").read_text(encoding="utf-8", errors="replace"), 0.5)
        with server(folder, "one", checkpoint, {}) as one:
            for each in (one, two):
                each.tail(CLIP)
            # In turns: what else the machine does meets both.
            tails: dict[str, list[float]] = {"one machine": [], "two nodes": []}
            for _ in range(CLIPS):
                tails["one machine"].append(one.tail(CLIP))
                tails["two nodes"].append(two.tail(CLIP))
        # Whatever else the machine does can only add.
        alone, both = (min(found) for found in tails.values())
        rows += [
            {"What": f"last step to first byte of the MP4, s, {name}, least of {CLIPS}", "Value": round(value, 3)}
            for name, value in (("one machine", alone), ("two nodes", both))
        ]
        figures["tail_over_single"] = round(both / alone, 3)
        figures["wire_bytes_over_formula"], more = measure_wire(two, counts, checkpoint)
        rows += more
        print(figures, file=sys.stderr, flush=True)
        figures["recovery_s"] = measure_recovery(two)
        rows.append(
            {"What": "rank 1 killed in a step: until /health answers 200 again, s", "Value": figures["recovery_s"]}
        )
    print(figures, file=sys.stderr, flush=True)
    result = Result(
        title="A server on two Ray nodes",
        command="python -m tools.measure_cluster",
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=versions(),
        rows=rows,
        ratios=figures,
        reasons={},
        notes="Two Ray nodes of one machine on loopback addresses, gloo, the reference platform and a synthetic "
        f"checkpoint; clips of 256x256, 96 frames and {STEPS} steps. Both nodes share this machine's cores. Bytes are "
        "those that ranks hand to `all_to_all`; headers of TCP come on "
        "top. Recovery is with H3_CLUSTER_ON_LOSS=restart, once a process waits beside each rank. Nothing here was "
        "measured on two Sparks." + missed(figures),
    )
    print(write_result(RESULTS, "cluster", result))
    return 0


def missed(figures: Figures) -> str:
    """Which figures are not what is asked, in a sentence; empty if all are."""
    words = [
        f"`{name}` ({value}, asked <= {asked:g})"
        for name, asked in MOST.items()
        if (value := figures.get(name)) is not None and value > asked
    ]
    return f" Missed: {', '.join(words)}." if words else ""


if __name__ == "__main__":
    sys.exit(main())
