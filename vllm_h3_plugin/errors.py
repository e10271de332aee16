# SPDX-License-Identifier: Apache-2.0
"""Every error this project raises on purpose: what happened, why, and what to do.

::

    H3Error                    exit 1   HTTP 500
    |-- UsageError             exit 2   HTTP 400   a flag, a field or a file name that cannot be right
    |   |-- SettingsError      exit 2   HTTP 500   an H3_* variable or a launch profile
    |   `-- AdapterError       exit 2   HTTP 400   a LoRA or FastH3 file that does not fit the model or the server
    |-- CheckpointError        exit 3   HTTP 500   files on disk
    |   |-- LoadError          exit 3   HTTP 500   tensors that do not fill the model exactly once
    |   `-- SnapshotError      exit 3   HTTP 500   a quantized snapshot or an AdaLN table of this project's own
    |-- RecipeError            exit 4   HTTP 500   precision recipes
    |-- HostError              exit 5   HTTP 500   vLLM / vLLM-Omni version, plugin registration
    |-- BackendError           exit 6   HTTP 500   a kernel that was asked for and cannot run
    |-- ServerError            exit 7   HTTP 502   a server that did not start, answer or stay
    |-- ClipError              exit 8   HTTP 500   a clip that is not what was asked for
    |-- ToolMissingError       exit 9   HTTP 500   an external program or an optional package
    `-- BusyError              exit 10  HTTP 503   the machine cannot do it now
        `-- QueueFullError     exit 10  HTTP 429   too many wait for it already

This module imports nothing of the project.
"""

from __future__ import annotations

from typing import Any, ClassVar


class H3Error(Exception):
    """Base of the tree.

    Args:
        what: the thing that failed, with its name (a path, a tensor, a field) and the value seen.
        why: the reason, as far as it is known; empty if ``what`` says it.
        fix: what the reader can do next; empty only where nothing can be done.
        details: JSON-serialisable facts for ``--json`` and logs.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, why: str = "", fix: str = "", **details: Any) -> None:
        self.what = what
        self.why = why
        self.fix = fix
        self.details = details
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what.rstrip()
        if self.why:
            text = f"{text.rstrip('.')}: {self.why.rstrip()}"
        if self.fix:
            text = f"{text.rstrip('.')}. {self.fix.rstrip()}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries by pickle; keyword-only arguments need help there.
        return _rebuild, (type(self), self.what, self.why, self.fix, self.details)

    def report(self) -> str:
        """What, why and fix on a line each, for a terminal."""
        lines = [f"error: {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The error as one JSON object."""
        return {"type": type(self).__name__, "what": self.what, "why": self.why, "fix": self.fix, **self.details}


def _rebuild(cls: type[H3Error], what: str, why: str, fix: str, details: dict[str, Any]) -> H3Error:
    return cls(what, why=why, fix=fix, **details)


class UsageError(H3Error):
    """The caller asked for something that cannot be right."""

    exit_code = 2
    http_status = 400


class SettingsError(UsageError):
    """An ``H3_*`` variable or a launch profile is wrong."""

    http_status = 500


class AdapterError(UsageError):
    """An adapter (Turbo, FlashGen, FastH3, PEFT) does not fit the model or the server."""


class CheckpointError(H3Error):
    """The checkpoint on disk is not what the model needs."""

    exit_code = 3


class LoadError(CheckpointError):
    """The tensors that were read do not fill the model's parameters exactly once."""


class SnapshotError(CheckpointError):
    """A quantized snapshot or an AdaLN table in the cache folder cannot be used or written."""


class RecipeError(H3Error):
    """A precision recipe is malformed or does not fit the model."""

    exit_code = 4


class HostError(H3Error):
    """The vLLM / vLLM-Omni host is not the pinned one, or the plugin is not active in it."""

    exit_code = 5


class BackendError(H3Error):
    """A kernel that a recipe or a user named cannot run on this device."""

    exit_code = 6


class ServerError(H3Error):
    """The server did not start, did not answer, or went away."""

    exit_code = 7
    http_status = 502


class ClipError(H3Error):
    """A clip failed verification."""

    exit_code = 8


class ToolMissingError(H3Error):
    """An external program or an optional package is missing."""

    exit_code = 9


class BusyError(H3Error):
    """The machine cannot do this now; the caller may try again later."""

    exit_code = 10
    http_status = 503


class QueueFullError(BusyError):
    """As many requests wait as may; the caller may try again later."""

    http_status = 429


def one_line(exc: BaseException) -> str:
    """First line of an exception, with its type, cut to a length that a log line bears."""
    lines = str(exc).strip().splitlines()
    text = f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
