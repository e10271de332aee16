# SPDX-License-Identifier: Apache-2.0
"""One rank: a Ray actor with the host's own worker inside.

Nothing of the host is imported before the machine's facts have been compared: a machine that runs something else
is told so, not unpickled from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_h3_plugin.errors import H3Error
from vllm_h3_plugin.host.cluster import environment, network
from vllm_h3_plugin.host.cluster.facts import NodeFacts, checkpoint_digests, recipe_facts, versions

_RUN_DIR = "vllm-h3-rank-"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        node: address of its machine in Ray.
        run_dir: the server's run folder for rank 0, which runs beside it; None: one of its own.
        devices: variables that show it its device, where Ray does not.
    """

    rank: int
    ranks: int
    node: str
    run_dir: str | None
    devices: Mapping[str, str]


@dataclass(frozen=True)
class Asked:
    """What the server serves: environment, checkpoint, task and recipe."""

    environment: Mapping[str, str]
    model: str
    task: str | None
    recipe: str


@dataclass(frozen=True)
class Answer:
    """What a call gave: a value or a fault, which an actor would wrap in a type of Ray's own; and the rank's facts."""

    value: Any = None
    fault: Exception | None = None
    trace: str = ""
    facts: Mapping[str, Any] | None = None


class Rank:
    """The actor. The model lives in one thread; ``live`` waits in another for as long as the process does."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="h3-rank")
        self._listener: network.Listener | None = None
        self._worker: Any = None
        self._model = ""
        self._address = ""
        self._said: Mapping[str, Any] | None = None

    def live(self) -> None:
        """Never returns: who waits for it learns of the end of this process or machine."""
        threading.Event().wait()

    def pid(self) -> int:
        """Of this process, on its machine."""
        return os.getpid()

    def devices(self) -> Answer:
        """The variables that show this process its device."""
        return Answer({name: os.environ[name] for name in _VISIBLE if name in os.environ})

    def facts(self, place: Place, asked: Asked) -> Answer:
        """Take the server's environment and tell what this machine runs and serves."""
        return _answer(lambda: self._tell(place, asked))

    def _tell(self, place: Place, asked: Asked) -> NodeFacts:
        environment.take(asked.environment, os.environ)
        os.environ.update(place.devices)
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # each machine's weights are its own
        os.environ["H3_RUN_DIR"] = place.run_dir or own_run_dir(Path(tempfile.gettempdir()))
        _, self._address = network.choose(os.environ, place.node)
        self._model = os.environ.get("H3_CLUSTER_CHECKPOINT") or asked.model
        manifest = os.environ.get("H3_VERIFY_CHECKSUMS")
        return NodeFacts(
            place.node,
            versions(),
            recipe_facts(asked.recipe),
            checkpoint_digests(Path(self._model), asked.task),
            self._model,
            _manifest(Path(manifest)) if manifest else None,
        )

    def listen(self) -> Answer:
        """A port on the interface, for the others to reach."""

        def listen() -> tuple[str, int]:
            self._listener = network.Listener(self._address)
            return self._listener.address, self._listener.port

        return _answer(listen)

    def reach(self, others: Mapping[int, tuple[str, int]], seconds: float) -> Answer:
        """Try the other ranks' ports."""
        return _answer(lambda: network.reach(self._address, others, seconds))

    def import_host(self) -> Answer:
        """Load the host and register the plugin, which takes the longest of all that needs no model."""
        return _answer(lambda: self._thread.submit(_import_host).result())

    def join(self, place: Place, address: str, port: int, seconds: float) -> Answer:
        """Meet the other ranks.

        The host's worker would meet them at ``localhost``; it takes a group that is there.
        """

        def join() -> None:
            if self._listener is not None:
                self._listener.close()
            _meet(place, address, port, seconds)

        return _answer(lambda: self._thread.submit(join).result())

    def start(self, place: Place, od_config: Any) -> Answer:
        """Build the worker and load the model."""

        def start() -> None:
            from vllm_h3_plugin.host.cluster.worker import make_worker

            od_config.model = self._model
            self._worker = make_worker(place.rank, od_config)

        return self._with_facts(_answer(lambda: self._thread.submit(start).result()), place)

    def weights(self) -> Answer:
        """Part -> digest over what was loaded; empty where no snapshot is kept."""
        return _answer(lambda: self._thread.submit(lambda: _weights(self._worker)).result())

    def call(self, place: Place, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reply: bool) -> Answer:
        """One method of the worker; only a rank that is asked for it sends its result."""

        def call() -> Any:
            from vllm_h3_plugin.host.cluster.worker import drop_signals

            if place.rank:
                drop_signals(args)
            value = self._worker.execute_method(method, *args, **kwargs)
            return value if reply else None

        return self._with_facts(_answer(lambda: self._thread.submit(call).result()), place)

    def _with_facts(self, answer: Answer, place: Place) -> Answer:
        """What the worker told of itself since the last answer; rank 0 tells the server itself."""
        from vllm_h3_plugin.host import run_state

        told = run_state.read(f"worker-{place.rank}.json")
        if told is None or told == self._said:
            return answer
        self._said = told
        return Answer(answer.value, answer.fault, answer.trace, told)


def own_run_dir(folder: Path) -> str:
    """A run folder for this process. Those of ranks that are gone go: a rank is killed and removes nothing itself."""
    import psutil

    for left in folder.glob(f"{_RUN_DIR}*"):
        pid = left.name.removeprefix(_RUN_DIR).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_RUN_DIR}{os.getpid()}-", dir=folder)


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        return Answer(work())
    except Exception as exc:  # noqa: BLE001 -- it is the answer
        trace = traceback.format_exc()
        if isinstance(exc, H3Error):
            return Answer(fault=exc, trace=trace)
        # Of what class it is may only be known here.
        return Answer(fault=RuntimeError(str(exc) or type(exc).__name__), trace=trace)


def _manifest(path: Path) -> str:
    from blake3 import blake3

    from vllm_h3_plugin.checkpoint.checksums import read_manifest

    return blake3(repr(sorted(read_manifest(path).items())).encode()).hexdigest()


def _weights(worker: Any) -> dict[str, str]:
    from blake3 import blake3

    base = worker.worker.model_runner.pipeline._base
    if base is None:
        return {}
    snapshot = base.snapshot
    return {part: blake3(repr(sorted(snapshot.digests(part).items())).encode()).hexdigest() for part in snapshot.parts}


def _import_host() -> None:
    from vllm_omni.plugins import load_omni_general_plugins

    from vllm_h3_plugin.host.launch import prove_plugin_loads

    prove_plugin_loads()
    load_omni_general_plugins()
    import vllm_omni.diffusion.worker.diffusion_worker  # noqa: F401

    from vllm_h3_plugin.host import pipeline  # noqa: F401


def _meet(place: Place, address: str, port: int, seconds: float) -> None:
    from datetime import timedelta

    import torch
    from vllm_omni.platforms import current_omni_platform

    from vllm_h3_plugin.errors import ServerError

    try:
        torch.distributed.init_process_group(
            backend=current_omni_platform.dist_backend,
            init_method=f"tcp://{address}:{port}",
            world_size=place.ranks,
            rank=place.rank,
            timeout=timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError) as exc:
        raise ServerError(
            f"rank {place.rank} on node {place.node} did not meet the others at {address}:{port}",
            why=str(exc).splitlines()[0],
            fix="See the log of the other ranks; raise H3_CLUSTER_START_S where the machines are slow.",
        ) from exc
