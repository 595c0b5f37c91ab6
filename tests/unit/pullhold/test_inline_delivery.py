"""Answers out of an arrival: only where a pull would answer the same."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.messaging.inline_messages import InlineMessages
from cometmq.v1 import broker_pb2, common_pb2, hold_pb2
from services.pullhold.inline_delivery import Deliveries, InlineBatch
from services.pullhold.model import ClusterQueue, Hold, HoldSpec, Queue, Session

RED, BLUE = 1, 2
MESSAGES = InlineMessages(5, 2, b"r1b22r333", [2, 3, 4], [RED, BLUE, RED])
LIMITS = (32, 1_000)


def hold(offset: int = 5, *, generation: int = 3, codes: tuple[int, ...] = (), **more: Any) -> Hold:
    request = broker_pb2.PullRequest(group=more.pop("group", ""))
    fields = {"limits": LIMITS, "request": request, **more}
    want = HoldSpec(
        ClusterQueue("g1", "t", 0), generation, offset, frozenset(codes), 15.0, **fields
    )
    return Hold(Session("c", "c", None), 1, want, Queue(0.0), 0.0)


def found(records: bytes, count: int, next_offset: int) -> broker_pb2.PullResponse:
    return broker_pb2.PullResponse(
        status=broker_pb2.PULL_STATUS_FOUND,
        records=records,
        count=count,
        next_position=common_pb2.Position(generation=3, offset=next_offset),
        min_offset=2,
        max_offset=8,
    )


@pytest.mark.parametrize(
    ("a_hold", "response"),
    [
        (hold(), found(b"r1b22r333", 3, 8)),
        (hold(generation=0), found(b"r1b22r333", 3, 8)),
        (hold(6), found(b"b22r333", 2, 8)),
        (hold(codes=(RED, BLUE)), found(b"r1b22r333", 3, 8)),
        (hold(codes=(RED,)), found(b"r1r333", 2, 8)),
        (hold(codes=(BLUE,)), found(b"b22", 1, 8)),
        (hold(limits=(1, 1_000)), found(b"r1", 1, 6)),
        (hold(limits=(32, 5)), found(b"r1b22", 2, 7)),
        (hold(limits=(32, 1)), found(b"r1", 1, 6)),
        (hold(7, limits=(1, 1)), found(b"r333", 1, 8)),
    ],
)
def test_what_a_pull_would_answer(a_hold: Hold, response: broker_pb2.PullResponse) -> None:
    reply = InlineBatch(3, MESSAGES).reply(a_hold)
    assert reply is not None
    assert reply.response == response
    answer = hold_pb2.HoldStreamResponse(response=hold_pb2.HoldResponse(pull=response))
    assert hold_pb2.HoldStreamResponse.FromString(reply.wire) == answer


def test_messages_that_do_not_pass_the_filter_move_the_hold_on() -> None:
    reply = InlineBatch(3, MESSAGES).reply(hold(6, codes=(9,)))
    assert reply is not None
    response = reply.response
    assert response.status == broker_pb2.PULL_STATUS_NO_MATCHED_MESSAGE
    assert (response.count, response.next_position.offset) == (0, 8)


@pytest.mark.parametrize(
    "a_hold",
    [
        hold(4),  # wants more than came
        hold(8),  # wants what comes later
        hold(generation=2),  # a fence, perhaps
        hold(generation=4),
        hold(limits=None),  # another form
    ],
)
def test_what_only_the_broker_can_answer(a_hold: Hold) -> None:
    assert InlineBatch(3, MESSAGES).reply(a_hold) is None


def test_who_wants_the_same_gets_the_same() -> None:
    batch = InlineBatch(3, MESSAGES)
    first, second = batch.reply(hold(group="a")), batch.reply(hold(group="b"))
    assert first is second
    assert batch.reply(hold(codes=(RED,))) is not first


def test_deliveries_are_summed_by_topic_and_group_until_they_are_told() -> None:
    deliveries = Deliveries()
    assert not deliveries
    deliveries.add(hold(group="a"), found(b"1234", 2, 8))
    deliveries.add(hold(group="b"), found(b"12", 1, 8))
    deliveries.add(hold(group="a"), found(b"123", 1, 8))
    assert deliveries
    told = [(d.topic, d.group, d.message_count, d.record_bytes) for d in deliveries.take()]
    assert told == [("t", "a", 3, 7), ("t", "b", 1, 2)]
    assert not deliveries
    assert deliveries.take() == []
