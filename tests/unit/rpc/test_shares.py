from __future__ import annotations

import pytest

from cometmq.errors import LimitExceeded
from cometmq.rpc import shares
from cometmq.rpc.shares import Buckets, Shares, address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv4:10.0.0.1:4712", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "[::1]"),
        ("unix:/tmp/socket", "unix"),
        ("", ""),
    ],
)
def test_connections_of_one_machine_are_one_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_who_has_its_share_takes_nothing_from_others() -> None:
    held = Shares(2, "streams", "streams_max")
    with held.held("a"), held.held("a"), held.held("b"):
        with pytest.raises(LimitExceeded, match=r"a has its 2 streams here .streams_max."):
            held.take("a")
        held.take("b")
        held.give_back("b")
    held.take("a", 2)
    with pytest.raises(LimitExceeded):
        held.take("a", 1)
    held.take("a", 0)
    held.give_back("a", 2)
    assert len(held) == 0, "nothing is remembered of who holds nothing"


def test_a_bucket_refills() -> None:
    buckets = Buckets(3, 10.0, "groups", "option")
    for _ in range(3):
        buckets.take("a", 0.0)
    with pytest.raises(LimitExceeded, match=r"its 3 groups.*one each 10 s"):
        buckets.take("a", 9.9)
    buckets.take("b", 9.9)
    buckets.take("a", 10.0)
    with pytest.raises(LimitExceeded):
        buckets.take("a", 10.0)
    for _ in range(3):  # not more than a whole one, however long it was away
        buckets.take("a", 1_000.0)
    with pytest.raises(LimitExceeded):
        buckets.take("a", 1_000.0)


def test_very_many_addresses_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "ADDRESSES_MAX", 3)
    buckets = Buckets(2, 10.0, "groups", "option")
    for address in "abc":
        buckets.take(address, 0.0)
    for address in "de":
        buckets.take(address, 1.0)
    with pytest.raises(LimitExceeded):
        buckets.take("f", 1.0)
    buckets.take("a", 1.0)
    assert len(buckets) == 4
    buckets.take("f", 100.0)
    assert len(buckets) == 1, "who has refilled is forgotten"
