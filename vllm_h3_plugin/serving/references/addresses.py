# SPDX-License-Identifier: Apache-2.0
"""Which hosts a reference may come from, and which addresses a server may be made to connect to."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_h3_plugin.serving.references.unfit import Unfit

Resolve = Callable[[str, int], Sequence[str]]
"""(host name, port) -> addresses as text. Raises ``OSError`` if there are none."""

ANY_HOST = "*"
_PORTS = {"https": 443, "http": 80}
# Networks through which an IPv4 address can be reached in disguise.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")


@dataclass(frozen=True)
class Target:
    """Where a URL leads: everything that decides whether it may be fetched."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def netloc(self) -> str:
        """Host and port as a URL writes them; the scheme's own port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True)
class AllowedHost:
    """One entry of ``H3_REFERENCE_HOSTS``.

    Attributes:
        host: a name; ``*`` for any, ``*.example.com`` for every name below one.
        scheme: ``https``, or ``http`` where the entry says so.
        port: of the scheme, where the entry names none.
    """

    host: str
    scheme: str = "https"
    port: int = _PORTS["https"]

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """``cdn.example.com``, ``*.example.com``, ``media.example.com:8443``, ``http://old.example.com`` or ``*``.

        Raises:
            ValueError: it is none of these; says what is wrong.
        """
        scheme, separator, rest = entry.strip().rpartition("://")
        scheme = scheme.lower() if separator else "https"
        if scheme not in _PORTS:
            raise ValueError(f"{entry!r}: the scheme is https or http")
        name, colon, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
        if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{entry!r}: {port!r} is no port")
        asked, name = name, canonical_host(name)
        # `*.` is a slip of the pen, and no wish to fetch from everywhere.
        labels = "any" if asked == ANY_HOST else name.removeprefix("*.")
        if not labels or any(not part or not set(part) <= _LABEL for part in labels.split(".")):
            raise ValueError(f"{entry!r}: it is no host name; give for example cdn.example.com, without a path")
        return cls(name, scheme, int(port) if colon else _PORTS[scheme])

    def admits(self, target: Target) -> bool:
        """Whether a URL may lead there."""
        if (target.scheme, target.port) != (self.scheme, self.port):
            return False
        if self.host.startswith("*."):
            return target.host.endswith(self.host[1:])
        return self.host in (ANY_HOST, target.host)


_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def canonical_host(name: str) -> str:
    """A host name as it is compared: lower case, ASCII, without the final dot.

    Raises:
        ValueError: it has no ASCII form.
    """
    name = name.strip().rstrip(".").lower()
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError as exc:
        raise ValueError(f"{name!r} is no host name") from exc


def target_of(url: str, allowed: Sequence[AllowedHost]) -> Target:
    """Where a URL leads, if it may be fetched.

    Raises:
        Unfit: no URL, with a password in it, or of a host that is not allowed.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = canonical_host(parts.hostname or "")
    except ValueError as exc:
        raise Unfit(f"it is no valid URL: {exc}") from exc
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not host:
        raise Unfit("it is no https URL", "a file, a data: URI or an https URL")
    if parts.username is not None or parts.password is not None:
        raise Unfit("a URL with a user name or password in it is not fetched")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(not "!" <= character <= "~" for character in path):
        raise Unfit("its path has spaces or characters that are not ASCII; percent-encode them")
    target = Target(scheme, host, port or _PORTS[scheme], path)
    if not any(entry.admits(target) for entry in allowed):
        raise Unfit(f"this server does not fetch from {scheme}://{target.netloc}", _names(allowed))
    return target


def resolve(target: Target, lookup: Resolve, seconds: float) -> list[str]:
    """Addresses of a target, every one of which may be connected to.

    Raises:
        Unfit: there are none in time, or one of them is not public. One is enough: a name that leads inside and outside
            is a trick or a fault.
    """
    addresses = _in_time(lookup, target, seconds)
    for address in addresses:
        reason = not_public(address)
        if reason:
            # The address itself is not told: it is what somebody who looks for one wants to know.
            raise Unfit(f"{target.host} leads to {reason}, to which this server does not connect")
    return addresses


def not_public(address: str) -> str:
    """Why an address is none of the public internet, in words; empty if it is one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return not_public(str(inner))
        if ip.is_site_local or ip in _LOCAL_NAT64:
            return "a private address"
    for is_so, words in (
        (ip.is_loopback, "a loopback address"),
        (ip.is_link_local, "a link-local address"),
        (ip.is_multicast, "a multicast address"),
        (ip.is_unspecified, "the unspecified address"),
        (ip.is_reserved, "a reserved address"),
        (ip.is_private, "a private address"),
        (not ip.is_global, "an address that is not public"),
    ):
        if is_so:
            return words
    return ""


def system_lookup(host: str, port: int) -> list[str]:
    """The system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _in_time(lookup: Resolve, target: Target, seconds: float) -> list[str]:
    """The resolver has no time limit of its own: a thread that is not waited for gives it one."""
    answers: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            answers.append(list(lookup(target.host, target.port)))
        except (OSError, UnicodeError) as exc:
            answers.append(OSError(str(exc)))

    thread = threading.Thread(target=ask, name="reference-lookup", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if not answers:
        raise Unfit(f"the name {target.host} was not resolved in time")
    found = answers[0]
    if isinstance(found, OSError) or not found:
        raise Unfit(f"the name {target.host} has no address")
    return found


def _names(allowed: Sequence[AllowedHost]) -> str:
    if not allowed:
        return "a file or a data: URI"
    names = [entry.host if entry.scheme == "https" else f"http://{entry.host}" for entry in allowed]
    return f"https URLs of {', '.join(names[:10])}"
