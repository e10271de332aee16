# SPDX-License-Identifier: Apache-2.0
"""``vllm`` with a check in front: prove that the plugin is active in this process, then hand over.

vLLM-Omni logs and swallows the error of a plugin that does not load and serves the stock model instead
(vllm_omni/plugins/__init__.py:52-56). Run as ``python -m vllm_h3_plugin.host.launch serve CKPT --omni …``.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from vllm_h3_plugin import settings
from vllm_h3_plugin.errors import H3Error, HostError
from vllm_h3_plugin.pins import installed_host

GROUP = "vllm_omni.general_plugins"


def prove_plugin_loads() -> None:
    """Load the plugin the way the host will, but let its errors through.

    Raises:
        HostError: wrong host version, or the entry point is missing or not this package's.
        SettingsError: an ``H3_*`` variable that nothing reads, or a bad value.
    """
    installed_host()
    settings.load()
    ours = [point for point in entry_points(group=GROUP) if point.name == "h3"]
    if not ours or ours[0].value != "vllm_h3_plugin:register":
        raise HostError(
            f"vllm-h3-plugin is not registered in entry-point group {GROUP}",
            why=f"found {[point.value for point in ours] or 'nothing'} under the name h3",
            fix="Install the plugin into the host's environment: `pip install --no-deps vllm-h3-plugin`.",
        )
    ours[0].load()()
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    from vllm_h3_plugin.host.register import ARCHITECTURES, PIPELINE_MODULE

    for architecture in ARCHITECTURES:
        model_class = DiffusionModelRegistry._try_load_model_cls(architecture)
        if model_class is None or model_class.__module__ != PIPELINE_MODULE:
            raise HostError(
                f"the host resolves {architecture} to {model_class}",
                why="another plugin or the host's own model took the place of this plugin's",
                fix="Uninstall the other plugin, or name the plugins to load in VLLM_PLUGINS.",
            )


def main() -> None:
    """Prove, then run the host's command line with this process's arguments."""
    try:
        prove_plugin_loads()
    except H3Error as exc:
        print(exc.report(), file=sys.stderr)
        sys.exit(exc.exit_code)
    from vllm_omni.entrypoints.cli.main import main as host_main

    sys.argv[0] = "vllm"
    host_main()


if __name__ == "__main__":
    main()
