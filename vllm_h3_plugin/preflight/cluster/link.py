# SPDX-License-Identifier: Apache-2.0
"""The link between nodes, measured through the collectives that a denoise step uses. Runs on the nodes.

Ulysses exchanges queries, keys, values and the attention's output in four all-to-alls a block
(vllm_omni/diffusion/distributed/comm.py), in BF16; the ranks' rows are gathered at the step's end.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_REPEATS, _BUDGET_S = 7, 4.0
_TINY = 16
_BYTES = 2
"""Of a BF16 number."""


def free_port(address: str) -> int:
    """A TCP port that is free on an address of this node now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.bind((address, 0))
        return int(trial.getsockname()[1])


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Join the other ranks, measure, and leave.

    Args:
        order: ``rank``, ``world``, ``own`` address, ``address`` and ``port`` of rank 0, ``rows``, ``width``, ``cuda``,
            ``timeout_s``, ``interface`` and ``hca``; the node's own settings win over the last two.

    Returns:
        The fields of :class:`~vllm_h3_plugin.preflight.cluster.facts.Link`.
    """
    _choose_fabric(order["interface"], order["hca"], order["own"])

    import torch
    import torch.distributed as dist

    cuda = bool(order["cuda"]) and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    rank, world = int(order["rank"]), int(order["world"])
    host = f"[{order['address']}]" if ":" in order["address"] else order["address"]
    dist.init_process_group(
        backend,
        init_method=f"tcp://{host}:{order['port']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=order["timeout_s"]),
    )
    try:
        per_rank = -(-int(order["rows"]) // world) * int(order["width"]) // world * world
        rows = torch.ones(per_rank, dtype=torch.bfloat16, device=device)
        received = torch.empty_like(rows)
        gathered = [torch.empty_like(rows) for _ in range(world)]
        tiny, tiny_received = (torch.ones(_TINY * world, dtype=torch.bfloat16, device=device) for _ in range(2))

        def timed(call: Callable[[], object]) -> float:
            return _median(call, torch.cuda.synchronize if cuda else (lambda: None), dist)

        return {
            "backend": backend,
            "sent_bytes": per_rank * _BYTES * (world - 1) // world,
            "latency_s": timed(lambda: dist.all_to_all_single(tiny_received, tiny)),
            "all_to_all_s": timed(lambda: dist.all_to_all_single(received, rows)),
            "all_gather_s": timed(lambda: dist.all_gather(gathered, rows)),
        }
    finally:
        dist.destroy_process_group()


def _choose_fabric(interface: str | None, hca: str | None, own: str) -> None:
    """The variables by which gloo and NCCL are told, in this process alone, as the executor sets them."""
    import psutil

    interface = os.environ.get("H3_CLUSTER_INTERFACE") or interface
    if not interface:
        found = psutil.net_if_addrs().items()
        interface = next((name for name, listed in found if own in {each.address for each in listed}), None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # this one and not all that begin so
    hca = os.environ.get("H3_CLUSTER_HCA") or hca
    if hca:
        os.environ["NCCL_IB_HCA"] = hca


def _median(call: Callable[[], object], wait: Callable[[], object], dist: Any) -> float:
    """Median seconds of a call after one that warms up. All ranks make the same number of calls: the first one's time,
    agreed upon by the slowest, decides how many."""
    import torch

    started = time.perf_counter()
    call()
    wait()
    first = torch.tensor([time.perf_counter() - started])
    slowest = first.cuda() if wait is torch.cuda.synchronize else first
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    repeats = max(1, min(_REPEATS, int(_BUDGET_S / max(float(slowest), 1e-6))))
    taken = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
