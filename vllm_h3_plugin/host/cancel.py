# SPDX-License-Identifier: Apache-2.0
"""Stopping a request between two pieces of its work, on both hosts and executors.

0.30 hands its pipelines a signal of its own; 0.28 has nothing inside a forward. One file in ``H3_RUN_DIR`` serves both:
the API process writes the job's id into it, and the worker looks for the file between steps. A look costs one ``stat``.

An id stays there when its job has ended. The host tells of an end as soon as one rank does, and replicas come to their
next look at different times: an id that was taken away then would leave the slower one working for nobody.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.logger import init_logger

from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.worker_memory import Allocator, any_rank

logger = init_logger(__name__)

FLAG = "cancel"
KEPT = 64
"""Ids in the file, the last that were stopped. Ids of jobs are not used again."""


class RequestCancelledError(RuntimeError):
    """The request was stopped because someone asked for that.

    Not the host's ``DiffusionRequestAbortedError``: after that one nothing answers the request any more
    (vllm_omni/diffusion/inline_stage_diffusion_client.py), and who waits for it never learns that the worker is free.
    """


def flag() -> Path | None:
    """The file that names the jobs to stop, one a line; None without a run folder."""
    folder = run_state.run_dir()
    return None if folder is None else folder / FLAG


def add(job_id: str) -> bool:
    """Name one more job there. False: there is no file to name it in, or no room."""
    path = flag()
    if path is None:
        return False
    temporary = path.with_name(f".{path.name}")
    try:
        named = path.read_text(encoding="utf-8").split() if path.exists() else []
        named = [*(other for other in named if other != job_id), job_id][-KEPT:]
        temporary.write_text("\n".join(named), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return False
    return True


class Cancellation:
    """One worker's half."""

    def __init__(self, device: torch.device | None = None, agree: Callable[[bool], bool] = any_rank) -> None:
        """
        Args:
            agree: whether any rank of the model says yes; asked by every rank at once.
        """
        self._path = flag()
        self._request = ""
        self._seen: tuple[int, ...] | None = None
        self._jobs: tuple[str, ...] = ()
        self._agree = agree
        self._allocator = Allocator(device)

    def install(self, dit: torch.nn.Module) -> None:
        """Look before each denoise step of this DiT."""
        if self._path is not None:
            dit.register_forward_pre_hook(lambda module, args: self.check())

    def install_local(self, module: torch.nn.Module | None) -> None:
        """Look before each run of a module that the ranks run a different number of times, as a VAE's decoder.

        With several ranks this does nothing: one that stopped alone would leave the others waiting.
        """
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        if self._path is not None and module is not None and alone:
            module.register_forward_pre_hook(lambda module, args: self._stop_if(self.asked()))

    @contextmanager
    def request(self, request_id: str) -> Iterator[None]:
        """While a request runs. A stopped one gives its memory back before the worker goes on."""
        self._request = request_id
        try:
            yield
        except RequestCancelledError as exc:
            # The frames of the forward hold its tensors for as long as the exception lives.
            traceback.clear_frames(exc.__traceback__)
            self._allocator.release(search=False)
            raise
        finally:
            self._request = ""

    def check(self) -> None:
        """Stop here if this request is to be stopped. Every rank must come by.

        Raises:
            RequestCancelledError: it is.
        """
        if self._path is not None and self._request:
            self._stop_if(self._agree(self.asked()))

    def asked(self) -> bool:
        """Whether this request is to be stopped, as far as this rank knows."""
        if self._path is None:
            return False
        try:
            found = os.stat(self._path)
            # Each change is a new file, renamed into its place.
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._seen != seen:
                self._jobs = tuple(self._path.read_text(encoding="utf-8").split())
                self._seen = seen
        except FileNotFoundError:
            return False
        # The host makes JOB-UUID of a job's id (vllm_omni/entrypoints/async_omni.py, _get_unique_request_id).
        return any(self._request.startswith(job) for job in self._jobs)

    def _stop_if(self, asked: bool) -> None:
        if asked:
            logger.info("request %s is stopped between two steps", self._request)
            raise RequestCancelledError("the request was cancelled")
