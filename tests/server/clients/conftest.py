# SPDX-License-Identifier: Apache-2.0
"""One server with a key for everything that people talk to it with: the page, OpenAI's package, curl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import READY_S, Servers
from vllm_h3_plugin.serving.client import authorization

KEY = "open-sesame"


@dataclass(frozen=True)
class Keyed:
    """A server that wants :data:`KEY`.

    Attributes:
        http: has the key.
    """

    url: str
    http: httpx.Client

    def forget(self) -> None:
        """Delete every job, so that the next test finds none."""
        for job in self.http.get("/v1/videos").json()["data"]:
            assert self.http.delete(f"/v1/videos/{job['id']}").status_code == 200


@pytest.fixture(scope="package")
def _keyed(tmp_path_factory: pytest.TempPathFactory, fl2va: Path) -> Iterator[Keyed]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("keyed"), stack)
        server = servers.launch(servers.profile(fl2va, recipe="fp8"), VLLM_API_KEY=KEY)
        server.command = replace(server.command, api_key=KEY)
        server.wait_ready(READY_S)
        http = httpx.Client(base_url=server.command.url, headers=authorization(KEY), timeout=120)
        yield Keyed(server.command.url, stack.enter_context(http))


@pytest.fixture
def keyed(_keyed: Keyed) -> Iterator[Keyed]:
    """The server; a test leaves no job to the next."""
    yield _keyed
    _keyed.forget()
