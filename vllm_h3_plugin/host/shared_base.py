# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one machine on one read-only base: built once, verified together, mapped by all.

On the reference platform a rank's parameters are views of the base where a whole parameter is resident; a slice of a
tensor-parallel rank is copied, so that the slices of all ranks are together one copy. For an accelerator every byte is
read from the base into anonymous memory and goes to the card from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch
from vllm.logger import init_logger

from vllm_h3_plugin.checkpoint.one_builder import Outcome, build_once
from vllm_h3_plugin.checkpoint.shared_base import SharedBase, announce_bus_errors, require_host_memory
from vllm_h3_plugin.checkpoint.snapshot import parse_piece
from vllm_h3_plugin.checkpoint.snapshot_paths import snapshots_folder
from vllm_h3_plugin.errors import CheckpointError, SnapshotError
from vllm_h3_plugin.host.linear_method import stored
from vllm_h3_plugin.host.parts import Part
from vllm_h3_plugin.host.snapshots import Snapshots, require_fits
from vllm_h3_plugin.host.worker_memory import any_rank_at_start
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)

_PARTS = ("transformer", "transformers_ref", "text_encoder")
"""Parts that a snapshot holds, by the host's names."""


@dataclass(frozen=True)
class Attached:
    """What ranks took of the base: ``/v1/h3/info`` shows it.

    Attributes:
        id: of the snapshot.
        nbytes: of one copy.
        viewed_bytes: that this rank maps and does not hold.
        copied_bytes: that were read into memory of this rank.
        built_here: this rank read the checkpoint and wrote the base.
        waited_s: seconds that it waited for another to do so.
        takeovers: builders that ended before they were done, as far as this rank saw.
        note: in words.
    """

    id: str
    nbytes: int
    viewed_bytes: int
    copied_bytes: int
    built_here: bool
    waited_s: float
    takeovers: int
    note: str


@dataclass
class _Taken:
    base: SharedBase | None
    here: bool = False
    waited_s: float = 0.0
    takeovers: int = 0


def wanted(settings: Settings, ranks: int, snapshots: Snapshots) -> bool:
    """Whether a base is shared, if there is one to keep: ``auto`` where ranks share it or stages come back from it."""
    mode = settings.shared_base
    auto = ranks > 1 or settings.resident == "stage"
    return snapshots.writes and (mode == "on" or (mode == "auto" and auto))


