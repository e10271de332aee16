# SPDX-License-Identifier: Apache-2.0
"""A server process's life, on small programs that stand in for a server that dies, stalls, lies or leaves children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from vllm_h3_plugin import __version__
from vllm_h3_plugin.errors import HostError, ServerError
from vllm_h3_plugin.serving.command import ServerCommand
from vllm_h3_plugin.serving.server import PIPELINE, Server, check_port_free, free_port


def _server(tmp_path: Path, program: str, port: int | None = None) -> Server:
    port = port or free_port()
    argv = (sys.executable, "-c", textwrap.dedent(program), str(port))
    return Server(ServerCommand(argv, {}, f"http://127.0.0.1:{port}"), log=tmp_path / "log")


# A web server whose two answers are put in by the tests.
_WEB = """
import sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'INFO'
        code = 200 if self.path == '/health' else CODE
        self.send_response(code); self.send_header('content-type', 'application/json'); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""


def _web(info: str, code: int = 200) -> str:
    return _WEB.replace("INFO", info).replace("CODE", str(code))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_occupied_port_is_named_before_anything_starts() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}") as caught:
            check_port_free("127.0.0.1", port)
    assert "--port" in caught.value.fix
    check_port_free("127.0.0.1", port)


def test_death_before_ready_carries_the_plugins_own_error(tmp_path: Path) -> None:
    program = """
    print("ValueError: something of the host")
    print("\\x1b[0;36m(Worker)\\x1b[0;0m vllm_h3_plugin.errors.CheckpointError: shard x ends early. Copy it again.")
    print("RuntimeError: Orchestrator initialization failed")
    raise SystemExit(3)
    """
    with _server(tmp_path, program) as server, pytest.raises(ServerError) as caught:
        server.wait_ready(30)
    assert "exit code 3" in caught.value.what
    assert caught.value.why == "shard x ends early. Copy it again."


def test_death_by_signal_names_the_signal(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with _server(tmp_path, program) as server, pytest.raises(ServerError, match="SIGKILL"):
        server.wait_ready(30)


def test_a_server_that_never_answers_times_out_with_its_last_words(tmp_path: Path) -> None:
    program = "import time; print('reading shard 3', flush=True); time.sleep(60)"
    with _server(tmp_path, program) as server, pytest.raises(ServerError) as caught:
        server.wait_ready(1.5)
    assert "not ready after" in caught.value.what and "reading shard 3" in caught.value.why


def test_a_server_without_the_plugin_is_refused(tmp_path: Path) -> None:
    with _server(tmp_path, _web("{}", 404)) as server, pytest.raises(HostError, match="not active"):
        server.wait_ready(30)


@pytest.mark.parametrize(
    "info",
    [
        '{"plugin": "0.0.0", "workers": [{"pipeline": "' + PIPELINE + '"}]}',
        '{"plugin": "' + __version__ + '", "workers": []}',
        '{"plugin": "' + __version__ + '", "workers": [{"pipeline": "vllm_omni.MiniMaxH3Pipeline"}]}',
    ],
    ids=["other-version", "no-worker", "stock-pipeline"],
)
def test_a_server_with_another_plugin_or_pipeline_is_refused(tmp_path: Path, info: str) -> None:
    with _server(tmp_path, _web(info)) as server, pytest.raises(HostError, match="without this plugin"):
        server.wait_ready(30)


def test_a_proved_server_is_ready_and_gone_after_the_block(tmp_path: Path) -> None:
    info = '{"plugin": "' + __version__ + '", "workers": [{"pipeline": "' + PIPELINE + '"}]}'
    with _server(tmp_path, _web(info)) as server:
        assert server.wait_ready(30)["plugin"] == __version__
        pid = server.pid
    assert _gone(pid)


def test_stop_takes_the_children_along_even_if_they_ignore_sigterm(tmp_path: Path) -> None:
    program = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
    """
    server = _server(tmp_path, program)
    with server:
        deadline = time.monotonic() + 180
        while "up" not in (log := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(log.split("child ")[1].split()[0])
        server.stop(grace_s=1)
    deadline = time.monotonic() + 180
    while not _gone(child):
        assert time.monotonic() < deadline, "the child outlived its server"
        time.sleep(0.05)


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Kill the starter outright: no clean-up code of it runs."""
    starter = f"""
import sys, time
from pathlib import Path
from vllm_h3_plugin.serving.command import ServerCommand
from vllm_h3_plugin.serving.server import Server
server = Server(ServerCommand((sys.executable, "-c", "import time; time.sleep(600)"), {{}}, "http://127.0.0.1:1"),
                log=Path({str(tmp_path / "log")!r}))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 180
    while not _gone(child):
        assert time.monotonic() < deadline, "the server outlived its starter"
        time.sleep(0.05)
