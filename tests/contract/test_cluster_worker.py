# SPDX-License-Identifier: Apache-2.0
"""What a rank on another machine is given of the host's, and what it must not be."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerWrapperBase

from vllm_h3_plugin.host.cluster.executor import RayDiffusionExecutor
from vllm_h3_plugin.host.cluster.worker import drop_signals
from vllm_h3_plugin.serving.command import RAY_EXECUTOR


def test_the_host_takes_the_executor_by_the_name_that_the_command_has() -> None:
    config = SimpleNamespace(distributed_executor_backend=RAY_EXECUTOR, num_gpus=2)
    assert DiffusionExecutor.get_class(config) is RayDiffusionExecutor
    assert not inspect.isabstract(RayDiffusionExecutor)


def test_the_hosts_worker_takes_one_number_for_all_three() -> None:
    """If it takes more, the rank's own place can be said without a subclass."""
    assert list(inspect.signature(WorkerWrapperBase.__init__).parameters)[1] == "gpu_id"
    assert {"local_rank", "rank", "od_config"} <= set(inspect.signature(DiffusionWorker.__init__).parameters)


def test_cancel_signals_of_one_machines_memory_do_not_reach_another() -> None:
    single, first, second = (SimpleNamespace(cancellation_signal="psm_1", seed=seed) for seed in range(3))
    drop_signals((single, SimpleNamespace(other=1), None))
    drop_signals((SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req=first)]), [SimpleNamespace(req=second)]))
    assert [each.cancellation_signal for each in (single, first, second)] == [None] * 3
    # 0.28 has none.
    plain = SimpleNamespace(seed=1)
    drop_signals((plain,))
    assert vars(plain) == {"seed": 1}
