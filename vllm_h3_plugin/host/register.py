# SPDX-License-Identifier: Apache-2.0
"""Put the plugin's classes into the host's registries. Runs in every process of the server."""

from __future__ import annotations

import logging

from vllm.logger import init_logger

from vllm_h3_plugin import __version__, settings
from vllm_h3_plugin.pins import installed_host
from vllm_h3_plugin.settings import reference_requested

logger = init_logger(__name__)

# The host resolves both names to one class (diffusion/registry.py:127-136).
ARCHITECTURES = ("MiniMaxH3Pipeline", "MiniMaxH3ModularPipeline")
PIPELINE_MODULE = "vllm_h3_plugin.host.pipeline"
PIPELINE_CLASS = "MiniMaxH3Pipeline"


def register() -> None:
    """Register the H3 pipeline under the host's own architecture names.

    Raises:
        HostError: the host is not one of the pinned versions. The host swallows errors of plugins
            (vllm_omni/plugins/__init__.py:52-56), so the launcher calls this itself before it starts the server.
    """
    host = installed_host()
    _join_the_host_s_log()
    from vllm_omni.diffusion.registry import register_diffusion_model

    from vllm_h3_plugin.host.stage_devices import show_cards

    for architecture in ARCHITECTURES:
        register_diffusion_model(
            model_arch=architecture,
            module_name=PIPELINE_MODULE,
            class_name=PIPELINE_CLASS,
            post_process_func_name="get_minimax_h3_post_process_func",
        )
    show_cards(settings.load())
    logger.info("vllm-h3-plugin %s is active on host %s", __version__, host)


def _join_the_host_s_log() -> None:
    """Send this package's log where vLLM's goes, as vLLM-Omni does with its own (vllm_omni/logger.py).

    vLLM sets up the logger named ``vllm`` and no other. Without this, warnings come bare and everything below them is
    lost.
    """
    logging.getLogger("vllm_h3_plugin").parent = logging.getLogger("vllm")


def prepare_reference_process() -> None:
    """What the reference platform needs in each process beyond its platform classes; nothing on a real platform."""
    if not reference_requested():
        return
    from vllm_h3_plugin.host.reference import cpu_ops, worker_outputs

    cpu_ops.define_missing_ops()
    worker_outputs.install()
    logger.warning("H3_REFERENCE=1: the CPU reference platform runs tiny checkpoints and is not for real clips.")
