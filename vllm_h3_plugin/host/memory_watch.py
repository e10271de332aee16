# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the memory guard: watches the memory while a request runs, and ends the request in time.

A thread looks once a second. Under the floor it drops the page cache of the checkpoint's own files. Under the hard
floor it marks the request, and the next look between two denoise steps (a forward pre-hook of the DiT, so that 0.28,
which cancels nothing inside a forward, can be stopped too) raises :class:`BusyError`. The host turns an exception of
the pipeline into a failed request and goes on: the job keeps the message, the memory comes back, the server lives.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.logger import init_logger

from vllm_h3_plugin import settings
from vllm_h3_plugin.checkpoint import page_cache
from vllm_h3_plugin.errors import BusyError, CheckpointError
from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.asked import Model, of_denoise, table_room
from vllm_h3_plugin.host.worker_memory import Allocator, any_rank
from vllm_h3_plugin.memory.guard import Mark, Refuse, Thresholds, cancelled, check_start, decide, mark
from vllm_h3_plugin.memory.system import GIB, MemorySystem, guard_active, probe
from vllm_h3_plugin.memory.table import keeps_table
from vllm_h3_plugin.memory.weights import shapes_of
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.quantization.precision import Precision

if TYPE_CHECKING:
    from vllm_h3_plugin.host.session import Session

logger = init_logger(__name__)

SAMPLE_S = 1.0
_BEFORE_DENOISE = frozenset({"references", "text"})


