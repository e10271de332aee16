# SPDX-License-Identifier: Apache-2.0
"""Fetches a reference by URL without being led anywhere.

The connection goes to the very address that was checked, so that the name's answer cannot change in between; TLS still
verifies the name. Redirects are followed by hand, each checked like the first URL. Environment proxies are not used.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import urljoin

from vllm_h3_plugin.serving.references.addresses import (
    AllowedHost,
    Resolve,
    Target,
    resolve,
    system_lookup,
    target_of,
)
from vllm_h3_plugin.serving.references.unfit import Unfit

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 64 << 10
_HEADERS = {"User-Agent": "vllm-h3-plugin", "Accept": "image/*, video/*, audio/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Fetcher:
    """What may be fetched, and how.

    Attributes:
        allowed: hosts; without any, nothing is fetched.
        seconds: for one reference, redirects and name lookups included.
        lookup: the resolver.
        connect: (address, port, seconds) -> a connected socket.
        tls: context whose certificates are trusted; it must verify names.
    """

    allowed: tuple[AllowedHost, ...] = ()
    seconds: float = 30.0
    lookup: Resolve = system_lookup
    connect: Callable[[str, int, float], socket.socket] = field(
        default=lambda address, port, seconds: socket.create_connection((address, port), seconds)
    )
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def fetch(self, url: str, file: BinaryIO, most_bytes: int) -> int:
        """Write what a URL holds into a file.

        Args:
            url: ``https``, or ``http`` where the host's entry says so.
            file: opened for writing.
            most_bytes: no byte more is read.

        Returns:
            Bytes written.

        Raises:
            Unfit: not allowed, not there, too large or too slow.
        """
        if not self.allowed:
            raise Unfit("this server fetches no URLs", "a file or a data: URI")
        deadline = time.monotonic() + self.seconds
        for _ in range(MAX_REDIRECTS + 1):
            target = target_of(url, self.allowed)
            addresses = resolve(target, self.lookup, deadline - time.monotonic())
            with self._response(target, addresses, deadline) as answer:
                if answer.status not in _REDIRECTS:
                    return _body(answer, file, most_bytes, target)
                url = urljoin(url, answer.getheader("Location") or "")
        raise Unfit(f"it was redirected more than {MAX_REDIRECTS} times")

    @contextmanager
    def _response(
        self, target: Target, addresses: Sequence[str], deadline: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, of which nothing but the head has been read."""
        late = threading.Event()
        try:
            raw = self._connected(target, addresses, deadline)
            with raw, _cut_at(raw, deadline, late):
                link = _wrapped(raw, target, self.tls) if target.scheme == "https" else raw
                with link:
                    connection = http.client.HTTPConnection(target.host, target.port)
                    connection.sock = link
                    connection.request("GET", target.path, headers={"Host": target.netloc, **_HEADERS})
                    with connection.getresponse() as answer:
                        yield answer
                        if late.is_set():
                            raise TimeoutError
        except ssl.SSLCertVerificationError as exc:
            raise Unfit(f"the certificate of {target.host} is not valid: {exc.verify_message}") from exc
        except (OSError, http.client.HTTPException, ValueError) as exc:
            if late.is_set() or isinstance(exc, TimeoutError) or time.monotonic() >= deadline:
                raise Unfit(f"{target.host} did not send it within {self.seconds:g} s") from exc
            cut = isinstance(exc, http.client.IncompleteRead)
            raise Unfit(
                f"{target.host} did not send all of it" if cut else f"it could not be fetched from {target.host}"
            ) from exc

    def _connected(self, target: Target, addresses: Sequence[str], deadline: float) -> socket.socket:
        """A socket to the first address that answers."""
        failed: OSError = OSError("no address")
        for address in addresses:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            try:
                return self.connect(address, target.port, seconds)
            except OSError as exc:
                failed = exc
        raise failed


def _wrapped(raw: socket.socket, target: Target, tls: Callable[[], ssl.SSLContext]) -> socket.socket:
    return tls().wrap_socket(raw, server_hostname=target.host)


@contextmanager
def _cut_at(link: socket.socket, deadline: float, late: threading.Event) -> Iterator[None]:
    """Cut a connection at a time, whatever is being read: a socket's own timeout starts anew with every byte."""
    with socket.socket(fileno=os.dup(link.fileno())) as handle:

        def cut() -> None:
            late.set()
            try:
                handle.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed already

        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _body(answer: http.client.HTTPResponse, file: BinaryIO, most_bytes: int, target: Target) -> int:
    if answer.status != 200:
        raise Unfit(f"{target.host} answered with HTTP {answer.status}")
    if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise Unfit(f"{target.host} sent it compressed, which was not asked for")
    too_large = Unfit(f"it is larger than {most_bytes >> 20} MiB", f"up to {most_bytes >> 20} MiB")
    promised = answer.length
    if promised is not None and promised > most_bytes:
        raise too_large
    written = 0
    while chunk := answer.read(_CHUNK_BYTES):
        written += len(chunk)
        if written > most_bytes:
            raise too_large
        file.write(chunk)
    if promised is not None and written < promised:
        raise http.client.IncompleteRead(b"", promised - written)
    return written
