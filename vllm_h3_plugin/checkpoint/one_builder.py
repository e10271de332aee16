# SPDX-License-Identifier: Apache-2.0
"""One process of a machine builds, the others wait for it; if it dies, another one takes over.

The lock dies with its holder (``flock``), so its end is noticed whatever it was. What counts as built is for the caller
to say, and is asked again by whoever gets the lock: what a dead builder left unfinished is not that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from vllm_h3_plugin.checkpoint.file_lock import hold, holder

logger = logging.getLogger(__name__)

Built = TypeVar("Built")

_POLL_S = 0.1
_SAY_S = 5.0


@dataclass(frozen=True)
class Outcome(Generic[Built]):
    """What :func:`build_once` came to.

    Attributes:
        built: what is there now.
        here: whether this process built it.
        waited_s: seconds spent waiting for another one.
        takeovers: builders that ended without building while this one waited.
    """

    built: Built
    here: bool
    waited_s: float
    takeovers: int


def build_once(
    lock_path: Path,
    find: Callable[[], Built | None],
    build: Callable[[], Built],
    waiting: Callable[[float, str], None] = lambda seconds, who: None,
) -> Outcome[Built]:
    """What ``find`` finds; if there is nothing, what one process of this machine builds.

    Args:
        lock_path: where it cannot be made (a read-only folder, a full disk), nobody can wait for anybody: each process
            builds for itself.
        find: cheap and safe to repeat; sees only what is whole.
        build: called by one process at a time, with nothing found.
        waiting: called every five seconds with the seconds waited and who builds.

    Raises:
        SnapshotError: the file system has no locks.
        whatever ``find`` and ``build`` raise. A builder that fails lets the next one try.
    """
    began, said, takeovers, last = time.monotonic(), 0.0, 0, ""
    while True:
        waited = time.monotonic() - began
        found = find()
        if found is not None:
            return Outcome(found, False, waited, takeovers)
        try:
            lock = hold(lock_path)
        except OSError as exc:
            logger.warning("%s: no lock can be made (%s), so each process builds for itself", lock_path, exc.strerror)
            return Outcome(build(), True, waited, takeovers)
        if lock is not None:
            with lock:
                lock.sign()
                found = find()
                if found is not None:
                    return Outcome(found, False, waited, takeovers)
                return Outcome(build(), True, waited, takeovers + bool(last))
        who = holder(lock_path)
        takeovers += bool(last and who.startswith("process") and last.startswith("process") and who != last)
        last = who
        if waited - said >= _SAY_S or not said:
            said = max(waited, 1e-9)
            waiting(waited, who)
        time.sleep(_POLL_S)
