"""Lists of name servers, and the addresses behind their names. Without gRPC: options are checked
before a process has decided how gRPC polls (:mod:`cometmq.rpc.polling`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable

from cometmq.errors import ConfigInvalid
from cometmq.model import PORT_MAX

ADDRESSES_MAX = 64
RESOLVE_EVERY_S = 2.0
RESOLVE_S_MAX = 1.0


def parse_addresses(text: str | Iterable[str]) -> tuple[str, ...]:
    """``"a:1;b:2"`` → ``("a:1", "b:2")``, without repetitions. ConfigInvalid names the bad one."""
    parts = text.split(";") if isinstance(text, str) else list(text)
    found = dict.fromkeys(part.strip() for part in parts if part.strip())
    if not 1 <= len(found) <= ADDRESSES_MAX:
        raise ConfigInvalid(f"{text!r}: 1 to {ADDRESSES_MAX} addresses host:port, ';' between them")
    for address in found:
        split_address(address)
    return tuple(found)


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` → (host without brackets, port). ConfigInvalid."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not host or (":" in host and not bracketed) or not 1 <= number <= PORT_MAX:
        raise ConfigInvalid(f"{address!r} is not host:port")
    return host, number


async def resolve(addresses: Iterable[str]) -> tuple[str, ...]:
    """Every address behind every name, sorted: the name of a headless Service has one for each pod.

    A name that does not resolve now is left out.
    """
    found = await asyncio.gather(*map(_resolve_one, addresses))
    return tuple(sorted(set().union(*found)))


async def _resolve_one(address: str) -> set[str]:
    host, port = split_address(address)
    if _is_ip(host):
        return {address}
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {f"[{a[0]}]:{port}" if ":" in str(a[0]) else f"{a[0]}:{port}" for *_, a in answers}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Resolver:
    """The addresses behind some names, as they are now. A caller waits a moment at most: for names
    that cannot be looked up it gets the addresses that were known before.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._names = tuple(addresses)
        self._known: tuple[str, ...] = ()
        self._looking: asyncio.Task[None] | None = None  # one at a time: each has a thread

    async def addresses(self) -> tuple[str, ...]:
        """What the names resolve to; what they did before, or the names, when they do not in
        time.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait([self._looking], timeout=RESOLVE_S_MAX)
        return self._known or self._names

    async def _look(self) -> None:
        self._known = await resolve(self._names) or self._known

    def close(self) -> None:
        """There are no more callers."""
        if self._looking is not None:
            self._looking.cancel()


async def follow_addresses(
    addresses: Iterable[str],
    changed: Callable[[tuple[str, ...]], None],
    *,
    every_s: float = RESOLVE_EVERY_S,
) -> None:
    """Call ``changed`` with the resolved addresses now and whenever they differ; runs for ever.

    When nothing at all resolves, the last known addresses stay. Without a name there is nothing to
    look up again.
    """
    configured = tuple(addresses)
    if all(_is_ip(split_address(address)[0]) for address in configured):
        changed(await resolve(configured))
        await asyncio.get_running_loop().create_future()
    known: tuple[str, ...] = ()
    while True:
        found = await resolve(configured)
        if found and found != known:
            known = found
            changed(found)
        await asyncio.sleep(every_s)
