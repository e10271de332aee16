# SPDX-License-Identifier: Apache-2.0
"""What many callers at once do to a server: good, bad, cancelled and abandoned requests, in a drawn order."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.server.conftest import BUSY, HANGS_S, Running
from vllm_h3_plugin.serving.client import VideoRequest
from vllm_h3_plugin.video.verdict import Expectation
from vllm_h3_plugin.video.verify import verify

AT_ONCE = 16
TIMEOUT_S = 300.0
ENDED = ("completed", "failed")
SHARES = {"good": 0.4, "good sync": 0.1, "bad": 0.25, "cancelled": 0.15, "disconnected": 0.1}
SEEDS = (1, 2)
"""Few, so that the same request comes again after others were cancelled, and must give the same bytes."""

# Each was an error of the server, or a job that failed, before requests were checked (stock 0.30.0).
BAD: dict[str, dict[str, str]] = {
    "fps": {"fps": "25"},
    "duration too short": {"duration": "2"},
    "duration too long": {"duration": "20"},
    "duration no number": {"duration": "x"},
    "ratio": {"aspect_ratio": "2:1"},
    "size zero": {"size": "0x0"},
    "size small": {"size": "16x16"},
    "size flat": {"size": "512x64"},
    "size huge": {"size": "100000x100000"},
    "size no size": {"size": "abc"},
    "task": {"task": "t2v"},
    "shift": {"flow_shift": "-1"},
    "steps": {"num_inference_steps": "10000"},
    "prompt": {"prompt": ""},
    "typo": {"num_frame": "96"},
    "two clips": {"n": "2"},
    "reference": {"image_reference": '{"image_url": "data:image/png;base64,AAAA"}'},
}


@dataclass
class Tally:
    """What came of the requests. Filled from many threads."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    bytes_of: dict[tuple[Any, ...], str] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self, *kinds: str) -> float:
        """Requests of these kinds that went as they should, from 0 to 1."""
        return sum(self.right[kind] for kind in kinds) / max(1, sum(self.asked[kind] for kind in kinds))


def kinds(count: int, rng: random.Random) -> list[str]:
    """That many requests, each kind with its share, at least one of each, shuffled."""
    drawn = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * count)))][:count]
    rng.shuffle(drawn)
    return drawn


def soak(running: Running, count: int, folder: Path, seed: int = 1) -> Tally:
    """Send them, 16 at a time, and look at each answer."""
    rng, tally = random.Random(seed), Tally()
    jobs = [(kind, random.Random(rng.random()), place) for place, kind in enumerate(kinds(count, rng))]
    with httpx.Client(base_url=running.url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=64)) as http:

        def one(kind: str, rng: random.Random, place: int) -> None:
            try:
                fault = _DO[kind](http, rng, folder / f"{place}.mp4", tally)
            except Exception as exc:  # noqa: BLE001  # whatever it is, it is this request's outcome
                fault = f"{type(exc).__name__}: {exc}"
            with tally.lock:
                tally.asked[kind] += 1
                tally.right[kind] += not fault
                if fault:
                    tally.wrong.append(f"{place} {kind}: {fault}")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda job: one(*job), jobs))
    return tally


def listed(http: httpx.Client) -> Iterator[dict[str, Any]]:
    """Every job of the list, page by page."""
    after: dict[str, str] = {}
    while True:
        page = http.get("/v1/videos", params={"limit": "100", **after}).json()
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


def stuck(url: str, patience_s: float = HANGS_S) -> list[str]:
    """Jobs that have no end although nobody asks for anything any more."""
    deadline = time.monotonic() + patience_s
    with httpx.Client(base_url=url, timeout=60) as http:
        while left := [f"{job['id']}: {job['phase']}" for job in listed(http) if job["status"] not in ENDED]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.2)
    return []


def rss(pid: int) -> int:
    """Bytes that a process and its children have in memory, once they are at rest: the least of two seconds."""
    seen = []
    for _ in range(10):
        process = psutil.Process(pid)
        seen.append(sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))
        time.sleep(0.2)
    return min(seen)


