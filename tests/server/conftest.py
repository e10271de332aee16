# SPDX-License-Identifier: Apache-2.0
"""Real servers on the CPU reference platform, shared where a test does not need one of its own.

None lives longer than it is of use: a server that waits for requests looks for them a thousand times a second, which
takes a quarter of a core from whatever runs beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.conftest import ENVIRONMENT
from tests.ports import own_port
from tests.server.forked import ForkedServer, start_import
from tests.unit.serving import reference_kit
from vllm_h3_plugin.checkpoint.inventory import take_inventory
from vllm_h3_plugin.checkpoint.synthetic.adapters import AdapterSpec, write_adapter
from vllm_h3_plugin.checkpoint.synthetic.spec import SynthSpec
from vllm_h3_plugin.checkpoint.synthetic.writer import write_checkpoint
from vllm_h3_plugin.serving.client import VideoClient, VideoRequest
from vllm_h3_plugin.serving.command import ServerCommand, server_command
from vllm_h3_plugin.serving.limits import Limits
from vllm_h3_plugin.serving.profile import Profile, load_profile
from vllm_h3_plugin.serving.server import Server

FOLDER = Path(__file__).parent
PREPARED_STEPS = 11
READY_S = 420
"""Generous: a machine that starts two servers and lints at once needs minutes to import vLLM."""
HANGS_S = 180
"""Only what never comes takes this long; a machine that has much else to do must not be taken for one that hangs."""
PATIENCE = Limits(total_s=2 * HANGS_S, stall_s=120)
"""Of a test's client, so that a clip that never comes is named with what its job was last seen at."""
MOST_STEPS = 199
"""Denoise steps that both hosts make; 0.30 makes 200."""


@dataclass
class Running:
    """A server that is ready."""

    server: Server
    client: VideoClient
    url: str
    info: dict
    log_path: Path
    cache: Path

    @property
    def log(self) -> str:
        """What it has printed."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def make(self, request: VideoRequest, path: Path) -> Path:
        """Make one clip; the file is new."""
        self.client.make(request, path)
        return path


class Servers:
    """Starts servers and stops them when its stack is closed; several start side by side.

    Each has a cache folder of its own unless one is named: a snapshot that another test left would decide what it does.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._count = 0
        self._logs: dict[Server, Path] = {}

    def profile(self, checkpoint: Path, **update: object) -> Profile:
        """The reference profile on a port of its own."""
        return load_profile("reference").model_copy(update={"checkpoint": checkpoint, "port": own_port(), **update})

    def launch(self, profile: Profile, *, stock: bool = False, cache: Path | None = None, **environment: str) -> Server:
        """Start a server and do not wait.

        Args:
            stock: the host's own classes on the same platform.
            cache: its ``H3_CACHE_DIR``.
            environment: further variables.
        """
        self._count += 1
        run_dir = self._folder / f"run{self._count}"
        run_dir.mkdir()
        assert profile.checkpoint is not None
        command = server_command(profile, profile.checkpoint, run_dir=run_dir, environ=os.environ)
        variables = {
            "H3_CACHE_DIR": str(cache or self._folder / f"cache{self._count}"),
            "VLLM_OMNI_SERVER_STORAGE__PATH": str(self._folder / f"storage{self._count}"),
            **environment,
        }
        command = replace(command, environment={**command.environment, **variables})
        log = self._folder / f"server{self._count}.log"
        server = ForkedServer(stock_command(command) if stock else command, log=log)
        self._logs[server] = log
        # The host's `mp` server needs 20 s to end by itself; nothing here waits for its last words.
        self._stack.callback(server.stop, 3)
        server.start()
        return server

    def ready(self, server: Server, *, stock: bool = False) -> Running:
        """Wait for a launched server."""
        info = wait_stock(server) if stock else server.wait_ready(READY_S)
        client = self._stack.enter_context(VideoClient(server.command.url, limits=PATIENCE))
        cache = Path(server.command.environment["H3_CACHE_DIR"])
        return Running(server, client, server.command.url, info, self._logs[server], cache)

    def start(self, checkpoint: Path, *, stock: bool = False, cache: Path | None = None, **update: object) -> Running:
        """Launch and wait."""
        return self.ready(self.launch(self.profile(checkpoint, **update), stock=stock, cache=cache), stock=stock)


def stock_command(command: ServerCommand) -> ServerCommand:
    """The same command without this plugin's launcher and classes: only its platform is named in VLLM_PLUGINS."""
    argv = tuple(
        "vllm_omni.entrypoints.cli.main" if word == "vllm_h3_plugin.host.launch" else word for word in command.argv
    )
    plugins = "h3_reference,vllm_omni_register_models"
    return ServerCommand(argv, {**command.environment, "VLLM_PLUGINS": plugins}, command.url)


def wait_stock(server: Server) -> dict:
    """Wait for a server that has no /v1/h3/info; its absence is the proof that it is the stock host."""
    from vllm_h3_plugin.errors import HostError

    with pytest.raises(HostError, match="not active"):
        server.wait_ready(READY_S)
    return {}


