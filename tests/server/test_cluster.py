# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes on loopback addresses behind the real server: one rank's clip, and an end to everything that is lost.

Each node has its own cache folder; ranks talk over gloo. One server for all that does not end it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.processes import assert_gone
from tests.server import wire
from tests.server.conftest import BUSY, HANGS_S, PATIENCE, READY_S, Running, Servers, request
from tests.server.ray_nodes import HEAD, RayNodes
from tests.server.test_jobs import SOON, Jobs
from tests.server.test_ranks import MOST_PIXEL, MOST_SOUND, cut_between, differences, until
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.errors import ServerError
from vllm_h3_plugin.host.cluster.facts import checkpoint_digests
from vllm_h3_plugin.serving.client import VideoClient
from vllm_h3_plugin.serving.profile import Profile
from vllm_h3_plugin.serving.server import Server

pytest.importorskip("ray", reason="Ray is not installed")

OTHER = "127.0.0.30"
ODD = "127.0.0.3"
"""Of two that would do, the lower address is taken."""

ROOT = Path(__file__).parents[2]


class ClusterJobs(Jobs):
    """Jobs of a server whose ranks are on two nodes."""

    def __init__(self, servers: Servers, profile: Profile, storage: Path, **environment: str) -> None:
        # Imports of a machine that has much else to do.
        self._environment = {"H3_CLUSTER_START_S": str(READY_S), **environment}
        super().__init__(servers, profile, storage)

    def start(self) -> None:
        """Start it and wait."""
        self.server: Server = self._servers.launch(
            self._profile, VLLM_OMNI_SERVER_STORAGE__PATH=str(self._storage), **self._environment
        )
        self.server.wait_ready(READY_S)
        self.http = httpx.Client(base_url=self.server.command.url, timeout=120)
        self.client = VideoClient(self.server.command.url, limits=PATIENCE)

    @property
    def ranks(self) -> dict[int, dict]:
        """Rank -> what it told."""
        return {worker["rank"]: worker for worker in self.http.get("/v1/h3/info").json()["workers"]}

    def until_health(self, status: int, seconds: float) -> str:
        """Wait until ``/health`` answers so; gives the answer."""
        deadline = time.monotonic() + seconds
        while (answer := self.http.get("/health")).status_code != status:
            assert time.monotonic() < deadline, f"/health still answers {answer.status_code}: {answer.text}"
            time.sleep(0.05)
        return answer.text


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    cluster = RayNodes()
    try:
        cluster.counts = tmp_path_factory.mktemp("counts")  # type: ignore[attr-defined]
        # Its own folder wins over the server's, and must not be one that other tests have left a base in.
        own = {"H3_CACHE_DIR": str(tmp_path_factory.mktemp("head"))}
        cluster.start_head(**own, **wire.counting(cluster.counts))  # type: ignore[attr-defined]
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def profile_of(servers: Servers, fl2va: Path) -> Callable[..., Profile]:
    def make(**update: object) -> Profile:
        wanted = {"recipe": "fp8", "executor": "ray", "devices": 2, "roles": cut_between(2), **update}
        return servers.profile(fl2va, **wanted)

    return make


def refusal(servers: Servers, profile: Profile, nodes: RayNodes, **environment: str) -> tuple[str, str]:
    """Start a server that must not become ready; gives its last error and its log."""
    variables = {"H3_CLUSTER_ADDRESS": nodes.address, "H3_CLUSTER_START_S": str(READY_S), **environment}
    server = servers.launch(profile, **variables)
    begun = time.monotonic()
    with pytest.raises(ServerError) as refused:
        server.wait_ready(READY_S)
    assert time.monotonic() - begun < READY_S
    assert "ended with exit code" in refused.value.what
    return refused.value.why, "\n".join(server._tail)


def test_a_node_that_is_not_there_is_missed_by_number_and_the_others_are_named(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes
) -> None:
    _, log = refusal(own_servers, profile_of(), nodes, H3_CLUSTER_START_S="3")
    assert f"1 of 2 nodes are in the Ray cluster: there after 3 s: {HEAD} (1 CPU)" in log


