# SPDX-License-Identifier: Apache-2.0
"""A worker's device allocator, and a question put to all ranks of the model: what the memory watch needs of torch."""

from __future__ import annotations

import gc

import torch


class Allocator:
    """The device allocator's own numbers: what it keeps beyond what is in use can be taken by the next request."""

    def __init__(self, device: torch.device | None = None) -> None:
        """
        Args:
            device: anything but a CUDA device has no such allocator.
        """
        # By index: the watching thread has a current device of its own.
        self._index: int | None = None
        if device is not None and device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index

    def allocated(self) -> int:
        """Bytes in use."""
        return 0 if self._index is None else int(torch.cuda.memory_allocated(self._index))

    def reserved(self) -> int:
        """Bytes taken from the system, in use or not."""
        return 0 if self._index is None else int(torch.cuda.memory_reserved(self._index))

    def release(self, *, search: bool = True) -> None:
        """Give back what is not in use.

        Args:
            search: look for garbage in reference cycles first, which takes about a second of a process this large.
        """
        if search:
            gc.collect()
        if self._index is not None:
            torch.cuda.empty_cache()


def release_host_buffers() -> None:
    """Give page-locked memory that is not in use back to the system.

    torch keeps what weights were read into for the next who wants page-locked memory; on unified memory that is a GiB
    less for the model. The call has no public name; where a torch lacks it, the memory stays with torch.
    """
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if torch.cuda.is_available() and empty_cache is not None:
        gc.collect()
        empty_cache()


def _alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _is_replica() -> bool:
    from vllm_omni.diffusion.distributed import parallel_state

    return bool(parallel_state.get_data_parallel_world_size() > 1)


def any_rank(mine: bool) -> bool:
    """Whether any rank of the model says yes. All ranks must ask at once: one that stopped alone would hang the rest.

    With data parallel replicas the ranks run different requests and ask at different times, so each answers for itself.
    """
    return mine if _alone() or _is_replica() else any_rank_at_start(mine)


def any_rank_at_start(mine: bool) -> bool:
    """The same while all ranks load, which replicas do together too. None returns before all have asked."""
    if _alone():
        return mine
    from vllm_omni.diffusion.distributed import parallel_state

    votes = torch.tensor([int(mine)], dtype=torch.int32)
    torch.distributed.all_reduce(
        votes, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_world_group().cpu_group
    )
    return bool(votes.item())