def good(rng: random.Random) -> VideoRequest:
    """A small request."""
    return VideoRequest(
        "a red kite over a harbour", 64, 64, rng.choice((96, 120)), rng.choice((2, 3)), rng.choice(SEEDS)
    )


def _good(http: httpx.Client, rng: random.Random, clip: Path, tally: Tally) -> str:
    asked = good(rng)
    created = _posted(http, asked.form())
    if created.status_code != 200:
        return f"create gave {created.status_code} {created.text[:300]}"
    job = created.json()
    deadline = time.monotonic() + TIMEOUT_S
    while job["status"] not in ENDED:
        if time.monotonic() > deadline:
            return f"not made in {TIMEOUT_S:.0f} s: {job['phase']}"
        time.sleep(0.1)
        job = http.get(f"/v1/videos/{job['id']}").json()
    if job["status"] == "failed":
        return f"failed: {job['error']}"
    return _whole(http.get(f"/v1/videos/{job['id']}/content"), asked, clip, tally)


def _good_sync(http: httpx.Client, rng: random.Random, clip: Path, tally: Tally) -> str:
    asked = good(rng)
    return _whole(_posted(http, asked.form(), "/v1/videos/sync"), asked, clip, tally)


def _bad(http: httpx.Client, rng: random.Random, clip: Path, tally: Tally) -> str:
    name = rng.choice(sorted(BAD))
    path = rng.choice(("/v1/videos", "/v1/videos/sync"))
    answer = http.post(path, data={**good(rng).form(), **BAD[name]})
    if not 400 <= answer.status_code < 500 or not answer.json()["faults"]:
        return f"{name}: {answer.status_code} {answer.text[:300]}"
    return ""


def _cancelled(http: httpx.Client, rng: random.Random, clip: Path, tally: Tally) -> str:
    created = _posted(http, BUSY.form())
    if created.status_code != 200:
        return f"create gave {created.status_code} {created.text[:300]}"
    time.sleep(rng.uniform(0, 1.5))
    path = f"/v1/videos/{created.json()['id']}"
    gone, after = http.delete(path), http.get(path)
    return "" if (gone.status_code, after.status_code) == (200, 404) else f"{gone.status_code}, {after.status_code}"


def _disconnected(http: httpx.Client, rng: random.Random, clip: Path, tally: Tally) -> str:
    mark = f"nobody waits for this one, {rng.random()}"
    with suppress(httpx.TimeoutException), httpx.Client(base_url=http.base_url, timeout=rng.uniform(0.3, 1.5)) as own:
        answer = _posted(own, {**BUSY.form(), "prompt": mark}, "/v1/videos/sync")
        return f"answered at once with {answer.status_code}"
    with tally.lock:
        tally.abandoned.append(mark)
    return ""


_DO = {
    "good": _good,
    "good sync": _good_sync,
    "bad": _bad,
    "cancelled": _cancelled,
    "disconnected": _disconnected,
}


def _posted(http: httpx.Client, form: dict[str, str], path: str = "/v1/videos") -> httpx.Response:
    """The answer, after as many times as the server said to ask again."""
    while True:
        answer = http.post(path, data=form)
        if answer.status_code != 429:
            return answer
        time.sleep(min(2.0, float(answer.headers["retry-after"])))


def _whole(answer: httpx.Response, asked: VideoRequest, clip: Path, tally: Tally) -> str:
    """Why it is not the clip that was asked for."""
    if (answer.status_code, answer.headers["content-type"]) != (200, "video/mp4"):
        return f"{answer.status_code} {answer.text[:300]}"
    clip.write_bytes(answer.content)
    verdict = verify(clip, Expectation(width=asked.width, height=asked.height, frames=asked.frames))
    clip.unlink()
    if not verdict.ok:
        return f"not what was asked for: {[str(check) for check in verdict.failures]}"
    key = (asked.frames, asked.steps, asked.seed)
    digest = hashlib.sha256(answer.content).hexdigest()
    with tally.lock:
        first = tally.bytes_of.setdefault(key, digest)
    return "" if first == digest else f"another clip than before for the same request {key}"
