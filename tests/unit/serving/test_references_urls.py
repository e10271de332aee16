# SPDX-License-Identifier: Apache-2.0
"""References by URL: where they may come from, and that nobody is led anywhere else.

A real server stands on the loopback interface, with TLS; names and addresses are made up by the resolver of the test,
and the connection to the address that was decided on goes to that server.
"""

from __future__ import annotations

import datetime
import http.server
import io
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.serving.reference_kit import encoded, picture, refused, taken
from vllm_h3_plugin.errors import SettingsError
from vllm_h3_plugin.serving.references.addresses import AllowedHost, not_public, system_lookup
from vllm_h3_plugin.serving.references.fetch import Fetcher
from vllm_h3_plugin.serving.references.limits import ReferenceLimits
from vllm_h3_plugin.serving.references.load import ReferencePolicy
from vllm_h3_plugin.serving.references.unfit import Unfit
from vllm_h3_plugin.settings import Settings

PUBLIC, OTHER_PUBLIC = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
INNER = str(ipaddress.ip_address(0x0A000001))
"""Ten and three more bytes: of a company's network."""
PICTURE = encoded(picture())
NAMES = ("cdn.example.com", "media.example.org")


@dataclass
class Site:
    """The server behind every address, and what was asked of it."""

    port: int
    ca: bytes
    paths: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    connections: list[tuple[str, int]] = field(default_factory=list)
    lookups: list[str] = field(default_factory=list)

    def fetcher(
        self, *allowed: str, names: dict[str, Any] | None = None, seconds: float = 5, **options: Any
    ) -> Fetcher:
        """One that finds this server at every public address."""
        known = {name: [PUBLIC] for name in NAMES} if names is None else names

        def lookup(host: str, port: int) -> list[str]:
            self.lookups.append(host)
            answer = known.get(host)
            if answer is None:
                raise OSError("no such name")
            return answer(len(self.lookups)) if callable(answer) else answer

        def connect(address: str, port: int, left: float) -> socket.socket:
            self.connections.append((address, port))
            return socket.create_connection(("127.0.0.1", self.port), left)

        options = {"lookup": lookup, "connect": connect, "tls": self.tls, **options}
        return Fetcher(tuple(AllowedHost.parse(entry) for entry in allowed or NAMES), seconds, **options)

    def tls(self) -> ssl.SSLContext:
        """Trusts the server's authority and no other."""
        return ssl.create_default_context(cadata=self.ca.decode())


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        self.site.paths.append(self.path)
        self.site.hosts.append(self.headers["Host"])
        path, _, query = self.path.partition("?")
        getattr(self, f"_{path[1:] or 'picture'}")(query)

    def _picture(self, query: str) -> None:
        self._send(PICTURE)

    def _to(self, query: str) -> None:
        self._send(b"", 302, Location=query)

    def _hops(self, query: str) -> None:
        self._send(b"", 307, Location=f"/hops?{int(query) - 1}" if int(query) > 1 else "picture")

    def _missing(self, query: str) -> None:
        self._send(b"<h1>not here</h1>", 404)

    def _large(self, query: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()

    def _endless(self, query: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    def _drip(self, query: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(1000):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def _slowhead(self, query: str) -> None:
        for _ in range(200):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n"[:1] if _ == 0 else b"T")
            self.wfile.flush()
            time.sleep(0.05)

    def _short(self, query: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PICTURE)))
        self.end_headers()
        self.wfile.write(PICTURE[:100])
        self.close_connection = True

    def _gzip(self, query: str) -> None:
        self._send(PICTURE, 200, **{"Content-Encoding": "gzip"})

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what these tests are about."""


def _certificate(folder: Path) -> tuple[bytes, Path]:
    """(the authority's certificate, file of key and certificate for the server's names)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "server.pem"
    path.write_bytes(private + pem)
    return pem, path


def _serve(make: Callable[[socket.socket], socket.socket], ca: bytes) -> Iterator[Site]:
    server = _Server(("127.0.0.1", 0), _Handler)
    site = Site(server.server_address[1], ca)
    server.RequestHandlerClass = type("Handler", (_Handler,), {"site": site})
    server.socket = make(server.socket)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def _tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ssl.SSLContext]:
    ca, path = _certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return ca, context


@pytest.fixture
def site(_tls: tuple[bytes, ssl.SSLContext]) -> Iterator[Site]:
    ca, context = _tls

    def wrap(listening: socket.socket) -> socket.socket:
        # The handshake belongs to the connection's own thread: a client that stalls must not stall the server.
        return context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)

    yield from _serve(wrap, ca)


