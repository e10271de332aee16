# SPDX-License-Identifier: Apache-2.0
"""The host's worker on a machine of its own: its device is the first one that it sees, whatever its rank."""

from __future__ import annotations

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
from vllm_omni.platforms import current_omni_platform

DEVICE = 0
"""Ray shows an actor the devices that it was given, and each has one."""


def make_worker(rank: int, od_config: Any) -> Any:
    """The host's wrapper around its worker, with the model loaded.

    The wrapper knows one number, which is the rank, the local rank and the device (0.30:
    diffusion/worker/diffusion_worker.py:1707, 326-341).
    """
    base = resolve_obj_by_qualname(current_omni_platform.get_diffusion_worker_cls())

    class OnItsMachine(base):  # type: ignore[misc, valid-type]
        def __init__(self, local_rank: int, rank: int, *args: Any, **kwargs: Any) -> None:
            del local_rank
            super().__init__(*args, local_rank=DEVICE, rank=rank, **kwargs)

    platform: Any = (
        type(current_omni_platform) if not isinstance(current_omni_platform, type) else current_omni_platform
    )
    theirs = platform.get_torch_device
    platform.get_torch_device = classmethod(lambda cls, local_rank=None: theirs(DEVICE))
    return WorkerWrapperBase(
        gpu_id=rank,
        od_config=od_config,
        worker_extension_cls=od_config.worker_extension_cls,
        custom_pipeline_args=getattr(od_config, "custom_pipeline_args", None),
        base_worker_class=OnItsMachine,
    )


def drop_signals(args: tuple[Any, ...]) -> None:
    """Take the host's cancel signals out of requests for a rank on another machine, where their shared memory is not.

    A rank without one votes against (0.30: diffusion/cancellation.py), so the host's own cancel does nothing here; this
    plugin's is voted by the ranks themselves (:mod:`vllm_h3_plugin.host.cancel`).
    """
    for arg in args:
        new = getattr(arg, "scheduled_new_reqs", None) or (arg if isinstance(arg, list) else [arg])
        for request in [getattr(each, "req", each) for each in new]:
            if getattr(request, "cancellation_signal", None) is not None:
                request.cancellation_signal = None
