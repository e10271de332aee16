# SPDX-License-Identifier: Apache-2.0
"""All ranks of one start: brought up check by check, asked together, and ended together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.host import run_state
from vllm_h3_plugin.host.cluster.facts import require_same, require_same_weights
from vllm_h3_plugin.host.cluster.rank import Answer, Asked, Place, Rank

logger = init_logger(__name__)

_END_S = 10.0
LOST_S = 5.0
"""How long after a rank's fault it may take until the loss of another, which caused it, is known."""

STRAGGLE_S = 60.0
"""How long the other ranks may work on after one has failed. One that waits for it in a collective never ends."""


_WORDS = {
    "facts": "telling its versions and checkpoint",
    "listen": "opening a port",
    "reach": "reaching the others",
    "import_host": "importing the host",
    "join": "meeting the others",
}


class LostError(ServerError):
    """A rank or its machine ended."""


@dataclass(frozen=True)
class Member:
    """One actor."""

    place: Place
    actor: Any
    pid: int
    life: Any

    def __str__(self) -> str:
        return f"rank {self.place.rank} on node {self.place.node} (pid {self.pid})"


class Group:
    """Actors with one model between them.

    Args:
        ray: the package, connected.
        placement: the placement group, a bundle a rank.
        nodes: address of each rank's machine.
        resource: what a rank takes of ``GPU``, ``NPU`` or ``CPU``; nothing for those that wait in reserve.
        devices: variables that show such a rank its device, which Ray shows to who takes one.
    """

    def __init__(
        self,
        ray: Any,
        placement: Any,
        nodes: Sequence[str],
        resource: Mapping[str, float],
        devices: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._ray = ray
        self._lock = threading.Lock()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        remote = ray.remote(concurrency_groups={"life": 1})(Rank)
        places = [
            Place(
                rank,
                len(nodes),
                node,
                os.environ.get("H3_RUN_DIR") if rank == 0 else None,
                devices[rank] if devices else {},
            )
            for rank, node in enumerate(nodes)
        ]
        actors = [
            remote.options(
                num_cpus=resource.get("CPU", 0),
                num_gpus=resource.get("GPU", 0),
                resources={name: amount for name, amount in resource.items() if name not in ("CPU", "GPU")},
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy(placement, placement_group_bundle_index=place.rank),
            ).remote()
            for place in places
        ]
        self._unmet = list(zip(places, actors, strict=True))
        self.members: tuple[Member, ...] = ()
        self.devices: list[Mapping[str, str]] = []

    def meet(self, seconds: float) -> None:
        """Wait until each actor is there.

        Raises:
            ServerError: one is not, in time.
        """
        asked = [actor.pid.remote() for _, actor in self._unmet]
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        members = []
        for (place, actor), answer in zip(self._unmet, asked, strict=True):
            who = f"rank {place.rank} on node {place.node}"
            if answer not in ready:
                raise ServerError(
                    f"{who} has not started within {seconds:.0f} s",
                    fix="See `ray status` and the logs of that node; raise H3_CLUSTER_START_S where it is slow.",
                )
            try:
                pid = self._ray.get(answer)
            except self._ray.exceptions.RayError as exc:
                raise ServerError(
                    f"{who} does not start",
                    why=_last_line(exc),
                    fix="The plugin must be installed where Ray was started: use one image on all nodes.",
                ) from exc
            members.append(Member(place, actor, pid, actor.live.options(concurrency_group="life").remote()))
        self.members = tuple(members)

    def check(self, asked: Asked, seconds: float) -> None:
        """Compare what the machines run and serve, and see that they reach each other.

        Raises:
            H3Error: of the class that fits; names the node.
        """
        require_same([answer.value for answer in self.ask("facts", asked, seconds=seconds)])
        ports = {rank: answer.value for rank, answer in enumerate(self.ask("listen", placed=False, seconds=seconds))}
        others = [{rank: port for rank, port in ports.items() if rank != own} for own in ports]
        refs = [
            member.actor.reach.remote(reached, seconds / 2)
            for member, reached in zip(self.members, others, strict=True)
        ]
        self._gather("reach", refs, seconds + LOST_S)
        self.address, self.port = ports[0]

    def import_host(self, seconds: float) -> None:
        """Import the host on each."""
        self.ask("import_host", placed=False, seconds=seconds)

    def start(self, od_config: Any, seconds: float) -> None:
        """Meet for collectives and load the model; that has no deadline but the server's own.

        Raises:
            LostError: a rank ended meanwhile.
            H3Error: what a rank could not do.
        """
        self.ask("join", self.address, self.port, seconds, seconds=seconds + LOST_S)
        self.ask("start", od_config)
        loaded = [answer.value for answer in self.ask("weights", placed=False, seconds=seconds)]
        require_same_weights({member.place.node: weights for member, weights in zip(self.members, loaded, strict=True)})
        self.devices = [answer.value for answer in self.ask("devices", placed=False, seconds=seconds)]

    def ask(self, method: str, *args: Any, placed: bool = True, seconds: float | None = None) -> list[Answer]:
        """One method of each actor, at once."""
        refs = [
            getattr(member.actor, method).remote(*((member.place,) if placed else ()), *args) for member in self.members
        ]
        try:
            return self._gather(method, refs, seconds)
        except TimeoutError as exc:
            raise ServerError(
                str(exc),
                why="the machine is slow, or its network loses what it sends",
                fix="See the log of that node; raise H3_CLUSTER_START_S where it is only slow.",
            ) from exc

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        ranks: Sequence[int],
        reply: int | None,
        seconds: float | None,
    ) -> list[Any]:
        """One method of the workers of these ranks; values of those that reply (``reply``; None: all).

        Raises:
            LostError: a rank ended, or is left waiting for one that failed.
            TimeoutError: the time is over.
            H3Error, RuntimeError: what the first rank that failed gave.
        """
        members = [self.members[rank] for rank in ranks]
        # All actors get the calls of several threads in one order.
        with self._lock:
            refs = [
                member.actor.call.remote(member.place, method, args, kwargs, reply in (None, member.place.rank))
                for member in members
            ]
        answers = self._gather(method, refs, seconds, members)
        return [
            answer.value for member, answer in zip(members, answers, strict=True) if reply in (None, member.place.rank)
        ]

    def _gather(
        self, method: str, refs: list[Any], seconds: float | None, members: Sequence[Member] | None = None
    ) -> list[Answer]:
        """All answers, or the first fault once no rank can be left waiting."""
        starting, members = members is None, self.members if members is None else members
        deadline = None if seconds is None else time.monotonic() + seconds
        pending, answers = dict(zip(refs, members, strict=True)), dict.fromkeys(refs)
        fault: tuple[Member, Answer] | None = None
        give_up = None
        while pending:
            waited = [end for end in (deadline, give_up) if end is not None]
            left = None if not waited else max(0.0, min(waited) - time.monotonic())
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=left)
            if not ready:
                late = ", ".join(map(str, pending.values()))
                if fault is not None and give_up is not None and time.monotonic() >= give_up:
                    if starting and fault[1].fault is not None:
                        raise fault[1].fault
                    raise LostError(f"{late} cannot go on without {fault[0]}", why=str(fault[1].fault), fix=RESTART)
                raise TimeoutError(f"{late} took longer than {seconds:.0f} s for {_WORDS.get(method, method)}")
            for ref in ready:
                member = pending.pop(ref)
                answer = answers[ref] = self._take(member, ref)
                if answer.fault is not None and fault is None:
                    fault, give_up = (member, answer), time.monotonic() + STRAGGLE_S
                    # Was it a rank that left, which the others only feel?
                    lost = self.lost(LOST_S if _connection(answer) else 0.0)
                    if lost:
                        raise lost_error(lost)
        if fault is not None and fault[1].fault is not None:
            logger.error("%s failed on %s:\n%s", method, fault[0], fault[1].trace)
            raise fault[1].fault
        return [answer for answer in answers.values() if answer is not None]

    def _take(self, member: Member, ref: Any) -> Answer:
        try:
            answer: Answer = self._ray.get(ref)
        except self._ray.exceptions.RayError as exc:
            if isinstance(exc, self._ray.exceptions.RayActorError):
                lost = [other for other in self.lost(LOST_S) if other != member]
                raise lost_error([member, *lost]) from exc
            raise ServerError(f"{member} gave no answer", why=_last_line(exc)) from exc
        if answer.facts is not None:
            facts = {**answer.facts, "node": member.place.node}
            run_state.write(f"worker-{member.place.rank}.json", facts)
        return answer

    def lost(self, seconds: float) -> list[Member]:
        """Ranks that have ended, waited for that long."""
        lives = {member.life: member for member in self.members}
        if not lives:
            return []
        ready, _ = self._ray.wait(list(lives), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(lives), num_returns=len(lives), timeout=0)
        return [lives[life] for life in ready]

    def end(self) -> None:
        """End all ranks, whatever they wait for, and see them gone."""
        for _, actor in self._unmet:
            self._ray.kill(actor, no_restart=True)
        lives = [member.life for member in self.members]
        if lives:
            self._ray.wait(lives, num_returns=len(lives), timeout=_END_S)


RESTART = "With H3_CLUSTER_ON_LOSS=restart the server starts its ranks again by itself."


def lost_error(lost: Sequence[Member]) -> LostError:
    """The error of a request whose ranks are gone."""
    who = " and ".join(map(str, lost))
    return LostError(
        f"{who} ended while the server was running",
        why="the process or the whole node is gone; the other ranks cannot go on without it",
        fix=f"See the log of that node (`dmesg | tail` for the kernel's reason). {RESTART}",
        ranks=[member.place.rank for member in lost],
        nodes=[member.place.node for member in lost],
    )


def _connection(answer: Answer) -> bool:
    """Whether a fault speaks of a lost peer."""
    text = str(answer.fault).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "peer", "socket", "timed out"))


def _last_line(exc: BaseException) -> str:
    lines = [line for line in str(exc).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__