@pytest.fixture
def plain_site() -> Iterator[Site]:
    yield from _serve(lambda listening: listening, b"")


def _fetch(fetcher: Fetcher, url: str, most: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    assert fetcher.fetch(url, file, most) == len(file.getvalue())
    return file.getvalue()


def _refused(fetcher: Fetcher, url: str, most: int = 1 << 20) -> Unfit:
    with pytest.raises(Unfit) as caught:
        fetcher.fetch(url, io.BytesIO(), most)
    return caught.value


def test_no_url_is_fetched_unless_hosts_are_allowed(tmp_path: Path) -> None:
    fault = refused("https://cdn.example.com/first.png?token=secret", tmp_path)
    assert fault.why == "this server fetches no URLs" and fault.allowed == "a file or a data: URI"
    assert "secret" not in str(fault)


def test_a_picture_from_an_allowed_host_is_taken(site: Site, tmp_path: Path) -> None:
    policy = ReferencePolicy(fetcher=site.fetcher("cdn.example.com"), folder=tmp_path)
    found = taken("https://cdn.example.com/picture?token=1", tmp_path, policy=policy)
    assert found.image is not None and np.array_equal(np.asarray(found.image), np.asarray(picture()))
    assert (site.paths, site.hosts) == (["/picture?token=1"], ["cdn.example.com"])
    assert site.connections == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    ("entry", "url", "admitted"),
    [
        ("cdn.example.com", "https://CDN.Example.com./a", True),
        ("cdn.example.com", "https://cdn.example.com:8443/a", False),
        ("cdn.example.com:8443", "https://cdn.example.com:8443/a", True),
        ("cdn.example.com", "http://cdn.example.com/a", False),
        ("http://cdn.example.com", "http://cdn.example.com/a", True),
        ("http://cdn.example.com", "https://cdn.example.com/a", False),
        ("cdn.example.com", "https://cdn.example.com.evil.test/a", False),
        ("cdn.example.com", "https://evil.test/cdn.example.com", False),
        ("cdn.example.com", "https://evil.test#cdn.example.com", False),
        ("cdn.example.com", "https://evil.test\\@cdn.example.com/a", False),
        ("*.example.com", "https://a.b.example.com/a", True),
        ("*.example.com", "https://example.com/a", False),
        ("*.example.com", "https://evilexample.com/a", False),
        ("bücher.example", "https://xn--bcher-kva.example/a", True),
        ("*", "https://anything.test/a", True),
        ("*", "http://anything.test/a", False),
        ("*", "ftp://anything.test/a", False),
        ("*", "file:///etc/passwd", False),
        ("*", "gopher://anything.test/a", False),
    ],
)
def test_the_list_of_hosts_decides(entry: str, url: str, admitted: bool, site: Site) -> None:
    fault = _refused(site.fetcher(entry, names={}), url)
    assert ("has no address" in fault.why) is admitted
    assert bool(site.lookups) is admitted, "a name was looked up before it was allowed"


def test_a_url_with_a_password_is_refused_and_not_repeated(site: Site) -> None:
    assert "password" in _refused(site.fetcher(), "https://user:secret@cdn.example.com/a").why


@pytest.mark.parametrize("url", ["https://", "https:///a", "https://[::1/a", "https://cdn.example.com:99999/a", "cdn"])
def test_what_is_no_url_is_refused(url: str, site: Site) -> None:
    assert _refused(site.fetcher("*"), url).why
    assert not site.lookups


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        INNER,
        "172.16.5.4",
        str(ipaddress.ip_address(0xC0A80101)),  # of a home's network
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
    ],
)
def test_addresses_that_are_not_public_are_never_connected_to(address: str, site: Site) -> None:
    fault = _refused(site.fetcher("cdn.example.com", names={"cdn.example.com": [address]}), "https://cdn.example.com/")
    assert "does not connect" in fault.why
    assert address not in fault.why, "the answer tells somebody what the name leads to inside"
    assert not site.connections


def test_public_addresses_are_public() -> None:
    assert not_public(PUBLIC) == not_public(OTHER_PUBLIC) == not_public("::ffff:93.184.216.34") == ""


