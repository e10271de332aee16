# SPDX-License-Identifier: Apache-2.0
"""A server's log for people: what it says it is doing, without what nobody reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from vllm_h3_plugin.kit.words import plain_line

# One line for each health check and each look of a client: more lines than everything else together.
_POLL = re.compile(r'"GET /(?:health|v1/h3/info|v1/videos(?:/[\w-]+)?(?:\?\S*)?|metrics)(?: HTTP/[\d.]+)?" 200\b')
_LOADING = re.compile(
    r"\] (?P<what>(?:loading|AdaLN table of|building table)[^:]*): (?P<done>[\d.]+) of (?P<total>[\d.]+) GiB, "
    r"(?P<rate>[\d.]+) GiB/s, (?P<left>\d+) s left"
)
# Line of the log -> what the server is at from there on. The last one that is found counts.
_MARKS = (
    (re.compile(r"H3 loaded from"), "warm-up"),
    (re.compile(r"H3 \S+.*to load its kernels took"), "warm-up"),
    (re.compile(r"Application startup complete"), "answering"),
    (re.compile(r"vllm_h3_plugin\.host\.launch serve"), "starting the host"),
)


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Lines without escapes, progress bars that overwrite themselves, empty lines and answered polls."""
    for line in lines:
        text = plain_line(line)
        if text.strip() and not _POLL.search(text):
            yield text


def start_phase(lines: Sequence[str]) -> tuple[str, str]:
    """What a server that starts is at, by its log: a phase, and how far it is within it."""
    for line in reversed(lines):
        text = plain_line(line)
        found = _LOADING.search(text)
        if found:
            detail = f"{found['done']} of {found['total']} GiB, {found['rate']} GiB/s, {found['left']} s left"
            return found["what"], detail
        for mark, phase in _MARKS:
            if mark.search(text):
                return phase, ""
    return "starting the host", ""
