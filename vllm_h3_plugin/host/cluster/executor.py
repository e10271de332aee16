# SPDX-License-Identifier: Apache-2.0
"""The host's executor for ranks on several machines: given by name as ``--distributed-executor-backend``.

Requests run as in the host's in-process executor, one at a time and to their end; only how a method reaches the
workers is other. Nothing but rank 0's result travels, and rank 0 runs beside the server: a clip leaves it as MP4.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.platforms import current_omni_platform

from vllm_h3_plugin import settings
from vllm_h3_plugin.host.cluster.environment import handed_over
from vllm_h3_plugin.host.cluster.group import RESTART, LostError, lost_error
from vllm_h3_plugin.host.cluster.rank import Asked
from vllm_h3_plugin.host.cluster.start import Start
from vllm_h3_plugin.host.cluster.state import announce_idle, tell
from vllm_h3_plugin.host.session import requested_method
from vllm_h3_plugin.quantization.recipe import resolve_recipe

logger = init_logger(__name__)

_LOOK_S = 1.0
_REQUESTS = ("execute_model", "execute_model_batch")
_LONGEST = "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT"
"""The host's own deadline of a request's call to its workers, in seconds (multiproc_executor.py:46), which `vllm-h3
serve` sets. The in-process executor, whose code runs here, asks for none."""


class RayDiffusionExecutor(UniProcDiffusionExecutor):
    """Ranks are Ray actors.

    Raises (from ``__init__``):
        ToolMissingError, ServerError, HostError, RecipeError, CheckpointError, SettingsError: see the checks of
            :mod:`.nodes`, :mod:`.facts` and :mod:`.network`. Nothing that was started is left.
    """

    uses_multiproc = True
    uses_ray = True

    def _init_executor(self) -> None:
        self._closed = self._is_failed = False
        self._failure_callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._fault: LostError | None = None
        values = settings.load()
        self._restarts = values.cluster_on_loss == "restart"
        recipe = resolve_recipe(requested_method(self.od_config.quantization_config), values.recipe)
        task = getattr(self.od_config, "task_type", None)
        asked = Asked(
            handed_over(os.environ),
            str(self.od_config.model),
            None if task == "auto" else task,
            values.recipe or recipe.name,
        )
        resource = {"cuda": "GPU", "npu": "NPU"}.get(current_omni_platform.device_type, "CPU")
        self._start = Start(asked, self.od_config, resource, values, spares=self._restarts)
        tell(None)
        self._group = self._start.first()
        self._watch()

    @property
    def is_dead(self) -> bool:
        """Whether it is shut down or lost a rank for good."""
        return self._closed or self._is_failed

    def _ensure_open(self) -> None:
        if self._closed:
            raise RuntimeError("DiffusionExecutor is closed.")
        if self._is_failed:
            raise EngineDeadError(str(self._fault) if self._fault else "")

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        exec_all_ranks: bool = False,
    ) -> Any:
        """One method of the workers, with the host's meaning of its arguments (0.30: multiproc_executor.py:771).

        Raises:
            LostError: a rank or its machine ended; names it.
            TimeoutError: it took longer than ``timeout`` seconds. A request that did loses its ranks, as with the
                host's own executor: one that stands still in a collective never leaves it.
        """
        request = method in _REQUESTS
        if request and timeout is None and os.environ.get(_LONGEST):
            timeout = float(os.environ[_LONGEST])
        # A request that comes while ranks start again waits for them, as long as it may take itself.
        if not self._ready.wait(timeout):
            raise TimeoutError(f"the ranks have not started again within {timeout:.0f} s")
        self._ensure_open()
        group = self._group
        alone = unique_reply_rank is not None and not exec_all_ranks
        ranks = [unique_reply_rank] if alone and unique_reply_rank is not None else range(len(group.members))
        everyone = unique_reply_rank is None
        try:
            values = group.call(
                method,
                tuple(args or ()),
                dict(kwargs or {}),
                ranks=list(ranks),
                reply=None if everyone else unique_reply_rank,
                seconds=timeout,
            )
        except LostError as exc:
            raise self._lose(group, exc) from exc
        except TimeoutError as exc:
            if not request:
                raise
            late = LostError(str(exc), why="a rank that stands still is waited for by all", fix=RESTART)
            raise self._lose(group, late) from exc
        if not everyone:
            return values[0]
        # Rank 0 speaks for all, and all must have said yes.
        return [all(values)] if isinstance(values[0], bool) else [values[0]]

    def _watch(self) -> None:
        """Look after the ranks of this start until one is lost or all are told to end."""
        group = self._group

        def watch() -> None:
            while not self._closed and group is self._group and self._fault is None:
                lost = group.lost(_LOOK_S)
                if lost and not self._closed:
                    self._lose(group, lost_error(lost))
                    return

        self._ready.set()
        threading.Thread(target=watch, daemon=True, name="h3-cluster-watch").start()

    def _lose(self, group: Any, error: LostError) -> LostError:
        """End the other ranks, and the server or start anew; gives the error that came first."""
        with self._lock:
            if self._closed or group is not self._group:
                return error
            if self._fault is not None:
                return self._fault
            self._fault = error
            self._ready.clear()
        logger.error("event=rank_lost what=%r", error.what)
        tell(error.what)
        group.end()
        announce_idle()
        if self._restarts:
            threading.Thread(target=self._again, daemon=True, name="h3-cluster-restart").start()
        else:
            self._fail()
        return error

    def _again(self) -> None:
        try:
            group = self._start.again()
        except Exception as exc:  # Ray's own are of no common class; requests wait for what comes of this
            logger.exception("event=restart_failed what=%r", str(exc))
            tell(f"{self._fault and self._fault.what}; the ranks did not start again: {exc}")
            self._fail()
            return
        with self._lock:
            closed = self._closed
            self._group, self._fault = group, None
        if closed:
            group.end()
            return
        tell(None)
        logger.info("event=ranks_restarted members=%s", ", ".join(map(str, group.members)))
        self._watch()

    def _fail(self) -> None:
        self._is_failed = True
        self._ready.set()
        for callback in self._failure_callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a failure callback of the host failed")

    def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: a rank was lost for good.
        """
        self._ensure_open()

    def shutdown(self) -> None:
        """End all ranks and leave the cluster. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ready.set()
        self._start.end(getattr(self, "_group", None))