def test_one_inner_address_among_public_ones_is_enough_to_refuse(site: Site) -> None:
    names = {"cdn.example.com": [PUBLIC, INNER]}
    assert "private" in _refused(site.fetcher(names=names), "https://cdn.example.com/").why
    assert not site.connections


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "[::ffff:127.0.0.1]", "localhost"]
)
def test_an_address_in_the_url_is_checked_like_any_other(host: str, site: Site) -> None:
    fault = _refused(site.fetcher("*", lookup=system_lookup), f"https://{host}/")
    assert "does not connect" in fault.why or "no address" in fault.why or "no valid URL" in fault.why
    assert not site.connections


def test_the_connection_goes_to_the_address_that_was_checked(site: Site) -> None:
    """A name that answers otherwise the second time is not asked a second time."""
    names = {"cdn.example.com": lambda times: [PUBLIC] if times == 1 else ["127.0.0.1"]}
    assert _fetch(site.fetcher(names=names), "https://cdn.example.com/picture") == PICTURE
    assert (site.lookups, site.connections) == (["cdn.example.com"], [(PUBLIC, 443)])


def test_the_next_address_is_tried_where_the_first_does_not_answer(site: Site) -> None:
    names = {"cdn.example.com": [OTHER_PUBLIC, PUBLIC]}
    fetcher = site.fetcher(names=names)
    reach = fetcher.connect

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        if address == OTHER_PUBLIC:
            raise OSError("network is unreachable")
        return reach(address, port, seconds)

    fetcher = site.fetcher(names=names, connect=connect)
    assert _fetch(fetcher, "https://cdn.example.com/picture") == PICTURE


def test_redirects_are_followed_three_times(site: Site) -> None:
    assert _fetch(site.fetcher(), "https://cdn.example.com/hops?3") == PICTURE
    assert "redirected more than 3 times" in _refused(site.fetcher(), "https://cdn.example.com/hops?4").why


def test_a_redirect_to_another_allowed_host_is_followed(site: Site) -> None:
    assert _fetch(site.fetcher(), "https://cdn.example.com/to?https://media.example.org/picture") == PICTURE
    assert site.hosts == ["cdn.example.com", "media.example.org"]


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("https://evil.test/", "does not fetch from https://evil.test"),
        ("http://cdn.example.com/picture", "does not fetch from http://cdn.example.com"),
        ("https://inside.example.net/", "does not connect"),
        ("//169.254.169.254/latest/meta-data", "does not fetch from https://169.254.169.254"),
        ("file:///etc/passwd", "no https URL"),
        ("https://[", "could not be fetched"),
    ],
)
def test_a_redirect_is_checked_like_the_first_url(location: str, said: str, site: Site) -> None:
    names = {"cdn.example.com": [PUBLIC], "inside.example.net": [INNER]}
    fetcher = site.fetcher("cdn.example.com", "inside.example.net", names=names)
    assert said in _refused(fetcher, f"https://cdn.example.com/to?{location}").why
    assert len(site.connections) == 1


def test_a_redirect_that_resolves_to_an_inner_address_later_is_refused(site: Site) -> None:
    """The same name, public for the first request and inner for the one it redirects to."""
    names = {"cdn.example.com": lambda times: [PUBLIC] if times == 1 else ["127.0.0.1"]}
    fault = _refused(site.fetcher(names=names), "https://cdn.example.com/to?/picture")
    assert "loopback" in fault.why and len(site.connections) == 1


def test_the_certificate_must_be_of_that_name(site: Site) -> None:
    fetcher = site.fetcher("other.example.com", names={"other.example.com": [PUBLIC]})
    assert "certificate of other.example.com is not valid" in _refused(fetcher, "https://other.example.com/").why
    assert not site.paths


def test_the_certificate_must_be_of_a_trusted_authority(site: Site) -> None:
    fetcher = site.fetcher(tls=ssl.create_default_context)
    assert "certificate of cdn.example.com is not valid" in _refused(fetcher, "https://cdn.example.com/").why


def test_a_host_without_tls_can_be_allowed(plain_site: Site) -> None:
    assert _fetch(plain_site.fetcher("http://cdn.example.com"), "http://cdn.example.com/picture") == PICTURE
    assert plain_site.connections == [(PUBLIC, 80)]


def test_more_than_the_limit_is_refused_before_it_is_read(site: Site) -> None:
    assert _refused(site.fetcher(), "https://cdn.example.com/large").why == "it is larger than 1 MiB"


