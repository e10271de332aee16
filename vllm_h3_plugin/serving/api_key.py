# SPDX-License-Identifier: Apache-2.0
"""The key that guards ``/v1``, from a file: others can read a command line and a compose file, but not a secret."""

from __future__ import annotations

from pathlib import Path

from vllm_h3_plugin.errors import SettingsError


def read_api_key(path: Path) -> str:
    """The key in a file: its one line, without the white space around it.

    Raises:
        SettingsError: the file cannot be read, is empty, or holds more than one word. A server whose operator asked
            for a key never starts without one.
    """
    what = f"H3_API_KEY_FILE={path}"
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise SettingsError(
            what,
            why=reason or str(exc),
            fix="Name a file with the key that the server's user may read (in the container that is user id 10001).",
        ) from exc
    if len(words) != 1:
        raise SettingsError(
            what,
            why="it is empty" if not words else "it holds more than one word",
            fix="Write one key into it: `openssl rand -hex 32 > FILE`; or unset the variable to serve without a key.",
        )
    return words[0]
