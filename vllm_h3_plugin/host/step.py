# SPDX-License-Identifier: Apache-2.0
"""How the DiTs of a pipeline compute a step: with the plugin's kernels, or as the host does, compiled or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.compile import regionally_compile

from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.host.fused_block import fuse
from vllm_h3_plugin.host.step_kernels import StepKernels, choose_kernels
from vllm_h3_plugin.host.warm_up import warm_up, warm_up_text
from vllm_h3_plugin.quantization.contract import QuantBackend
from vllm_h3_plugin.settings import Settings

logger = init_logger(__name__)


@dataclass(frozen=True)
class Step:
    """What was decided.

    Attributes:
        kernels: of the blocks; None where they keep the host's steps.
        reason: a sentence.
        compiled: whether the host compiles the blocks.
    """

    kernels: StepKernels | None
    reason: str
    compiled: bool = False

    @classmethod
    def of(cls, pipeline: Any, backend: QuantBackend | None, settings: Settings) -> Step:
        """Decide for a pipeline whose DiTs are built, and give their blocks the kernels.

        Raises:
            SettingsError: blocks that several ranks share were to be compiled.
        """
        if settings.compile:
            _refuse_ranks()
            return _logged(cls(None, "H3_COMPILE=1: the host's blocks, compiled in the first request", compiled=True))
        if backend is None:
            return _logged(cls(None, "the blocks are BF16: the host's own kernels, not compiled"))
        device = next(pipeline.transformer.parameters()).device
        kernels = choose_kernels(torch.device(device), backend)
        for name in pipeline._dit_modules:
            refusal = fuse(getattr(pipeline, name), kernels)
            if refusal is not None:
                return _logged(cls(None, f"{refusal}: the host's own kernels, not compiled"))
        return _logged(cls(kernels, ", ".join(f"{name}: {how}" for name, how in kernels.fused.source.items())))

    def make_ready(self, pipeline: Any) -> None:
        """Once the weights are in: run each kernel of a prompt and of a step once, or compile if asked to."""
        logger.info("H3 text encoder: a short prompt to load its kernels took %.1f s", warm_up_text(pipeline))
        for name in pipeline._dit_modules:
            dit = getattr(pipeline, name)
            if self.compiled:
                regionally_compile(dit, dynamic=True)
            else:
                logger.info("H3 %s: one small step to load its kernels took %.1f s", name, warm_up(dit))

    def facts(self) -> Mapping[str, Any]:
        """For `/v1/h3/info`."""
        return {
            "fused": self.kernels is not None,
            "reason": self.reason,
            "compiled": self.compiled,
            "kernels": dict(self.kernels.fused.source) if self.kernels else {},
            "rotates_in_place": bool(self.kernels and self.kernels.rotates_in_place),
        }


def _refuse_ranks() -> None:
    """Keep collectives out of compiled regions: a block of several ranks has Ulysses' exchanges in it."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1:
        raise SettingsError(
            f"H3_COMPILE=1 with {ranks} ranks",
            why="a block that is compiled has the ranks' exchanges in it, and others' two-rank runs ended there: a "
            "graph that is compiled anew makes a communicator in the middle of a step",
            fix="Unset H3_COMPILE: the plugin's own kernels are compiled apart from the exchanges.",
        )


def _logged(step: Step) -> Step:
    logger.info("H3 step: %s", step.reason)
    return step