@pytest.fixture(scope="package", autouse=True)
def _environment(pytestconfig: pytest.Config) -> Iterator[None]:
    """Servers start in the environment of a fresh run, whatever earlier tests have left in this process."""
    earlier = dict(os.environ)
    _set_environment(pytestconfig.stash[ENVIRONMENT])
    start_import()
    yield
    _set_environment(earlier)


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Let these be all variables, but for the ones that pytest keeps for itself."""
    for name in set(os.environ) - set(wanted):
        if not name.startswith("PYTEST_"):
            del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if not name.startswith("PYTEST_")})


@pytest.fixture(scope="package", autouse=True)
def _own_cache(_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests run as a person would keep their files here, and not in the person's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts servers that several tests use; all are gone when the module is done."""
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("servers"), stack)


@pytest.fixture
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts servers of one test; all are gone when it is done."""
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("servers"), stack)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share :func:`fp8` run one after another and last, so that it lives while they do and no longer."""
    here = [position for position, item in enumerate(items) if item.path.parent == FOLDER]
    shared = {items[position].path for position in here if "fp8" in getattr(items[position], "fixturenames", ())}
    ordered = sorted((items[position] for position in here), key=lambda item: item.path in shared)
    for position, item in zip(here, ordered, strict=True):
        items[position] = item


@pytest.fixture(scope="package")
def fp8(tmp_path_factory: pytest.TempPathFactory, fl2va: Path) -> Iterator[Running]:
    """The default path, FP8 in one process: one server for every module that only asks it for clips."""
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("fp8"), stack).start(fl2va, recipe="fp8")


@pytest.fixture(scope="package")
def fp8_again(tmp_path_factory: pytest.TempPathFactory, fl2va: Path, fp8: Running) -> Iterator[Running]:
    """A second server of the same recipe and checkpoint on what :func:`fp8` left in its cache folder.

    ``fp8`` has made a clip of three steps before this one starts, which prepares one of ``PREPARED_STEPS`` as well.
    """
    folder = tmp_path_factory.mktemp("fp8-again")
    fp8.make(request(), folder / "first.mp4")
    with ExitStack() as stack:
        servers = Servers(folder, stack)
        profile = servers.profile(fl2va, recipe="fp8")
        yield servers.ready(servers.launch(profile, cache=fp8.cache, H3_PREPARE_STEPS=str(PREPARED_STEPS)))


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Partition folder of a synthetic checkpoint, one for each set of options."""
    made: dict[tuple, Path] = {}

    def make(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            root = tmp_path_factory.mktemp("checkpoint")
            made[key] = write_checkpoint(root, SynthSpec(**options)).partitions[0]  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def fl2va(checkpoint_of: Callable[..., Path]) -> Path:
    """A tiny FL2VA partition."""
    return checkpoint_of(partition="fl2va")


@pytest.fixture(scope="session")
def ref2va(checkpoint_of: Callable[..., Path]) -> Path:
    """A tiny Ref2VA partition."""
    return checkpoint_of(partition="ref2va")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, fl2va: Path) -> Callable[..., Path]:
    """An adapter for the tiny checkpoint, one for each set of options."""
    dit = take_inventory(fl2va).partitions[0].dit
    assert dit is not None
    made: dict[tuple, Path] = {}

    def make(kind: str, **options: object) -> Path:
        key = (kind, *sorted(options.items()))
        if key not in made:
            spec = AdapterSpec(kind, dit, **options)  # type: ignore[arg-type]
            made[key] = write_adapter(tmp_path_factory.mktemp(kind), spec)
        return made[key]

    return make


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two different 256x256 reference images."""
    folder = tmp_path_factory.mktemp("pictures")
    ramp = np.linspace(0, 255, 256, dtype=np.uint8)
    first = np.stack(
        [np.tile(ramp, (256, 1)), np.tile(ramp[:, None], (1, 256)), np.full((256, 256), 128, np.uint8)], -1
    )
    paths = (folder / "first.png", folder / "last.png")
    Image.fromarray(first).save(paths[0])
    Image.fromarray(255 - first[::-1]).save(paths[1])
    return paths


@pytest.fixture(scope="session")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 s of film with sound, as a reference."""
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    reference_kit.film(path, seconds=3)
    return path


@pytest.fixture(scope="session")
def tone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """3 s of sound, as a reference."""
    return reference_kit.sound(tmp_path_factory.mktemp("tone") / "tone.wav", seconds=3)


def request(*references: Path, seed: int = 1, frames: int = 96, steps: int = 3, size: int = 64) -> VideoRequest:
    """A small request. References are fitted to the size, and 0.28 takes none below 256 pixels a side."""
    side = max(size, 256) if references else size
    return VideoRequest("a red kite over a harbour", side, side, frames, steps, seed, references)


BUSY = request(steps=MOST_STEPS, seed=5, size=256)
"""For tests that look at a job while it runs and then end it: minutes here, and many seconds on a fast machine."""


@contextmanager
def caller_who_leaves(url: str, asked: VideoRequest, **headers: str) -> Iterator[None]:
    """Somebody asks for the clip itself, does not read the answer, and is gone when the block ends."""
    address = httpx.URL(url)
    connection = HTTPConnection(address.host, address.port, timeout=HANGS_S)
    try:
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/v1/videos/sync", urlencode(asked.form()), {**kind, **headers})
        yield
    finally:
        connection.close()