class MemoryWatch:
    """Watches one worker's requests. Does nothing at all while the guard is off."""

    def __init__(
        self,
        system: MemorySystem,
        thresholds: Thresholds,
        *,
        mode: str = "on",
        files: Sequence[Path] = (),
        allocator: Allocator | None = None,
        agree: Callable[[bool], bool] | None = None,
        model: Mapping[str, Any] | None = None,
        forecaster: Model | None = None,
        sample_s: float = SAMPLE_S,
    ) -> None:
        """
        Args:
            mode: ``H3_MEMORY_GUARD``.
            files: the checkpoint's own files, whose page cache may be dropped.
            agree: whether any rank of the model says yes; asked by every rank at once. None: there is one rank.
            model: what the API server needs to predict a request: ``checkpoint``, ``task``, ``quantized``,
                ``streaming``, ``tables``, ``vision_fp32``.
            forecaster: predicts a request in this worker.
            sample_s: seconds between two looks.
        """
        self.system = system
        self.thresholds = thresholds
        self.active = guard_active(mode, system)
        self._mode = mode
        self._files = files
        self._allocator = allocator or Allocator()
        self._agree = agree
        self._model = dict(model or {})
        self._forecaster = forecaster
        self._sample_s = sample_s
        self._running = threading.Event()
        self._thread: threading.Thread | None = None
        self._resident = 0
        self._critical: int | None = None
        self._dropped = False
        self._refused = 0
        self._cancelled = 0
        self._publishing = threading.Lock()
        self._looking = threading.Lock()
        self._reason: str | None = None
        self._reason_time = 0.0
        self._publish(system.available())

    @classmethod
    def for_session(cls, session: Session, device: torch.device) -> MemoryWatch:
        """The watch of this worker, by ``H3_MEMORY_*``. A CUDA device must be the current one.

        Raises:
            SettingsError: a variable is wrong.
        """
        values, inventory = settings.load(), session.inventory
        system = probe(device.type, reference=values.reference, run_dir=values.run_dir)
        quantized, streaming = bool(session.plan.quantized), installed_host().vllm_omni != "0.28.0"
        shapes, tables = shapes_of(inventory), keeps_table(session.plan.recipe)
        vision_fp32 = session.plan.vision is Precision.FP32
        watch = cls(
            system,
            Thresholds.from_settings(values),
            mode=values.memory_guard,
            files=[file.path for partition in inventory.partitions for part in partition.parts for file in part.files],
            allocator=Allocator(device),
            agree=any_rank,
            model={
                "checkpoint": str(inventory.path),
                "task": inventory.task,
                "quantized": quantized,
                "streaming": streaming,
                "tables": tables,
                "vision_fp32": vision_fp32,
            },
            forecaster=Model(
                shapes,
                quantized,
                streaming,
                system.unified,
                table_room(shapes, values) if tables else None,
                vision_fp32,
            ),
        )
        logger.info(
            "memory guard (H3_MEMORY_GUARD=%s) is %s: memory is %s, %s is %.1f GiB",
            values.memory_guard,
            "on" if watch.active else "off",
            "unified" if system.unified else "the device's own",
            system.name,
            system.available() / GIB,
        )
        return watch

    def check_start(self, resident_bytes: int) -> None:
        """Refuse to build a model of this size while the memory for it is not there.

        Raises:
            BusyError: see :func:`vllm_h3_plugin.memory.guard.check_start`.
        """
        if self.active:
            check_start(resident_bytes, self.system, self.thresholds, log=logger.warning)

    def install(self, dit: torch.nn.Module) -> None:
        """Look between the denoise steps of this DiT."""
        if self.active:
            dit.register_forward_pre_hook(lambda module, args: self.check())

    @contextmanager
    def request(self) -> Iterator[None]:
        """Watch while a request runs. On the way out of a failed one, its memory is given back first."""
        if not self.active:
            yield
            return
        self._resident = self._allocator.allocated()
        self._critical = None
        self._dropped = False
        self._start_thread()
        self._running.set()
        try:
            yield
        except BusyError as exc:
            # The frames of the forward hold its tensors for as long as the exception lives.
            traceback.clear_frames(exc.__traceback__)
            raise
        finally:
            self._running.clear()
            self._allocator.release()
            self._resident = self._allocator.allocated()
            self._publish(self.system.available())

    def expect(self, denoise_inputs: Mapping[str, Any]) -> None:
        """Refuse a request whose steps and decoding no longer fit, now that its exact size is known.

        It was admitted at another time, or came by a route that admits everything; and its first step would take the
        memory at once, with no look in between.

        Args:
            denoise_inputs: the arguments of the pipeline's ``diffuse``.

        Raises:
            BusyError: with the numbers.
        """
        if not self.active or self._forecaster is None:
            return
        asked = of_denoise(denoise_inputs)
        if asked is not None:
            phases = self._forecaster.forecast(asked)
            self.require({name: nbytes for name, nbytes in phases.items() if name not in _BEFORE_DENOISE})

    def require(self, predicted: Mapping[str, int]) -> None:
        """Refuse what no longer fits when its turn comes: a queued request was admitted at another time.

        Args:
            predicted: phase -> bytes beyond what is resident.

        Raises:
            BusyError: with the numbers.
        """
        if not self.active:
            return
        verdict = decide(self.system.available() + self.reusable(), predicted, self.thresholds)
        if self._any(isinstance(verdict, Refuse)):
            self._refused += 1
            self._fail(verdict.error() if isinstance(verdict, Refuse) else _refused_elsewhere(self.thresholds))

    def check(self) -> None:
        """Look now, and end the request if the memory fell under the hard floor since it began.

        Raises:
            BusyError: with what was left.
        """
        if not self.active:
            return
        self._look()
        left = self._critical
        if self._any(left is not None):
            self._critical = None
            self._cancelled += 1
            self._fail(cancelled(self.system.available() if left is None else left, self.thresholds))

    def reusable(self) -> int:
        """Bytes that the allocator holds and the next request can have: requests run one after the other."""
        return max(0, self._allocator.reserved() - self._resident)

    def _any(self, mine: bool) -> bool:
        return mine if self._agree is None else self._agree(mine)

    def _fail(self, error: BusyError) -> NoReturn:
        self._reason, self._reason_time = str(error), time.time()
        logger.error("%s", error)
        raise error

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="h3-memory-watch", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            self._running.wait()
            self._publish(self._look())
            time.sleep(self._sample_s)

    def _look(self) -> int:
        """One sample: drops our page cache under the floor, marks the request under the hard floor.

        One look at a time: between two steps the request must not be judged while the thread is still dropping.
        """
        with self._looking:
            return self._look_alone()

    def _look_alone(self) -> int:
        available = self.system.available()
        if mark(available, self.thresholds) is Mark.FINE:
            return available
        if not self._dropped:
            self._dropped = True
            logger.warning(
                "%s is %.1f GiB, under the floor of %.1f GiB: dropping the page cache of %d checkpoint files",
                self.system.name,
                available / GIB,
                self.thresholds.floor / GIB,
                len(self._files),
            )
            try:
                page_cache.drop(self._files)
            except CheckpointError as exc:
                logger.warning("%s", exc)  # a file that is gone has no page cache
            available = self.system.available()
        if mark(available, self.thresholds) is Mark.CRITICAL:
            self._critical = available
        return available

    def _publish(self, available: int) -> None:
        with self._publishing:
            run_state.write(
                f"guard-{os.environ.get('RANK', '0')}.json",
                {
                    **self._model,
                    "mode": self._mode,
                    "active": self.active,
                    "unified": self.system.unified,
                    "reference": self.system.reference,
                    "total_bytes": self.system.total_bytes,
                    "available_bytes": available,
                    "reusable_bytes": self.reusable(),
                    "floor_bytes": self.thresholds.floor,
                    "hard_floor_bytes": self.thresholds.hard_floor,
                    "retry_after_s": self.thresholds.retry_s,
                    "refused": self._refused,
                    "cancelled": self._cancelled,
                    "last_reason": self._reason,
                    "last_reason_time": self._reason_time,
                },
            )


def _refused_elsewhere(thresholds: Thresholds) -> BusyError:
    return BusyError(
        "not enough memory for this request on another rank",
        why="all ranks of the model run a request, or none",
        fix=f"Ask again in {thresholds.retry_s} s, or for less; the other rank's line in the log has the numbers.",
        retry_after_s=thresholds.retry_s,
    )
