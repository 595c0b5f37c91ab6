"""Addresses as records and ids carry them: the broker's and the producer's."""

from __future__ import annotations

import ipaddress
import urllib.parse
from dataclasses import dataclass
from functools import lru_cache

from cometmq.errors import MessageNotFound
from cometmq.format import ids
from cometmq.format.batch import BatchLimits
from cometmq.format.record import host_bytes
from cometmq.messaging.quotas import Caller, counted_as

_PORT_BYTES = 4
_UNKNOWN_PEER = host_bytes("0.0.0.0", 0)


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """What this broker calls itself."""

    cluster: str
    broker_group: str
    store_host: bytes  # its address and port as records carry them
    batch_limits: BatchLimits

    def log_offset_of(self, message_id: str) -> int:
        """Where a message of this broker lies. Raises MessageIdInvalid, MessageNotFound for
        another broker's.
        """
        found = ids.parse_message_id(message_id)
        ours = found.broker_group == self.broker_group or found.store_host == self.store_host
        if not ours:
            raise MessageNotFound(f"message {message_id} does not belong to {self.broker_group}")
        return found.log_offset


def host_of_peer(peer: str) -> bytes:
    """The host field for gRPC's peer text: ``ipv4:127.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``;
    0.0.0.0:0 for others.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return _UNKNOWN_PEER
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)  # an IPv4 client of a dual-stack port
    return host_bytes(str(mapped or address), int(port))


def address_of_host(host: bytes) -> str:
    """A host field without its port, for a person: ``10.0.0.1``."""
    return str(ipaddress.ip_address(host[:-_PORT_BYTES]))


def caller_of_host(host: bytes, client_id: str) -> Caller:
    """The client whose quotas count, by its host field."""
    return Caller(client_id, counted_as(host[:-_PORT_BYTES]))


def caller_of_peer(peer: str, client_id: str) -> Caller:
    """As :func:`caller_of_host`, by gRPC's peer text."""
    return Caller(client_id, _counted_peer(peer))


@lru_cache(maxsize=4_096)
def _counted_peer(peer: str) -> str:
    return counted_as(host_of_peer(peer)[:-_PORT_BYTES])


def ip_and_port(host: bytes) -> tuple[bytes, int]:
    """A host field as (address of 4 or 16 bytes, port)."""
    return host[:-_PORT_BYTES], int.from_bytes(host[-_PORT_BYTES:], "big")
