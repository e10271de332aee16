# SPDX-License-Identifier: Apache-2.0
"""From a profile and a checkpoint to the exact command and environment of the server. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_h3_plugin.quantization.recipe import load_recipe
from vllm_h3_plugin.serving.profile import Profile

# Names of entry points, in all groups. Once VLLM_PLUGINS is set it is the whole allow-list, the host's own included;
# it must be set, because the host attaches endpoint plugins only if they are named (vllm/plugins/__init__.py:93-131).
PLUGINS = ("h3", "h3_reference", "vllm_omni_register_models")

# What every process that imports the host is given, unless the caller's environment says otherwise.
HOST_ENVIRONMENT = {
    # Everything is on the disk; a look-up on a hub would only add a time-out on a machine without a network.
    "HF_HUB_OFFLINE": "1",
    # vLLM's import starts two background compilers of `humming` kernels (humming/ops/utils.py, humming/utils/nvrtc.py),
    # each of which imports torch once more: about half of the import time on 2 cores. H3 uses none of these kernels.
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}


@dataclass(frozen=True)
class ServerCommand:
    """What is run."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are set on top of the caller's environment."""
    url: str

    def __str__(self) -> str:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items()))
        return f"{variables} {shlex.join(self.argv)}"


def server_command(
    profile: Profile,
    checkpoint: Path,
    *,
    run_dir: Path,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
) -> ServerCommand:
    """The host's ``vllm serve --omni`` with this profile.

    Args:
        checkpoint: the partition folder to serve.
        run_dir: folder for the state that the server's processes leave.
        environ: the caller's environment; its ``VLLM_PLUGINS`` is extended, not replaced.
        extra: further arguments for ``vllm serve``, last.

    Raises:
        RecipeError: the profile's recipe cannot be read.
    """
    recipe = load_recipe(profile.recipe)
    # `-m host.launch` is `vllm` with a check in front: it proves that the plugin loads, then hands over.
    argv = [sys.executable, "-m", "vllm_h3_plugin.host.launch", "serve", str(checkpoint), "--omni"]
    argv += ["--trust-remote-code", "--host", profile.address, "--port", str(profile.port)]
    if recipe.method:
        argv += ["--quantization", recipe.method]
    if profile.task != "auto":
        argv += ["--task-type", profile.task]
    if profile.devices > 1:
        argv += ["--num-gpus", str(profile.devices)]
    if profile.executor != "auto":
        argv += ["--distributed-executor-backend", profile.executor]
    if profile.attention:
        argv += ["--diffusion-attention-backend", profile.attention]
    if profile.eager:
        argv += ["--enforce-eager"]
    plugins = [name for name in environ.get("VLLM_PLUGINS", "").split(",") if name]
    environment = {
        "VLLM_PLUGINS": ",".join([*plugins, *(name for name in PLUGINS if name not in plugins)]),
        "H3_RECIPE": profile.recipe,
        "H3_RUN_DIR": str(run_dir),
        **{name: environ.get(name, value) for name, value in HOST_ENVIRONMENT.items()},
    }
    if profile.reference:
        environment["H3_REFERENCE"] = "1"
    return ServerCommand((*argv, *extra), environment, f"http://{_reachable(profile.address)}:{profile.port}")


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in ("0.0.0.0", "::", "") else address