class BaseOfRanks:
    """The base of one start.

    Args:
        snapshots: the server's; its mode is not ``off``.
        rank: of ``ranks``.
        load_checkpoint: fills this rank from the checkpoint; given True it writes the snapshot too, which is run by one
            rank at a time.
        say: gets what this rank waits for.
        vote: whether any rank says yes; all ranks call it equally often, and none returns before all have called.
        parts: names of the parts that this rank has. The host builds the text encoder on some ranks only, and a rank
            without one cannot write a snapshot for all.
        share: number among the ranks that share this machine's base, and how many they are; None: all share one.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        rank: int,
        ranks: int,
        load_checkpoint: Callable[[bool], None],
        say: Callable[[str], None],
        vote: Callable[[bool], bool] = any_rank_at_start,
        parts: Collection[str] = (),
        share: tuple[int, int] | None = None,
    ) -> None:
        self._share = share or (rank, ranks)
        self._snapshots = snapshots
        self._rank = rank
        self._ranks = ranks
        self._load_checkpoint = load_checkpoint
        self._say = say
        self._vote = vote
        self._parts = parts
        self._bad: set[float] = set()

    def take(self) -> _Taken:
        """The verified base, mapped; built by one rank first if there is none.

        Raises:
            SnapshotError: under ``require`` there is none, or it is damaged.
            BusyError: the machine has not the memory for it.
            whatever the load of the checkpoint raises.
        """
        folder = snapshots_folder(self._snapshots.cache)
        with suppress(OSError):  # without a folder there is no lock, and build_once() goes on without one
            folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"{self._snapshots.key.id}.build.lock"
        here, complete = False, self._is_complete()
        while True:
            if complete:
                outcome = build_once(lock, self._find, self._build, self._waiting)
                self._meet()
            else:
                outcome = self._after_others()
            here = here or outcome.here
            taken = _Taken(outcome.built.base, here, round(outcome.waited_s, 3), outcome.takeovers)
            # One that could not keep what it built has loaded all the same, and only votes from here on.
            if not self._vote(self._is_bad(taken.base)):
                return taken
            if taken.base is not None:
                self._bad.add(taken.base.snapshot.manifest.created)
                taken.base.close()
            self._vote(False)  # none builds anew while another still holds what is bad

    def _is_complete(self) -> bool:
        """Whether this rank has every part that any rank has."""
        if self._ranks == 1:
            return True
        needed = [name for name in _PARTS if self._vote(name in self._parts)]
        return set(needed) <= set(self._parts)

    def _meet(self) -> None:
        if self._ranks > 1:
            self._vote(False)

    def _after_others(self) -> Outcome[_Taken]:
        """What the ranks with all parts have left; this one's share of the checkpoint if there is nothing."""
        began = time.monotonic()
        self._waiting(0.0, "a rank that has every part")
        self._meet()
        waited = time.monotonic() - began
        found = self._find()
        if found is None:
            self._load_checkpoint(False)
        return Outcome(found or _Taken(None), found is None, waited, 0)

    def _find(self) -> _Taken | None:
        try:
            snapshot = self._snapshots.open_now()
        except SnapshotError as exc:
            if not exc.details.get("busy"):
                self._snapshots.refuse(exc)
            return None
        if snapshot is None:
            return None
        if snapshot.manifest.created in self._bad:
            snapshot.close()
            return None
        require_host_memory(snapshot.nbytes, int(psutil.virtual_memory().available))
        return _Taken(SharedBase(snapshot))

    def _build(self) -> _Taken:
        self._snapshots.refuse_to_build()
        self._load_checkpoint(True)
        return self._find() or _Taken(None)  # the disk refused it: this rank goes on with what it has

    def _is_bad(self, base: SharedBase | None) -> bool:
        try:
            if base is not None:
                base.verify(*self._share)
        except CheckpointError as exc:
            self._snapshots.refuse(exc)
            return True
        return False

    def _waiting(self, seconds: float, who: str) -> None:
        self._say(f"waiting for the quantized weights ({who} makes them)")
        logger.info("H3 base: %s quantizes the weights for this machine; waited %.0f s", who, seconds)


def attach(base: SharedBase, part: Part, *, views: bool) -> int:
    """Fill a part from the base; returns its bytes.

    Args:
        views: let whole parameters be views of the mapping (the CPU); else everything is copied.

    Raises:
        SnapshotError, LoadError: the base is not the model's, or was cut off.
    """
    require_fits(base.snapshot, part)
    targets = part.loader.targets
    taken: dict[str, torch.Tensor] = {}
    for name, param in targets.items():
        record = base.entry(part.name, name)
        if not views or record is None or record.shape != tuple(param.shape):
            continue
        if isinstance(param, torch.nn.Parameter):
            view = base.view(part.name, name)
            if view is not None and stored(param, view).dtype == param.dtype:
                taken[name] = view
    pieces = (
        (*parse_piece(record.name), base.read(part.name, record))
        for record in base.snapshot.part(part.name).tensors
        if parse_piece(record.name)[0] not in taken
    )
    return part.loader.from_pieces(pieces, views=taken).nbytes


def report(taken: _Taken, base: SharedBase, ranks: int) -> Attached:
    """Facts and a sentence about what was attached."""
    note = (
        f"{base.viewed_bytes / 2**30:.2f} GiB are views of the shared base; {base.copied_bytes / 2**30:.2f} GiB were "
        f"cut or copied for this rank of {ranks}: the base holds whole parameters and serves any tensor-parallel size"
    )
    announce_bus_errors()
    logger.info("H3 base %s: %s", base.snapshot.id, note)
    return Attached(
        base.snapshot.id,
        base.nbytes,
        base.viewed_bytes,
        base.copied_bytes,
        taken.here,
        taken.waited_s,
        taken.takeovers,
        note,
    )
