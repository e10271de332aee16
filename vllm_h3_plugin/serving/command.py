# SPDX-License-Identifier: Apache-2.0
"""From a profile and a checkpoint to the exact command and environment of the server. Pure."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_h3_plugin.quantization.recipe import load_recipe
from vllm_h3_plugin.serving.cards import placement_of
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

RAY_EXECUTOR = "vllm_h3_plugin.host.cluster.executor.RayDiffusionExecutor"
"""The host has no executor for several machines and takes one by name."""

# The host's deadlines for one request, 600 s each unless set. The first is the least that a job has here, unless
# H3_JOB_TIMEOUT_S is set; its own steps move it on (serving/jobs/run.py). After the second the mp executor ends its
# workers (vllm_omni/diffusion/executor/multiproc_executor.py): it comes last, so that a job is stopped between two
# steps and the model stays loaded. Nobody can predict a clip when the server starts, so it is longer than any; a worker
# that does not move is found by its steps (host/liveness.py).
JOB_DEADLINE, WORKER_DEADLINE = "VLLM_OMNI_VIDEO_SYNC_TIMEOUT", "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT"
WORKER_GRACE_S = 600
ANY_CLIP_S = 7 * 24 * 3600


@dataclass(frozen=True)
class ServerCommand:
    """What is run."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are set on top of the caller's environment."""
    url: str
    api_key: str | None = field(default=None, repr=False)
    """What the server will ask of callers of ``/v1``, where it was given a key."""

    def __str__(self) -> str:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items()))
        return f"{variables} {shlex.join(self.printable)}"

    @property
    def printable(self) -> list[str]:
        """The arguments with the key hidden."""
        hidden = {self.api_key: "***", f"--api-key={self.api_key}": "--api-key=***"} if self.api_key else {}
        return [hidden.get(word, word) for word in self.argv]


def server_command(
    profile: Profile,
    checkpoint: Path,
    *,
    run_dir: Path | None,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
) -> ServerCommand:
    """The host's ``vllm serve --omni`` with this profile.

    Args:
        checkpoint: the partition folder to serve.
        run_dir: folder for the state that the server's processes leave; None: they leave none.
        environ: the caller's environment; its ``VLLM_PLUGINS`` is extended, not replaced.
        extra: further arguments for ``vllm serve``, last.

    Raises:
        RecipeError: the profile's recipe cannot be read.
        SettingsError: its role map is wrong or cannot be run.
    """
    recipe = load_recipe(profile.recipe)
    # `-m host.launch` is `vllm` with a check in front: it proves that the plugin loads, then hands over.
    argv = [sys.executable, "-m", "vllm_h3_plugin.host.launch", "serve", str(checkpoint), "--omni"]
    argv += ["--trust-remote-code", "--host", profile.address, "--port", str(profile.port)]
    if recipe.method:
        argv += ["--quantization", recipe.method]
    if profile.task != "auto":
        argv += ["--task-type", profile.task]
    placed = placement_of(profile)
    ranks = placed.ranks if placed else profile.devices
    if ranks > 1:
        argv += ["--num-gpus", str(ranks)]
    if placed:
        argv += placed.options()
    if profile.executor != "auto":
        argv += ["--distributed-executor-backend", RAY_EXECUTOR if profile.executor == "ray" else profile.executor]
    if profile.attention:
        argv += ["--diffusion-attention-backend", profile.attention]
    if profile.lora:
        # Absolute: the host looks a relative path up on a hub (vllm/lora/utils.py get_adapter_absolute_path).
        argv += ["--lora-path", os.path.abspath(profile.lora)]
    if profile.eager:
        argv += ["--enforce-eager"]
    plugins = [name for name in environ.get("VLLM_PLUGINS", "").split(",") if name]
    environment = {
        "VLLM_PLUGINS": ",".join([*plugins, *(name for name in PLUGINS if name not in plugins)]),
        "H3_RECIPE": profile.recipe,
        **{name: environ.get(name, value) for name, value in HOST_ENVIRONMENT.items()},
        # A variable that is set to nothing, as compose passes it, is not set.
        JOB_DEADLINE: environ.get(JOB_DEADLINE) or str(profile.request_timeout_s),
        WORKER_DEADLINE: environ.get(WORKER_DEADLINE) or str(_longest_s(environ)),
    }
    if run_dir is not None:
        environment["H3_RUN_DIR"] = str(run_dir)
    if profile.resident != "all":
        environment["H3_RESIDENT"] = profile.resident
    if profile.reference:
        environment["H3_REFERENCE"] = "1"
    if placed and placed.elsewhere:
        environment["H3_PARTS_ON"] = ",".join(f"{part}={card}" for part, card in placed.elsewhere.items())
    url = f"http://{_reachable(profile.address)}:{profile.port}"
    return ServerCommand((*argv, *extra), environment, url, _api_key(extra, environ))


def _longest_s(environ: Mapping[str, str]) -> int:
    """Seconds after which workers may be ended; the server itself refuses a setting that is no number."""
    try:
        return math.ceil(float(environ["H3_JOB_TIMEOUT_S"])) + WORKER_GRACE_S
    except (KeyError, ValueError, OverflowError):
        return ANY_CLIP_S


def _api_key(extra: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The key that the host will guard ``/v1`` with: its flag wins over its variable."""
    words = list(extra)
    for position, word in enumerate(words):
        if word.startswith("--api-key="):
            return word.partition("=")[2]
        if word == "--api-key" and position + 1 < len(words):
            return words[position + 1]
    return environ.get("VLLM_API_KEY") or None


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in ("0.0.0.0", "::", "") else address
