# SPDX-License-Identifier: Apache-2.0
"""Why a server ended or does not come up, from the lines of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_h3_plugin import errors
from vllm_h3_plugin.errors import H3Error

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OWN_ERROR = re.compile(r"vllm_h3_plugin\.errors\.(?P<kind>\w+): (?P<text>.+)")
_ANY_ERROR = re.compile(r"^(?:\S+ )*?(?:\w+\.)*\w*(?:Error|Exception): .+")
_REPORT = re.compile(r"^(?P<key>error|  why|  fix): (?P<text>.+)")
# What `vllm-h3 serve` says of the process that it started; the reason stands in its `why` and above it.
_WRAPPER = re.compile(r"the server (ended with exit code|was killed by) ")


@dataclass(frozen=True)
class Cause:
    """What a log says was wrong.

    Attributes:
        kind: class of the error; None where the log does not name one of this project's.
    """

    what: str
    why: str = ""
    fix: str = ""
    kind: type[H3Error] | None = None


def most_telling_line(lines: Sequence[str]) -> str:
    """The plugin's own last error, else the first error of all, else the last line. ``lines`` are without colours."""
    own = [match["text"] for line in lines if (match := _OWN_ERROR.search(line))]
    if own:
        return own[-1].strip()
    found = [line.strip() for line in lines if _ANY_ERROR.match(line)]
    return found[0] if found else (lines[-1].strip() if lines else "it printed nothing")


def find_cause(lines: Sequence[str]) -> Cause | None:
    """The last error in a log; None where there is none.

    An exception of the plugin comes first: what ``vllm-h3 serve`` reports behind it only repeats its text. Then the
    last report (``error:``, ``why:``, ``fix:``), then the first error of any kind.
    """
    clean = [COLOUR.sub("", line).rstrip() for line in lines]
    own = [match for line in clean if (match := _OWN_ERROR.search(line))]
    if own:
        return Cause(own[-1]["text"].strip(), kind=class_named(own[-1]["kind"]))
    reports = _reports(clean)
    inner = [report for report in reports if not _WRAPPER.match(report["error"])]
    if inner:
        return Cause(inner[-1]["error"], inner[-1].get("why", ""), inner[-1].get("fix", ""))
    if reports:
        return Cause(reports[-1].get("why") or reports[-1]["error"])
    if any(_ANY_ERROR.match(line) for line in clean):
        return Cause(most_telling_line(clean))
    return None


def class_named(name: str) -> type[H3Error] | None:
    """The class of the error tree with that name."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, H3Error) else None


def class_of_exit_code(code: int) -> type[H3Error] | None:
    """The class of the error tree that a verb which ended with ``code`` failed by; None for a code of another kind."""
    own = (found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, H3Error))
    return next((found for found in own if found.exit_code == code), None)


def _reports(lines: Sequence[str]) -> list[dict[str, str]]:
    reports: list[dict[str, str]] = []
    for line in lines:
        match = _REPORT.match(line)
        if match and match["key"] == "error":
            reports.append({})
        if match and reports:
            reports[-1][match["key"].strip()] = match["text"]
    return reports
