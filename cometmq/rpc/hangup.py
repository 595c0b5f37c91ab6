"""Closing connections that gRPC has accepted. It has no call for it: neither for a connection nor
for a call whose answer waits for its peer. So the socket is found among the process's own, and shut
down; gRPC then sees its end, as if the peer had gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import urllib.parse
from collections.abc import Iterable
from contextlib import suppress

_DESCRIPTORS = "/dev/fd"
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: the kernel keeps nothing for the peer either

Address = tuple[str, int]


def hang_up(names: Iterable[str]) -> int:
    """Shut the connections with these peers down, by gRPC's names of them (``ipv4:10.0.0.1:4711``,
    ``ipv6:%5B::1%5D:4711``). How many there were.
    """
    wanted = {address for address in map(_address_of, names) if address is not None}
    count = 0
    try:
        entries = os.listdir(_DESCRIPTORS)
    except OSError:  # no descriptor is left to look with: the next time then
        return 0
    for entry in entries:
        # A descriptor may be closed, and used again, at any time: what is looked at is a copy.
        with suppress(OSError), _copy_of(int(entry)) as copy:
            if _peer_of(copy) in wanted:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _copy_of(descriptor: int) -> socket.socket:
    """OSError: it is no socket, or no longer there."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # socket() does not close a descriptor that it refuses
        raise


def _address_of(name: str) -> Address | None:
    kind, _, rest = name.partition(":")
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _peer_of(connection: socket.socket) -> Address | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = connection.getpeername()[:2]
    return _plain(host), port


def _plain(host: str) -> str:
    """Without a zone, and an IPv4 client of a dual-stack port as such."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
