# SPDX-License-Identifier: Apache-2.0
"""Making one clip while a person looks on: what ``smoke`` and ``demo`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_h3_plugin.serving.client import VideoClient
    from vllm_h3_plugin.serving.clip_maker import Made
    from vllm_h3_plugin.serving.clip_order import Order
    from vllm_h3_plugin.serving.watching import Watch


def make_shown(client: VideoClient, order: Order, folder: Path, console: Console, *, server: dict[str, Any]) -> Made:
    """:func:`~vllm_h3_plugin.serving.clip_maker.make_clip` with its progress on a console."""
    from rich.text import Text

    from vllm_h3_plugin.serving.clip_maker import Listener, make_clip

    last: tuple[str, str] | None = None
    with console.status(Text(f"{order.stem}: asking")) as status:

        def note(text: str) -> None:
            console.print(text, markup=False)

        def look(name: str, seen: Watch) -> None:
            nonlocal last
            status.update(Text(f"{name}: {progress_line(seen)}"))  # not markup: an error's text may hold brackets
            # Where no spinner can turn, in a log, each change is a line.
            if not console.is_terminal and (seen.status, seen.phase) != last:
                note(f"{name}: {progress_line(seen)}")
            last = seen.status, seen.phase

        def verifying(name: str, decoder: str, done: int, total: int) -> None:
            status.update(Text(f"{name}: verifying, {decoder} {done}/{total or '?'} frames"))

        return make_clip(client, order, folder, server=server, listener=Listener(note, look, verifying))


def progress_line(seen: Watch) -> str:
    """One look at a job in a line: status or phase, steps, percent, seconds."""
    words = seen.phase if seen.status == "in_progress" else seen.status
    if seen.status not in ("in_progress", "queued"):
        words = f"{seen.status} ({seen.phase}), trying again"
    if seen.steps:
        words += f" {seen.step}/{seen.steps}"
    if seen.percent is not None:
        words += f" {seen.percent} %"
    return f"{words}, {seen.seconds:.1f} s"
