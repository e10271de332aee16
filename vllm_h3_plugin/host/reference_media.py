# SPDX-License-Identifier: Apache-2.0
"""Films and sounds as references where ``ffprobe`` and ``ffmpeg`` are not on PATH.

The host runs both by name (``model_executor/models/minimax_h3/reference_video.py``, 0.28.0 and 0.30.0); without them a
request with a film or a sound ends in ``[Errno 2] No such file or directory: 'ffprobe'`` and HTTP 500. What ffprobe
would tell is asked of PyAV here, always, so that one file gets one answer everywhere. The host's ffmpeg commands say
``-vsync``, which newer programs no longer know: where PATH has no ffmpeg that does, a script stands in front that says
it in today's words to the program that :func:`~vllm_h3_plugin.video.tools.find_ffmpeg` finds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import av
from vllm.logger import init_logger
from vllm_omni.errors import OmniClientError
from vllm_omni.model_executor.models.minimax_h3 import reference_video

from vllm_h3_plugin.video.tools import find_ffmpeg

logger = init_logger(__name__)

_PREFIX = "ffmpeg-"
_SCRIPT = """\
#!/bin/sh
# ffmpeg with `-vsync 0` said as `-fps_mode passthrough`.
left=$#
while [ "$left" -gt 0 ]; do
  word=$1; shift; left=$((left - 1))
  if [ "$word" = -vsync ] && [ "$1" = 0 ]; then
    set -- "$@" -fps_mode passthrough; shift; left=$((left - 1))
  else
    set -- "$@" "$word"
  fi
done
exec {program} "$@"
"""


def install(cache: Path) -> None:
    """Put both where the host looks; a second call changes nothing.

    Args:
        cache: folder that a script may be left in, and run from.

    Raises:
        ToolMissingError: there is no ffmpeg at all.
        SettingsError: H3_FFMPEG is wrong.
    """
    reference_video._probe_video = probe_film
    reference_video._probe_audio = probe_sound
    found = shutil.which("ffmpeg")
    if found is not None and (Path(found).parent.name.startswith(_PREFIX) or _knows_vsync(found)):
        return
    text = _SCRIPT.format(program=shlex.quote(str(find_ffmpeg())))
    # One folder for each text, so that it never changes under a process that uses it, and nothing is left to clean up.
    folder = cache.expanduser().absolute() / f"{_PREFIX}{sha256(text.encode()).hexdigest()[:16]}"
    written = folder / f".{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(text, encoding="utf-8")
        written.chmod(0o755)
        written.replace(folder / "ffmpeg")
    except OSError as exc:
        logger.warning("films as references will fail: no ffmpeg on PATH, and %s: %s", folder, exc.strerror or exc)
        return
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PATH"))))


def _knows_vsync(program: str) -> bool:
    try:
        asked = subprocess.run([program, "-v", "error", "-vsync", "0", "-version"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and b"Unrecognized option" not in asked.stderr


def probe_film(path: str) -> dict[str, Any]:
    """The host's ``_probe_video``: size in pixels, frames a second, frames, seconds, names of container and codecs.

    Raises:
        OmniClientError: the file cannot be opened, has no film in it, or tells no rate or no frames.
    """
    with _opened(path) as container:
        if not container.streams.video:
            raise OmniClientError(f"media has no video stream: {path}")
        stream = container.streams.video[0]
        # `r_frame_rate`, the host's choice: the least rate that gives all timestamps.
        rate = stream.base_rate
        if not rate or rate <= 0:
            raise OmniClientError(f"cannot determine video FPS: {path}")
        frames = int(stream.frames) or _counted(container, path)
        if not frames:
            raise OmniClientError(f"cannot determine video frame count: {path}")
        return {
            "width": int(stream.codec_context.width),
            "height": int(stream.codec_context.height),
            "fps": float(rate),
            "frame_count": frames,
            "duration": _seconds(container, stream) or frames / float(rate),
            "format_names": _format_names(container),
            "video_codec": _codec(stream),
            "audio_codecs": tuple(_codec(sound) for sound in container.streams.audio if _codec(sound)),
            "file_size": os.path.getsize(path),
        }


def probe_sound(path: str) -> dict[str, Any]:
    """The host's ``_probe_audio``: seconds, names of container and codec, bytes.

    Raises:
        OmniClientError: the file cannot be opened, has no sound in it, or tells no length.
    """
    with _opened(path) as container:
        if not container.streams.audio:
            raise OmniClientError(f"media has no audio stream: {path}")
        stream = container.streams.audio[0]
        seconds = _seconds(container, stream)
        if seconds is None:
            raise OmniClientError(f"cannot determine audio duration: {path}")
        return {
            "duration": seconds,
            "format_names": _format_names(container),
            "codec": _codec(stream),
            "file_size": os.path.getsize(path),
        }


def _opened(path: str) -> Any:
    try:
        return av.open(path)
    except av.error.FFmpegError as exc:
        raise OmniClientError(f"media cannot be read: {path}: {exc.strerror or exc}") from exc


def _counted(container: Any, path: str) -> int:
    """Frames, decoded one by one, of a file that does not say."""
    try:
        return sum(1 for _ in container.decode(video=0))
    except av.error.FFmpegError as exc:
        raise OmniClientError(f"media cannot be read: {path}: {exc.strerror or exc}") from exc


def _seconds(container: Any, stream: Any) -> float | None:
    if stream.duration is not None and stream.time_base:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / av.time_base


def _format_names(container: Any) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in container.format.name.split(",") if name.strip())


def _codec(stream: Any) -> str:
    codec = getattr(stream, "codec_context", None)
    return "" if codec is None else str(codec.codec.canonical_name).lower()
