from __future__ import annotations

import pytest

from cometmq.errors import MessageIdInvalid, MessageNotFound
from cometmq.format.batch import BatchLimits
from cometmq.format.record import host_bytes
from cometmq.member.hosts import BrokerIdentity, host_of_peer, ip_and_port

STORE_HOST = host_bytes("10.0.0.1", 10911)
IDENTITY = BrokerIdentity("c", "g1", STORE_HOST, BatchLimits())


@pytest.mark.parametrize(
    ("peer", "address", "port"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1", 4711),
        ("ipv6:%5B::1%5D:4711", "::1", 4711),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1", 4711),
        ("ipv6:%5B::ffff:10.1.2.3%5D:80", "10.1.2.3", 80),  # IPv4 over a dual-stack port
        ("unix:/tmp/socket", "0.0.0.0", 0),
        ("ipv4:127.0.0.1", "0.0.0.0", 0),
        ("", "0.0.0.0", 0),
    ],
)
def test_the_host_of_a_peer(peer: str, address: str, port: int) -> None:
    assert host_of_peer(peer) == host_bytes(address, port)


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1"])
def test_a_host_there_and_back(address: str) -> None:
    packed, port = ip_and_port(host_bytes(address, 65_535))
    assert (len(packed), port) == (16 if ":" in address else 4, 65_535)
    assert packed + port.to_bytes(4, "big") == host_bytes(address, 65_535)


def test_whose_message_it_is() -> None:
    assert IDENTITY.log_offset_of("g1/17") == 17
    assert IDENTITY.log_offset_of((STORE_HOST + (17).to_bytes(8, "big")).hex()) == 17
    for other in ("g2/17", (host_bytes("10.0.0.2", 10911) + bytes(8)).hex()):
        with pytest.raises(MessageNotFound):
            IDENTITY.log_offset_of(other)
    with pytest.raises(MessageIdInvalid):
        IDENTITY.log_offset_of("17")
