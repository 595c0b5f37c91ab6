"""The messages that a simple consumer has, and their leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from cometmq.client.pop.calls import Lease
from cometmq.client.pop.held import FORGOTTEN_MIN, HeldMessages, LeasePart
from cometmq.client.received import ReceivedMessage
from cometmq.model import QueueRef
from cometmq.v1 import broker_pb2

Q = QueueRef("T", 0, "g1")


@dataclass
class _Message:
    queue_offset: int
    queue: QueueRef = Q


def messages(*offsets: int) -> list[ReceivedMessage]:
    return cast(list[ReceivedMessage], [_Message(offset) for offset in offsets])


def lease(until_s: float = 10.0) -> Lease:
    return Lease(Q, "handle", 10.0, until_s)


def test_an_old_lease_takes_nothing_from_a_newer_one() -> None:
    held, old, new = HeldMessages(), lease(), lease(20.0)
    held.add(old, messages(1, 2, 3))
    held.add(new, messages(2))
    held.remove(old, broker_pb2.AckItem(first_offset=1, count=3))
    assert held.of_queue(Q) == {2: new}
    [message] = messages(2)
    its = broker_pb2.AckItem(first_offset=2, count=1)
    held.move(old, lease(99.0), its)
    assert held.find(message) is new
    held.move(new, changed := new.changed("other", 30.0, 40.0), its)
    assert held.find(message) is changed
    assert changed.received_s == new.received_s


def test_leases_are_counted_until_their_time_is_over() -> None:
    held, first, other = HeldMessages(), lease(10.0), lease(11.0)
    held.add(first, messages(4, 2, 8))
    held.add(other, messages(5))
    assert set(held.parts(9.0)) == {LeasePart(first, 2, 3), LeasePart(other, 5, 1)}
    assert list(held.parts(10.0)) == [LeasePart(other, 5, 1)]


def test_messages_of_others_do_not_pile_up() -> None:
    held = HeldMessages()
    for second in range(100):
        held.add(lease(second + 10.0), messages(*range(second * 100, second * 100 + 100)))
        held.forget_old(float(second))
    assert len(held.of_queue(Q)) < 2 * FORGOTTEN_MIN + 1_100
    assert all(offset in held.of_queue(Q) for offset in range(9_000, 10_000)), "these are its own"