def test_an_endless_body_is_cut_at_the_limit(site: Site) -> None:
    file = io.BytesIO()
    with pytest.raises(Unfit, match="larger than 1 MiB"):
        site.fetcher().fetch("https://cdn.example.com/endless", file, 1 << 20)
    assert len(file.getvalue()) <= 1 << 20


@pytest.mark.parametrize("path", ["drip", "slowhead"])
def test_a_server_that_sends_a_byte_now_and_then_is_cut_at_the_deadline(path: str, site: Site) -> None:
    started = time.monotonic()
    assert "within 0.4 s" in _refused(site.fetcher(seconds=0.4), f"https://cdn.example.com/{path}").why
    assert time.monotonic() - started < 2


def test_a_server_that_never_answers_the_handshake_is_cut_at_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        site = Site(silent.getsockname()[1], b"")
        started = time.monotonic()
        fetcher = site.fetcher(seconds=0.4, tls=ssl.create_default_context)
        assert "within 0.4 s" in _refused(fetcher, "https://cdn.example.com/").why
        assert time.monotonic() - started < 2


def test_a_resolver_that_hangs_is_not_waited_for(site: Site) -> None:
    def hang(host: str, port: int) -> list[str]:
        time.sleep(1.5)
        return [PUBLIC]

    started = time.monotonic()
    assert "not resolved in time" in _refused(site.fetcher(seconds=0.3, lookup=hang), "https://cdn.example.com/").why
    assert time.monotonic() - started < 1.2


@pytest.mark.parametrize(
    ("path", "said"),
    [("missing", "answered with HTTP 404"), ("short", "did not send all of it"), ("gzip", "compressed")],
)
def test_answers_that_are_no_file_are_refused(path: str, said: str, site: Site) -> None:
    assert said in _refused(site.fetcher(), f"https://cdn.example.com/{path}").why


def test_a_name_that_does_not_exist_is_named(site: Site) -> None:
    assert _refused(site.fetcher(names={}), "https://cdn.example.com/").why == "the name cdn.example.com has no address"


def test_proxies_of_the_environment_are_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert _fetch(site.fetcher(), "https://cdn.example.com/picture") == PICTURE


@pytest.mark.parametrize(
    "entry", ["https://", "cdn.example.com/path", "a b", "ftp://x.test", "x.test:0", "*.*.x", "*."]
)
def test_an_entry_that_is_no_host_stops_the_server_at_its_start(entry: str) -> None:
    with pytest.raises(SettingsError, match="H3_REFERENCE_HOSTS") as caught:
        ReferencePolicy.of(Settings(reference_hosts=(entry,)))
    assert "cdn.example.com" in caught.value.fix


def test_hosts_come_from_the_settings() -> None:
    settings = Settings.model_validate({"reference_hosts": "cdn.example.com, *.example.org", "reference_timeout_s": 7})
    fetcher = ReferencePolicy.of(settings).fetcher
    assert [entry.host for entry in fetcher.allowed] == ["cdn.example.com", "*.example.org"] and fetcher.seconds == 7


def test_a_data_uri_needs_no_host(tmp_path: Path) -> None:
    import base64

    body = base64.b64encode(PICTURE).decode()
    assert taken(f"data:image/png;base64,{body}", tmp_path).facts.format == "png"
    assert taken(f"data:text/plain;charset=utf-8;base64,{body}", tmp_path).facts.format == "png"
    assert taken(f"DATA:;base64,{body.replace('+', '%2B')}", tmp_path).facts.format == "png"
    assert taken("data:," + "".join(f"%{byte:02x}" for byte in PICTURE), tmp_path).facts.format == "png"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("data:image/png;base64", "no valid data: URI"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,iVBOR!!!", "base64 is not valid"),
        ("data:image/png;base64,abcde", "base64 is not valid"),
        ("data:image/png;base64,é", "base64 is not valid"),
        ("data:text/plain,hello", "it is text"),
    ],
)
def test_a_bad_data_uri_is_refused(uri: str, said: str, tmp_path: Path) -> None:
    fault = refused(uri, tmp_path)
    assert said in fault.why and len(str(fault.value)) < 90


def test_a_data_uri_above_the_limit_is_not_decoded(tmp_path: Path) -> None:
    policy = ReferencePolicy(ReferenceLimits(nbytes={"image": 1000, "video": 1000, "audio": 1000}), folder=tmp_path)
    for uri in ("data:image/png;base64," + "!" * 4000, "data:," + "%" * 4000):
        assert "larger than 0 MiB" in refused(uri, tmp_path, policy=policy).why