def test_a_node_with_another_version_is_named_with_both(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "vllm_h3_plugin", tmp_path / "vllm_h3_plugin", symlinks=False)
    init = tmp_path / "vllm_h3_plugin" / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace('__version__ = "', '__version__ = "9.'))
    odd = nodes.add(ODD, PYTHONPATH=str(tmp_path))
    try:
        _, log = refusal(own_servers, profile_of(), nodes)
    finally:
        odd.stop()
    assert f"node {ODD} runs vllm-h3-plugin 9." in log and f"node {HEAD} runs vllm-h3-plugin 0." in log


@pytest.mark.soak
def test_a_byte_that_differs_on_one_node_is_found_with_its_part(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, fl2va: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(fl2va, tmp_path / "copy" / fl2va.name)
    shard = next(path for path in sorted((copy / "transformer").rglob("*.safetensors")))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    odd = nodes.add("127.0.0.29", H3_CLUSTER_CHECKPOINT=str(copy))
    try:
        _, log = refusal(own_servers, profile_of(), nodes)
    finally:
        odd.stop()
    assert f"the checkpoint on node 127.0.0.29 is not that of node {HEAD}" in log and "/transformer" in log


@pytest.mark.soak
def test_a_byte_that_no_sample_meets_is_found_once_it_is_loaded(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, fl2va: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(fl2va, tmp_path / "copy" / fl2va.name)
    shard = max((copy / "text_encoder").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    last = len(data) - 4096
    data[(last * 40 // 63 + last * 41 // 63) // 2 + 2048 | 1] ^= 0x80  # a sign, between two samples
    shard.write_bytes(data)
    assert checkpoint_digests(copy, None) == checkpoint_digests(fl2va, None), "a sample met it"
    odd = nodes.add("127.0.0.27", H3_CLUSTER_CHECKPOINT=str(copy), H3_CACHE_DIR=str(tmp_path / "cache"))
    try:
        _, log = refusal(own_servers, profile_of(), nodes)
    finally:
        odd.stop()
    assert f"the weights on node 127.0.0.27 are not those of node {HEAD}: text_encoder" in log


@pytest.mark.soak
def test_a_rank_that_stands_still_at_the_start_is_named(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes
) -> None:
    odd = nodes.add("127.0.0.26")
    server = own_servers.launch(profile_of(), H3_CLUSTER_ADDRESS=nodes.address, H3_CLUSTER_START_S="20")
    try:
        deadline = time.monotonic() + READY_S
        while not (ranks := [each for each in odd.processes if "Rank" in " ".join(each.cmdline())]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks[0].suspend()
        with pytest.raises(ServerError):
            server.wait_ready(READY_S)
    finally:
        odd.kill()
    log = "\n".join(server._tail)
    assert "rank 1 on node 127.0.0.26" in log and ("longer than 20 s" in log or "within 20 s" in log)


@pytest.mark.soak
def test_an_interface_that_is_not_there_is_named_with_those_that_are(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes
) -> None:
    odd = nodes.add("127.0.0.28", H3_CLUSTER_INTERFACE="nosuch0")
    try:
        _, log = refusal(own_servers, profile_of(), nodes)
    finally:
        odd.stop()
    assert "H3_CLUSTER_INTERFACE=nosuch0: this machine has no such interface" in log and "lo (127.0.0.1)" in log


@pytest.fixture(scope="module")
def cluster(
    servers: Servers,
    profile_of: Callable[..., Profile],
    nodes: RayNodes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ClusterJobs]:
    """Two nodes; ranks that are lost start again."""
    nodes.other = nodes.add(  # type: ignore[attr-defined]
        OTHER,
        H3_CACHE_DIR=str(tmp_path_factory.mktemp("other")),
        **wire.counting(nodes.counts),  # type: ignore[attr-defined]
    )
    jobs = ClusterJobs(
        servers,
        profile_of(),
        tmp_path_factory.mktemp("storage"),
        H3_CLUSTER_ADDRESS=nodes.address,
        H3_CLUSTER_ON_LOSS="restart",
    )
    yield jobs
    jobs.stop()


def test_each_rank_is_on_its_node_with_its_own_snapshot(cluster: ClusterJobs, nodes: RayNodes) -> None:
    ranks = cluster.ranks
    assert {rank: told["node"] for rank, told in ranks.items()} == {0: HEAD, 1: OTHER}
    for rank, node in enumerate((nodes._nodes[0], nodes.other)):  # type: ignore[attr-defined]
        assert ranks[rank]["pid"] in {process.pid for process in node.processes}
    # Nothing is shared: each has quantized its own copy.
    assert all(told["load"]["base"]["built_here"] for told in ranks.values())
    assert not any(told["step"]["compiled"] for told in ranks.values())


@pytest.mark.parametrize("first_frame", [False, True], ids=["t2va", "first-frame"])
def test_two_nodes_make_one_ranks_clip_within_the_tolerance(
    cluster: ClusterJobs, fp8: Running, pictures: tuple[Path, Path], tmp_path: Path, first_frame: bool
) -> None:
    asked = request(*(pictures[:1] if first_frame else ()), seed=5)
    one = fp8.make(asked, tmp_path / "one.mp4")
    cluster.client.make(asked, tmp_path / "two.mp4")
    pixels, sound = differences(one, tmp_path / "two.mp4")
    assert pixels <= MOST_PIXEL and sound <= MOST_SOUND


def test_a_step_sends_what_ulysses_needs(cluster: ClusterJobs, nodes: RayNodes, fl2va: Path, tmp_path: Path) -> None:
    pids = [told["pid"] for told in cluster.ranks.values()]
    before = [wire.counted(nodes.counts, pid) for pid in pids]  # type: ignore[attr-defined]
    cluster.client.make(request(steps=5), tmp_path / "clip.mp4")
    ledger = json.loads((Path(cluster.server.command.environment["H3_RUN_DIR"]) / "ledger.json").read_text())
    dit = take_inventory(fl2va).partitions[0].dit
    assert dit is not None
    needed = len(ledger["steps_s"]) * wire.needed(dit, ledger["tokens"], ranks=2)
    for pid, earlier in zip(pids, before, strict=True):
        sent = wire.counted(nodes.counts, pid) - earlier  # type: ignore[attr-defined]
        assert 0.95 * needed <= sent <= 1.05 * needed


def test_a_job_that_is_stopped_stops_on_both_nodes(cluster: ClusterJobs, tmp_path: Path) -> None:
    job = cluster.running(BUSY)
    assert cluster.http.delete(f"/v1/videos/{job['id']}").status_code == 200
    assert cluster.steps_at_the_end(job["id"]) <= job["step"] + SOON
    cluster.client.make(request(), tmp_path / "after.mp4")


def test_a_killed_rank_fails_its_request_by_name_and_the_ranks_start_again(
    cluster: ClusterJobs, tmp_path: Path
) -> None:
    cluster.client.make(request(), tmp_path / "before.mp4")
    job, ranks = cluster.running(BUSY), cluster.ranks
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    who = f"rank 1 on node {OTHER} (pid {ranks[1]['pid']})"
    assert who in cluster.until_health(503, HANGS_S)
    assert who in str(cluster.until(job["id"], lambda job: job["status"] == "failed", HANGS_S)["error"])
    # Else it would count as a step that does not end.
    until(lambda: cluster.http.get("/v1/h3/info").json()["progress"]["phase"] != "denoising")
    cluster.until_health(200, READY_S)
    after = cluster.ranks
    assert not {told["pid"] for told in ranks.values()} & {told["pid"] for told in after.values()}
    assert_gone(told["pid"] for told in ranks.values())
    cluster.client.make(request(), tmp_path / "after.mp4")
    assert (tmp_path / "after.mp4").read_bytes() == (tmp_path / "before.mp4").read_bytes()


def test_a_node_that_is_gone_fails_its_request_by_name_and_frees_the_other(
    cluster: ClusterJobs, nodes: RayNodes
) -> None:
    """Last of this server: its other node is gone afterwards."""
    job, ranks = cluster.running(BUSY), cluster.ranks
    nodes.other.kill()  # type: ignore[attr-defined]
    assert f"on node {OTHER}" in cluster.until_health(503, HANGS_S)
    assert f"on node {OTHER}" in str(cluster.until(job["id"], lambda job: job["status"] == "failed", HANGS_S)["error"])
    assert_gone([ranks[0]["pid"]])  # it does not wait for a rank that is gone


@pytest.mark.soak
def test_two_nodes_make_one_ranks_clip_from_references(
    own_servers: Servers,
    profile_of: Callable[..., Profile],
    nodes: RayNodes,
    ref2va: Path,
    pictures: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    asked = request(*pictures, seed=5)
    alone = own_servers.start(ref2va, recipe="fp8")
    one = alone.make(asked, tmp_path / "one.mp4")
    other = alone.make(request(*pictures, seed=6), tmp_path / "other.mp4")
    alone.server.stop(3)
    fourth = nodes.add("127.0.0.33")
    profile = profile_of().model_copy(update={"checkpoint": ref2va})
    jobs = ClusterJobs(own_servers, profile, tmp_path / "storage", H3_CLUSTER_ADDRESS=nodes.address)
    try:
        jobs.client.make(asked, tmp_path / "two.mp4")
    finally:
        jobs.stop()
        fourth.stop()
    pixels, sound = differences(one, tmp_path / "two.mp4")
    assert pixels <= MOST_PIXEL and sound <= MOST_SOUND
    # What tells clips apart at this tolerance is the seed. Another picture moves pixels by no more than ranks do.
    assert differences(other, tmp_path / "two.mp4")[0] > MOST_PIXEL


@pytest.mark.soak
def test_a_server_that_is_killed_leaves_no_rank(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, tmp_path: Path
) -> None:
    third = nodes.add("127.0.0.32")
    jobs = ClusterJobs(own_servers, profile_of(), tmp_path / "storage", H3_CLUSTER_ADDRESS=nodes.address)
    try:
        jobs.running(BUSY)
        pids = [told["pid"] for told in jobs.ranks.values()]
        os.kill(jobs.server.pid, signal.SIGKILL)
        assert_gone(pids)  # else a rank keeps its device
    finally:
        jobs.stop()
        third.stop()


@pytest.mark.soak
def test_a_node_that_stands_still_in_a_request_is_named_at_its_deadline(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, tmp_path: Path
) -> None:
    third = nodes.add("127.0.0.34")
    jobs = ClusterJobs(
        own_servers,
        profile_of(),
        tmp_path / "storage",
        H3_CLUSTER_ADDRESS=nodes.address,
        VLLM_OMNI_DLO_DP_WAVE_TIMEOUT="30",
    )
    try:
        job, still = jobs.running(BUSY), jobs.ranks[1]
        psutil.Process(still["pid"]).suspend()
        assert jobs.server.wait() == 7
        log = "\n".join(jobs.server._tail)
        assert f"rank 1 on node 127.0.0.34 (pid {still['pid']})" in log and "longer than 30 s" in log
        assert job["id"]
        assert_gone([still["pid"]])
    finally:
        jobs.stop()
        third.kill()


@pytest.mark.soak
def test_a_server_ends_for_its_supervisor_when_a_rank_is_lost(
    own_servers: Servers, profile_of: Callable[..., Profile], nodes: RayNodes, tmp_path: Path
) -> None:
    third = nodes.add("127.0.0.31")
    jobs = ClusterJobs(own_servers, profile_of(), tmp_path / "storage", H3_CLUSTER_ADDRESS=nodes.address)
    try:
        job, lost = jobs.running(BUSY), jobs.ranks[1]
        os.kill(lost["pid"], signal.SIGKILL)
        assert jobs.server.wait() == 7
        assert f"rank 1 on node 127.0.0.31 (pid {lost['pid']}) ended" in "\n".join(jobs.server._tail)
        assert job["id"]
    finally:
        jobs.stop()
        third.stop()
