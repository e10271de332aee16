# SPDX-License-Identifier: Apache-2.0
"""A real nginx with ``launch/nginx-replicas.conf`` before two servers of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import own_port
from tools.environment import ROOT

CONF = ROOT / "launch" / "nginx-replicas.conf"
_START_S = 120


@contextmanager
def balancer(folder: Path, a: int, b: int) -> Iterator[str]:
    """Its address, for as long as the block runs.

    Args:
        folder: for its files; no space may be in its path.
        a, b: ports of the two servers.
    """
    port = own_port()
    text = CONF.read_text(encoding="utf-8")
    for old, new in (("127.0.0.1:8001", a), ("127.0.0.1:8002", b), ("listen 127.0.0.1:8080", port)):
        assert old in text
        text = text.replace(old, f"{old.rpartition(':')[0]}:{new}")
    (folder / "replicas.conf").write_text(text, encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"user root;\nworker_processes 1;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/replicas.conf;\n}}\n",
        encoding="utf-8",
    )
    program = shutil.which("nginx")
    assert program is not None
    words = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen([*words, "-g", "daemon off;"])
    try:
        until = time.monotonic() + _START_S
        while True:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < until, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
