# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 down``: an end that loses no job unasked and gives the memory back."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_h3_plugin.cli.kit_shared import HERE, AsJson, Cards, Directory, Engine, Line


def down(
    cards: Cards = None,
    engine: Engine = "docker",
    directory: Directory = HERE,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a job: say what is killed, and stop.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for running and waiting jobs.")] = 3600,
    as_json: AsJson = False,
) -> None:
    """Wait for the running job, stop the containers, and see the memory come back.

    Jobs that wait are waited for too; new ones are still taken meanwhile, and --timeout bounds it all: exit code 10,
    and nothing is stopped. Nor is it, with exit code 7, where the server does not say whether a job runs: it gives
    errors, asks for a key, cannot be reached or is paused. --now stops it whatever runs. A job that has not moved for
    VLLM_H3_STUCK_AFTER_S (1800) is not waited for. The containers are removed, volumes
    (snapshots, clips, compiled kernels) stay. Then MemAvailable and the devices' processes are held against what the
    server held, for up to 60 s; if memory is missing, exit code 10 and the processes that hold it. Containers of
    another project or checkout are never touched.

    \b
    vllm-h3 down
    vllm-h3 down --timeout 7200
    vllm-h3 down --now
    """
    from vllm_h3_plugin.cli.console import emit_json, stderr, stdout
    from vllm_h3_plugin.cli.kit_shared import find_project, this_outside
    from vllm_h3_plugin.cli.up import INTERRUPTED
    from vllm_h3_plugin.kit.answers import find_key, stuck_after_s
    from vllm_h3_plugin.kit.stop import Stopper, summary
    from vllm_h3_plugin.kit.words import call

    outside = this_outside()
    project = find_project(outside, directory, cards, engine)
    key, no_key = find_key(outside, project)
    after_s = stuck_after_s(outside, project)
    console = stderr()
    line = Line(console)

    def look(text: str) -> None:
        subject, _, detail = text.partition(": ")
        line.show(subject, detail)

    try:
        with line.shown():
            stopper = Stopper(outside, project, key, look, line.note, no_key=no_key, stuck_after_s=after_s)
            done = stopper.take_down(now=now, timeout_s=timeout)
    except KeyboardInterrupt:
        console.print(f"interrupted; see what is left: `{call('status', project.flags)}`", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    stdout().print(summary(done), markup=False)
    if as_json:
        emit_json(True, **done.as_dict())
