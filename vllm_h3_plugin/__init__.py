# SPDX-License-Identifier: Apache-2.0
"""vllm-h3-plugin: MiniMax-H3 on hardware that is too small for it.

Importing this package loads neither torch nor vLLM. The functions below are the package's entry points
(see ``pyproject.toml``); the host calls them by name and everything heavy is imported inside them.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of ``vllm_omni.general_plugins``: put the plugin's classes in the host's registries.

    The host calls this in every process that builds or runs the model, possibly more than once.
    """
    from vllm_h3_plugin.host.register import register as register_with_host

    register_with_host()


def reference_process() -> None:
    """Entry point ``h3_reference`` of ``vllm_omni.general_plugins``: prepares a process of the reference platform.

    Separate from :func:`register`, so that the stock host can be run on the reference platform for comparison
    (``VLLM_PLUGINS`` naming ``h3_reference`` but not ``h3``).
    """
    from vllm_h3_plugin.host.register import prepare_reference_process

    prepare_reference_process()


def reference_vllm_platform() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the CPU reference platform, only when ``H3_REFERENCE=1``."""
    from vllm_h3_plugin.settings import reference_requested

    return "vllm_h3_plugin.host.reference.vllm_platform.ReferencePlatform" if reference_requested() else None


def reference_omni_platform() -> str | None:
    """Entry point of ``vllm_omni.platform_plugins``: the Omni half of the CPU reference platform."""
    from vllm_h3_plugin.settings import reference_requested

    return "vllm_h3_plugin.host.reference.omni_platform.ReferenceOmniPlatform" if reference_requested() else None


def endpoints() -> object:
    """Entry point of ``vllm.endpoint_plugins``: the plugin's own HTTP routes under ``/v1/h3``."""
    from vllm_h3_plugin.host.endpoints import H3Endpoints

    return H3Endpoints()
