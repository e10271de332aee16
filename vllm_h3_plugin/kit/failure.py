# SPDX-License-Identifier: Apache-2.0
"""What went wrong with a container, as an error of this project's tree: from its exit code, its health and its log."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from vllm_h3_plugin.errors import H3Error, ServerError
from vllm_h3_plugin.kit.containers import Container
from vllm_h3_plugin.kit.words import call
from vllm_h3_plugin.serving.log_cause import class_of_exit_code, find_cause

_SIGNALLED = 128


def ended(container: Container) -> str:
    """How a container ended, in words."""
    code = container.exit_code
    if container.oom_killed:
        return "the kernel ended it: it took more memory than its limit"
    if code > _SIGNALLED:
        try:
            return f"it was ended by {signal.Signals(code - _SIGNALLED).name}"
        except ValueError:
            pass
    return f"it ended with exit code {code}" if code else "it was stopped"


def one_line_cause(log: Sequence[str]) -> str:
    """The cause that a log names, in a line of bearable length."""
    cause = find_cause(log)
    text = "its log names no error" if cause is None else cause.what + (f": {cause.why}" if cause.why else "")
    return text if len(text) <= 300 else f"{text[:297]}..."


def failure(what: str, container: Container, log: Sequence[str], *, flags: str = "") -> H3Error:
    """The error of a container that ended.

    Its class follows the error that its log names, else its exit code: a checkpoint that is short of a shard ends
    ``vllm-h3 up`` with the same code as ``vllm-h3 serve``.

    Args:
        what: what could not be done.
    """
    whole = f"`{call('logs', flags)}` has the whole log."
    if container.oom_killed:
        return ServerError(
            what,
            why=ended(container),
            fix=f"Raise VLLM_H3_MEMORY_LIMIT as far as the machine bears it, or ask for less. {whole}",
            container=container.name,
        )
    cause = find_cause(log)
    if cause is None:
        why = container.error or f"{ended(container)} and its log names no error"
        return ServerError(what, why=why, fix=whole, container=container.name, exit_code_seen=container.exit_code)
    kind = cause.kind or class_of_exit_code(container.exit_code) or ServerError
    why = f"{cause.what.rstrip('.')}: {cause.why}" if cause.why else cause.what
    fix = f"{cause.fix.rstrip('.')}. {whole}" if cause.fix else whole
    return kind(what, why=why, fix=fix, container=container.name, exit_code_seen=container.exit_code)
