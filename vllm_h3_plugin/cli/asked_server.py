# SPDX-License-Identifier: Apache-2.0
"""The running server that a verb asks for clips, and the sizes that it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_h3_plugin.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from vllm_h3_plugin.serving.client import VideoClient

_SIDE = 32


def find_server(url: str | None) -> tuple[str, str | None]:
    """Address and key of the server: the caller's, else those of the container that ``.env`` describes.

    Raises:
        SettingsError: there is a key and it cannot be read.
    """
    from vllm_h3_plugin.cli.kit_shared import this_outside
    from vllm_h3_plugin.kit.answers import find_key, url_of
    from vllm_h3_plugin.kit.project import SPARK_FILE, Project
    from vllm_h3_plugin.serving.client import callers_key

    key = callers_key()
    if url is not None:
        return url, key
    outside, here = this_outside(), Project("", Path(SPARK_FILE).absolute())
    if key is None:
        key, fault = find_key(outside, here)
        if fault:
            raise SettingsError(
                "VLLM_H3_API_KEY_FILE",
                why=fault,
                fix="Name a file that you may read in H3_API_KEY_FILE, or give --url.",
            )
    return url_of(outside, here), key


def prove(client: VideoClient) -> dict[str, Any]:
    """``/v1/h3/info`` of a server in which the plugin is active.

    Raises:
        ServerError, HostError: it does not answer, wants a key, or runs without the plugin.
    """
    import httpx

    from vllm_h3_plugin.serving.answers import unreachable
    from vllm_h3_plugin.serving.server import prove_active

    client.info()  # tells a missing key and a missing server apart from a missing plugin
    try:
        return prove_active(client.http)
    except httpx.RequestError as exc:
        raise unreachable(client.http, exc) from exc


def parse_size(text: str, option: str) -> tuple[int, int]:
    """(width, height) in pixels.

    Raises:
        UsageError: the words are no size that H3 makes.
    """
    try:
        width, height = (int(side) for side in text.lower().split("x"))
    except ValueError as exc:
        raise UsageError(f"{option} {text}", why="it is not WxH", fix="Give pixels, such as 768x448.") from exc
    if min(width, height) < _SIDE or width % _SIDE or height % _SIDE:
        nearest = "x".join(str(max(_SIDE, side // _SIDE * _SIDE)) for side in (width, height))
        raise UsageError(f"{option} {text}", why=f"H3 makes sides that are multiples of {_SIDE}", fix=f"Use {nearest}.")
    return width, height
