# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes with a cable between them: a network namespace with its own shared memory stands for the other machine.

Needs root, for the namespace. Addresses are those kept for documentation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import assert_gone
from tests.server.conftest import BUSY, HANGS_S, READY_S, Running, Servers, request
from tests.server.ray_nodes import Node, RayNodes
from tests.server.test_cluster import ClusterJobs
from tests.server.test_ranks import MOST_PIXEL, MOST_SOUND, cut_between, differences
from vllm_h3_plugin.errors import ServerError

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.soak

NAME = f"h3t{os.getpid() % 100000}"
HERE, THERE = f"{NAME}a", f"{NAME}b"
OWN, OTHER = "198.51.100.1", "198.51.100.2"
ELSEWHERE = ("ip", "netns", "exec", NAME)
OWN_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


def ip(*words: str, there: bool = False) -> None:
    prefix = ELSEWHERE if there else ()
    subprocess.run([*prefix, "ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """A cluster whose second node is at the other end."""

    def __init__(self) -> None:
        self.nodes = RayNodes(OWN)
        self.nodes.start_head()

    def plug_in(self, **environment: str) -> Node:
        """Start the other node."""
        return self.nodes.add(OTHER, (*ELSEWHERE, *OWN_SHARED_MEMORY), **environment)


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for a network namespace")
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no network namespace can be made here: {exc.stderr}")
    try:
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAME)
        ip("address", "add", f"{OWN}/30", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("address", "add", f"{OTHER}/30", "dev", THERE, there=True)
        for link in ("lo", THERE):
            ip("link", "set", link, "up", there=True)
        made = Cable()
        yield made
        made.nodes.close()
    finally:
        # The namespace lasts as long as a process in it; the cable does not.
        subprocess.run(["ip", "link", "delete", HERE], check=False, capture_output=True)
        ip("netns", "delete", NAME)


def _variables(cable: Cable) -> dict[str, str]:
    return {"H3_CLUSTER_ADDRESS": cable.nodes.address, "H3_CLUSTER_INTERFACE": HERE}


def test_an_interface_from_which_there_is_no_way_is_named_with_it(
    own_servers: Servers, fl2va: Path, cable: Cable
) -> None:
    other = cable.plug_in(H3_CLUSTER_INTERFACE="lo")
    profile = own_servers.profile(fl2va, recipe="fp8", executor="ray", devices=2, roles=cut_between(2))
    server = own_servers.launch(profile, H3_CLUSTER_START_S="60", **_variables(cable))
    try:
        with pytest.raises(ServerError):
            server.wait_ready(READY_S)
    finally:
        other.stop()
    log = "\n".join(server._tail)
    assert "is not reached from" in log and ("127.0.0.1 (lo)" in log or f"{OWN} ({HERE})" in log)


def test_a_cable_carries_one_ranks_clip_and_its_loss_ends_what_waits(
    own_servers: Servers, fl2va: Path, fp8: Running, cable: Cable, tmp_path: Path
) -> None:
    cable.plug_in(H3_CLUSTER_INTERFACE=THERE, H3_CACHE_DIR=str(tmp_path / "cache"))
    profile = own_servers.profile(fl2va, recipe="fp8", executor="ray", devices=2, roles=cut_between(2))
    jobs = ClusterJobs(
        own_servers,
        profile,
        tmp_path / "storage",
        H3_CLUSTER_ON_LOSS="restart",
        **{**_variables(cable), "H3_CLUSTER_START_S": "120"},
    )
    try:
        one = fp8.make(request(seed=5), tmp_path / "one.mp4")
        jobs.client.make(request(seed=5), tmp_path / "two.mp4")
        pixels, sound = differences(one, tmp_path / "two.mp4")
        assert pixels <= MOST_PIXEL and sound <= MOST_SOUND
        job, ranks = jobs.running(BUSY), jobs.ranks
        ip("link", "set", THERE, "down", there=True)
        assert f"on node {OTHER}" in jobs.until_health(503, HANGS_S)
        assert f"on node {OTHER}" in str(jobs.until(job["id"], lambda job: job["status"] == "failed", HANGS_S)["error"])
        assert_gone([ranks[0]["pid"]])  # it does not wait for a rank that is not reached
    finally:
        jobs.stop()
