# SPDX-License-Identifier: Apache-2.0
"""Where the project's data files are, in a checkout and in an installed wheel alike.

``quant/`` and ``launch/`` stand at the top of the repository, where people look for them. The package holds links to
them in ``_data/``; building a wheel follows the links and copies the files (see ``[tool.setuptools.package-data]`` in
``pyproject.toml``). This module imports nothing of the project but its errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vllm_h3_plugin.errors import UsageError

_ROOT = Path(__file__).resolve().parent / "_data"


def data_path(name: Literal["quant", "launch"]) -> Path:
    """Folder of data files: ``quant`` (precision recipes) or ``launch`` (pins, profiles, container entrypoint).

    Links are resolved, so in a checkout the path is the folder at the top of the repository.

    Raises:
        UsageError: the folder is not there, which means that the installation is broken.
    """
    path = (_ROOT / name).resolve()
    if not path.is_dir():
        raise UsageError(
            f"data folder {name}/ not found at {path}",
            why="the installation lacks the plugin's data files",
            fix="Install the plugin again from a complete checkout or wheel.",
        )
    return path
