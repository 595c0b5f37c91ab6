"""The bytes of state records: fixed for good, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StateTooNew, StoreDamaged
from cometmq.messaging.changes import (
    KINDS_OF_PROTOCOL_3,
    AttemptsStored,
    Change,
    DelaysDropped,
    DelaysReached,
    GenerationsCounted,
    GenerationsRaised,
    GroupDropped,
    GroupLeft,
    GroupPolicyPut,
    GroupPut,
    HalvesDropped,
    HalvesReached,
    KindsUsed,
    LimitsPut,
    MessagesResent,
    OffsetsCommitted,
    OffsetsReset,
    PopsMoved,
    QueuesCounted,
    QueuesLocked,
    QueuesUnlocked,
    SecretAdded,
    StreamsReached,
    TimersDropped,
    TimersReached,
    TopicDropped,
    TopicPut,
    TopicQuotaPut,
    TopicReserved,
    TopicSnapshot,
    TopicTyped,
    decode,
    encode,
    newer_kinds,
)
from cometmq.messaging.dedup import StoredRun, StreamEntry
from cometmq.messaging.generations import History
from cometmq.messaging.group_policy import (
    ConsumeMode,
    CustomizedRetry,
    ExponentialRetry,
    GroupPolicy,
)
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.handle_secrets import Secret
from cometmq.messaging.intervals import Interval
from cometmq.messaging.locks import Grant, GrantRun
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop.leases import Done, Given
from cometmq.messaging.pop.table import QueueMoved
from cometmq.messaging.quotas import Limits, Quota, Scope
from cometmq.messaging.resends import ResentKey
from cometmq.messaging.retry import Attempt
from cometmq.messaging.timers import Timer, TimerMark
from cometmq.messaging.transactions import HalfProgress
from cometmq.model import FlushMode, MessageType, Position, TopicConfig
from tests.support.independent import state
from tests.unit.messaging.strategies import CHANGES

DOCS = Path(__file__).resolve().parents[3] / "docs" / "format"
ORDERS = TopicConfig("orders", 4, 2, 6, FlushMode.SYNC)
BILLS = TopicConfig("bills", 2, 2)

# The examples of docs/format/state.md. What is on disk keeps its meaning: add, never edit.
GOLDEN: dict[str, Change] = {
    '{"k":"topic","n":"orders","r":4,"w":2,"p":6,"f":2,"g":7}': TopicPut(ORDERS, 7),
    '{"k":"topic-reserve","n":"orders","t":3600000}': TopicReserved("orders", 3_600_000),
    '{"k":"topic-type","n":"orders","t":"FIFO","o":true,"a":{"cleanup.policy":"DELETE"}}': (
        TopicTyped("orders", MessageType.FIFO, True, (("cleanup.policy", "DELETE"),))
    ),
    '{"k":"topic-quota","n":"orders","q":[1000,1048576]}': (
        TopicQuotaPut("orders", Quota(1_000, 1_048_576))
    ),
    '{"k":"quota","s":"address","n":"2001:db8:0:1::/64","w":[100,0],"r":[0,0]}': (
        LimitsPut(Scope.ADDRESS, "2001:db8:0:1::/64", Limits(Quota(100), Quota()))
    ),
    '{"k":"topic-drop","n":"orders"}': TopicDropped("orders"),
    '{"k":"topic-copy","n":"bills","r":2,"w":2,"p":6,"f":1,"h":[[[7,0],[9,500]],[[7,0]]]}': (
        TopicSnapshot(BILLS, (History(((7, 0), (9, 500))), History(((7, 0),))))
    ),
    '{"k":"queues","n":"bills","o":[740,0]}': QueuesCounted("bills", (740, 0)),
    '{"k":"raise","g":9,"s":{"orders":[500,0]}}': GenerationsRaised(9, {"orders": (500, 0)}),
    '{"k":"counter","g":9}': GenerationsCounted(9),
    '{"k":"kinds","n":["kinds"]}': KindsUsed(frozenset({"kinds"})),
    '{"k":"group","n":"billing","c":true,"m":true,"b":true,"rq":1,"rt":16,"i":0,"s":1,"y":true}': (
        GroupPut(GroupSettings("billing"))
    ),
    '{"k":"group-policy","n":"billing","o":true,"t":15,"m":1,"rs":[1000,5000,60000],"q":[100,0]}': (
        GroupPolicyPut(
            "billing",
            GroupPolicy(
                is_orderly=True,
                retry=CustomizedRetry((1_000, 5_000, 60_000)),
                read_quota=Quota(messages_per_s=100),
            ),
        )
    ),
    '{"k":"group-policy","n":"bills","o":false,"t":30,"m":2,"re":[5000,2,7200000],"d"'
    ':3600000,"f":1,"a":{"priority.factor":"1"}}': GroupPolicyPut(
        "bills",
        GroupPolicy(
            retry=ExponentialRetry(5_000, 2, 7_200_000),
            consume_timeout_min=30,
            mode=ConsumeMode.POP,
            dlq_reserve_ms=3_600_000,
            system_flag=1,
            attributes=(("priority.factor", "1"),),
        ),
    ),
    '{"k":"group-drop","n":"billing"}': GroupDropped("billing"),
    '{"k":"offsets","o":{"billing":{"orders":[[0,9,480],[1,9,12]]}}}': OffsetsCommitted(
        (
            CommittedOffset("billing", "orders", 0, Position(9, 480)),
            CommittedOffset("billing", "orders", 1, Position(9, 12)),
        )
    ),
    '{"k":"reset","r":2,"o":{"billing":{"orders":[[0,9,100],[1,9,0]]}}}': OffsetsReset(
        2,
        (
            CommittedOffset("billing", "orders", 0, Position(9, 100)),
            CommittedOffset("billing", "orders", 1, Position(9, 0)),
        ),
    ),
    '{"k":"group-leave","n":"billing","t":"orders"}': GroupLeft("billing", "orders"),
    '{"k":"delays","o":[[3,17],[18,2]]}': DelaysReached({18: 2, 3: 17}),
    '{"k":"resent","t":"orders","q":3,"o":[[0,7],[9,12]],"n":"billing"}': MessagesResent(
        ResentKey("orders", 3, "billing"), (Interval(0, 7), Interval(9, 12))
    ),
    '{"k":"attempts","a":[["billing",1,[880,4096]],["billing",2,[900]]]}': AttemptsStored(
        (Attempt("billing", 880, 1), Attempt("billing", 4096, 1), Attempt("billing", 900, 2))
    ),
    '{"k":"resent","t":"orders","q":3,"o":[]}': MessagesResent(ResentKey("orders", 3, ""), ()),
    '{"k":"locks","n":"billing","c":"10.0.0.7@1","l":8589934593,"q":{"orders":[0,3]}}': (
        QueuesLocked(GrantRun("billing", Grant("10.0.0.7@1", (2 << 32) + 1), {"orders": (0, 3)}))
    ),
    '{"k":"unlocks","n":"billing","q":{"orders":[3]}}': QueuesUnlocked("billing", {"orders": (3,)}),
    '{"k":"pop","b":4294967296,"t":1700000030000,"p":{"billing":{"orders":[[3,7,140,'
    "[[1,0,100,0,1,32],[2,0,132,30000,1,2,1,1],[3,0,134,0,0,1],[4,1,100,30000,2,32]],"
    "[[2],[4,104,1,2,3]]]]}}}": PopsMoved(
        (
            QueueMoved(
                "billing",
                ("orders", 3),
                7,
                140,
                (
                    Given((1 << 32) + 1, 0, 100, 2**32 - 1, 1_700_000_030_000, 1),
                    Given((1 << 32) + 2, 0, 132, 0b1011, 1_700_000_060_000, 1),
                    Given((1 << 32) + 3, 0, 134, 1, 0, 0),
                    Given((1 << 32) + 4, (1 << 32) + 1, 100, 2**32 - 1, 1_700_000_060_000, 2),
                ),
                (Done((1 << 32) + 2), Done((1 << 32) + 4, 104, 0b111001)),
            ),
        )
    ),
    '{"k":"halves","h":40,"o":7,"c":[[44,2],[51,1]]}': HalvesReached(
        HalfProgress(40, 7, ((44, 2), (51, 1)))
    ),
    '{"k":"delay-drop","n":"orders","o":[[3,20],[18,2]]}': DelaysDropped("orders", {3: 20, 18: 2}),
    '{"k":"half-drop","n":"orders","o":44}': HalvesDropped("orders", 44),
    '{"k":"timer","w":[1700000000000,41],"a":50,"r":7,"x":[[1700000360000,44]]}': TimersReached(
        TimerMark(Timer(1_700_000_000_000, 41), 50, 7), (Timer(1_700_000_360_000, 44),)
    ),
    '{"k":"timer","w":[0,0],"a":3,"r":0}': TimersReached(TimerMark(Timer(0, 0), 3, 0)),
    '{"k":"timer-drop","n":"orders","o":50}': TimersDropped("orders", 50),
    '{"k":"secret","t":1700000000000,"s":'
    '"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"}': SecretAdded(
        Secret(1_700_000_000_000, bytes(range(32)))
    ),
    '{"k":"streams","s":{"01A0B1C2D3E4F50001160F3C2A":[[[0,7],[9,12]],[[4,3,880],[9,3,4096]]]},'
    '"x":["01A0B1C2D3E4F50001160F3C29"]}': StreamsReached(
        (
            StreamEntry(
                "01A0B1C2D3E4F50001160F3C2A",
                (Interval(0, 7), Interval(9, 12)),
                (StoredRun(4, 3, 880), StoredRun(9, 3, 4096)),
            ),
        ),
        ("01A0B1C2D3E4F50001160F3C29",),
    ),
}


def test_the_release_before_reads_all_but_the_newer_kinds() -> None:
    """What was released stays as it is: a kind that is added belongs to the newer ones."""
    kinds = {json.loads(text)["k"] for text in GOLDEN}
    assert kinds - KINDS_OF_PROTOCOL_3 == {"group-leave", "kinds", "quota"}
    assert len(KINDS_OF_PROTOCOL_3) == 27
    assert newer_kinds(GOLDEN.values()) == {"group-leave", "kinds", "quota"}
    assert newer_kinds([TopicDropped("orders")]) == frozenset()


def test_each_kind_has_a_golden_form() -> None:
    assert {type(change) for change in GOLDEN.values()} == set(get_args(Change))


def test_the_independent_reader_knows_each_kind() -> None:
    assert {json.loads(text)["k"] for text in GOLDEN} == set(state.KINDS)


@pytest.mark.parametrize("text", GOLDEN)
def test_the_document_shows_the_golden_forms(text: str) -> None:
    assert text in (DOCS / "state.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("text", GOLDEN)
def test_golden_forms(text: str) -> None:
    body = f'{{"v":1,"c":[{text}]}}'.encode()
    assert encode([GOLDEN[text]]) == body
    assert decode(body) == (GOLDEN[text],)


@given(st.lists(CHANGES, max_size=5))
def test_what_is_written_is_read(changes: list[Change]) -> None:
    assert decode(encode(changes)) == tuple(changes)


def record(**entry: Any) -> bytes:
    return json.dumps({"v": 1, "c": [entry]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"v":2,"c":[]}',
        b'{"v":2}',
        b'{"v":1,"c":[],"x":0}',
        record(k="pop-ack", n="orders"),
        record(k="kinds", n=["kinds", "pop-ack"]),
        record(k="topic-drop", n="orders", reason=""),
    ],
)
def test_what_a_later_version_wrote_is_refused(body: bytes) -> None:
    with pytest.raises(StateTooNew):
        decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b'{"v":1}',
        b'{"v":1,"c":7}',
        b'{"v":1,"c":[7]}',
        b'{"v":1,"c":[[]]}',
        b'{"v":1,"c":[' + b"[" * 100_000,
        record(n="orders"),
        record(k="topic-drop"),
        record(k="topic-drop", n=7),
        record(k=["topic-drop"], n="orders"),
        record(k="counter", g=-1),
        record(k="counter", g=1.0),
        record(k="counter", g=True),
        record(k="raise", g=1, s=[]),
        record(k="secret", t=1, s="00" * 31),
        record(k="pop", b=0, t=0, p={"billing": {"orders": [[0, 1, 0, [[1, 0, 0, 0, 1]], []]]}}),
        record(k="pop", b=0, t=0, p={"billing": {"orders": [[0, 1, 0, [], [[1, 5, 0]]]]}}),
        record(k="pop", b=0, t=0, p={"billing": {"orders": [[0, 1, 0, [], [[-1]]]]}}),
        record(k="secret", t=1, s="x" * 64),
        record(k="kinds", n=7),
        record(k="halves", h=1, o=2, c=[[9, 1], [9, 2]]),
        record(k="halves", h=1, o=2, c=[[9]]),
        record(k="timer", w=[1], a=0, r=0),
        record(k="timer", w=[1, 2], a=-1, r=0),
        record(k="timer", w=[1, 2], a=0, r=0, x=[[1, 2, 3]]),
        record(k="topic", n="orders", r=4, w=2, p=6, f=9, g=7),
        record(k="topic-copy", n="orders", r=1, w=1, p=6, f=1, h=[[[7, 5]]]),
        record(k="topic-copy", n="orders", r=1, w=1, p=6, f=1, h=[[]]),
        record(k="offsets", o={"billing": {"orders": [[0, 9]]}}),
        record(k="group", n="b", c=1, m=True, b=True, rq=1, rt=16, i=0, s=1, y=True),
    ],
)
def test_what_nobody_wrote_is_damage(body: bytes) -> None:
    with pytest.raises(StoreDamaged):
        decode(body)


@given(st.binary(max_size=40))
def test_noise_is_never_taken_for_state(noise: bytes) -> None:
    try:
        assert decode(noise) == ()
    except (StoreDamaged, StateTooNew):
        return
    assert json.loads(noise) == {"v": 1, "c": []}
