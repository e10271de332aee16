# SPDX-License-Identifier: Apache-2.0
"""``vllm-h3 health``: is the running server well? What the container's health check runs."""

from __future__ import annotations

import time

import typer


def health(
    url: str = typer.Option("http://127.0.0.1:8000", help="Address of the server."),
    stuck_after: float = typer.Option(
        1800, min=1, help="Seconds within a request without a step or a change of phase that mean it is stuck."
    ),
    timeout: float = typer.Option(10, min=0.1, help="Seconds to wait for an answer."),
    as_json: bool = typer.Option(False, "--json", help="End with one JSON line."),
) -> None:
    """Tell a server that works from one that is dead or stuck.

    A long generation is well as long as it moves: each denoise step counts. Exit code 0 only if the server answers, its
    engine lives and its request moves. The server's key, if it has one, is read from H3_API_KEY_FILE, else from
    VLLM_API_KEY.

    \b
    vllm-h3 health
    vllm-h3 health --url http://127.0.0.1:8123 --stuck-after 600 --json
    """
    import httpx

    from vllm_h3_plugin.cli.console import emit_json, stdout
    from vllm_h3_plugin.serving.client import authorization, callers_key
    from vllm_h3_plugin.serving.health import check_health

    with httpx.Client(base_url=url, timeout=timeout, headers=authorization(callers_key())) as http:
        doing = check_health(http, stuck_after_s=stuck_after, now=time.time())
    stdout().print(doing, markup=False)
    if as_json:
        emit_json(True, doing=doing)
