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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise SettingsError(
            what,
            why=reason or str(exc),
            fix="Name a file with the key that the server's user may read (in the container that is user id 10001).",
        ) from exc
    why = fault_of_key(text.strip())
    if why:
        raise SettingsError(
            what,
            why=why,
            fix="Write one key into it: `openssl rand -hex 32 > FILE`; or unset the variable to serve without a key.",
        )
    return text.strip()


def fault_of_key(key: str) -> str:
    """What keeps a text from being a key, without a word of it; empty if nothing does.

    A key travels in an HTTP header: one word of printable ASCII.
    """
    if not key:
        return "it is empty"
    if len(key.split()) > 1:
        return "it holds more than one word"
    if not all("!" <= letter <= "~" for letter in key):
        return "it holds characters that a header cannot carry; a key is letters, digits and ASCII signs"
    return ""
