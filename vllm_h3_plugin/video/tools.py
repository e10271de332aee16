# SPDX-License-Identifier: Apache-2.0
"""Where the ffmpeg program is.

Only ``ffmpeg`` is looked for: ``ffprobe`` is missing from many installations (imageio-ffmpeg carries none), and PyAV
tells all that it would.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vllm_h3_plugin.errors import ToolMissingError
from vllm_h3_plugin.settings import Settings, load

_HOW_TO_GET = (
    "Install it (`apt-get install ffmpeg`, or `pip install imageio-ffmpeg`, which carries one), "
    "or set H3_FFMPEG to the program's path."
)


def find_ffmpeg(settings: Settings | None = None) -> Path:
    """The ffmpeg program: ``H3_FFMPEG``, else the one on PATH, else the one that imageio-ffmpeg carries.

    Args:
        settings: settings already read; unset, the environment is read.

    Raises:
        ToolMissingError: none was found, or ``H3_FFMPEG`` names something that cannot be run. A program that the
            user named is never replaced by another one.
        SettingsError: an ``H3_*`` variable is wrong.
    """
    named = (load() if settings is None else settings).ffmpeg
    if named is not None:
        return _named(named)
    on_path = shutil.which("ffmpeg")
    if on_path is not None:
        return Path(on_path)
    carried = _carried_by_imageio()
    if carried is not None:
        return carried
    raise ToolMissingError("ffmpeg", why="it is neither on PATH nor carried by imageio-ffmpeg", fix=_HOW_TO_GET)


def _named(program: Path) -> Path:
    if program.is_file() and os.access(program, os.X_OK):
        return program
    if not program.exists():
        why = "there is no such file"
    elif not program.is_file():
        why = "it is not a file"
    else:
        why = "it is not executable"
    raise ToolMissingError(
        f"H3_FFMPEG={program}", why=why, fix="Set it to the path of the ffmpeg program, or unset it to search PATH."
    )


def _carried_by_imageio() -> Path | None:
    try:
        import imageio_ffmpeg
    except ImportError:
        return None
    try:
        return Path(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:  # its way of saying that this platform's wheel carries no program
        return None
