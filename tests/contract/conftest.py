# SPDX-License-Identifier: Apache-2.0
"""One rank on the reference platform for every contract test of this run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The device of the only rank of a distributed world."""
    from vllm_h3_plugin.host.register import register
    from vllm_h3_plugin.host.standalone import single_rank

    register()
    with single_rank() as device:
        yield device


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and wait for it on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def single_precision(device: torch.device, one_thread: None) -> Iterator[None]:
    """As the pipeline decodes: whatever the default dtype, the VAE is FP32 under FP16 autocast."""
    import torch

    outside = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(outside)
