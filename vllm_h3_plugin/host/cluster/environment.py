# SPDX-License-Identifier: Apache-2.0
"""Which variables of the server the ranks get, and which a machine keeps for itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_PREFIXES = ("H3_", "VLLM_", "NCCL_", "GLOO_", "TORCH_", "HF_HUB_", "HUMMING_")

SECRETS = ("H3_API_KEY_FILE", "VLLM_API_KEY")
"""They guard the HTTP port, which only the server has."""

OWN = (
    "H3_CACHE_DIR",
    "H3_CLUSTER_CHECKPOINT",
    "H3_CLUSTER_HCA",
    "H3_CLUSTER_INTERFACE",
    "H3_FFMPEG",
    "H3_VERIFY_CHECKSUMS",
)
"""Paths and names that may differ from machine to machine: one that is set where ``ray start`` ran wins there."""

_NEVER = ("H3_RUN_DIR", "H3_CLUSTER_ADDRESS", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def handed_over(environ: Mapping[str, str]) -> dict[str, str]:
    """What the server's environment gives to each rank: settings of the plugin, the host and the network libraries."""
    kept = (*SECRETS, *_NEVER)
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES) and name not in kept}


def take(given: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Put what was handed over into a rank's environment. Settings of the server that is gone do not stay."""
    for name in [name for name in environ if name.startswith(("H3_", "VLLM_"))]:
        if name not in OWN:
            del environ[name]
    for name, value in given.items():
        if name not in OWN or not environ.get(name):
            environ[name] = value
