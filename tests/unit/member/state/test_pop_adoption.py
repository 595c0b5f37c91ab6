"""What groups have received from RocketMQ, and not acknowledged, is in leases here."""

from __future__ import annotations

import json
from pathlib import Path

from cometmq.format import properties, record
from cometmq.member.state.pop_adoption import PopAdoption
from cometmq.messaging.changes import GroupPut, OffsetsCommitted
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop.revive import REVIVE_GROUP
from cometmq.model import Position, TopicConfig
from cometmq.replication.watermarks import DurabilityClass
from tests.support.cluster.members import Member, living_member
from tests.support.stores.foreign_record import ForeignRecord
from tests.support.stores.small_stores import HOST

REVIVE = "rmq_sys_REVIVE_LOG_compat"
TIMERS = "rmq_sys_wheel_timer"
POPPED_MS = 1_700_000_000_000


def said(tag: str, start: int, topic: str = REVIVE, **more: object) -> ForeignRecord:
    key = {"c": "G", "t": "T", "q": 0, "so": start, "pt": POPPED_MS + start, "bn": "b"}
    names = {"TAGS": tag}
    if topic == TIMERS:
        names |= {"REAL_TOPIC": REVIVE, "REAL_QID": "0", "TIMER_OUT_MS": f"{POPPED_MS}"}
    return ForeignRecord(topic, json.dumps({**key, **more}).encode(), properties.encode(names))


def checkpoint(start: int, count: int, topic: str = REVIVE) -> ForeignRecord:
    return said("ck", start, topic, it=1_000, n=count, bm=0)


def ready(member: Member, *stored: ForeignRecord) -> None:
    """A topic with ten messages, and a group that has come up to the eighth."""
    state = member.state
    for name in ("T", REVIVE, TIMERS):
        state.apply(state.plan_topic(TopicConfig(name, 1, 1), by_system=True))
    state.apply(GroupPut(GroupSettings("G")))
    commit(member, "G", "T", 8)
    classes = dict.fromkeys(("T", REVIVE, TIMERS), DurabilityClass.ASYNC)
    messages = [ForeignRecord("T", b"%d" % number) for number in range(10)]
    member.storage.append_relayed([*messages, *stored], classes, HOST)


def commit(member: Member, group: str, topic: str, offset: int) -> None:
    position = Position(member.state.pop_generation((topic, 0)), offset)
    member.state.apply(OffsetsCommitted((CommittedOffset(group, topic, 0, position),)))


async def test_leases_have_what_is_not_acknowledged(tmp_path: Path) -> None:
    async with living_member(tmp_path / "store") as member:
        ready(
            member,
            checkpoint(0, 2),  # RocketMQ has looked at it
            said("ack", 2, ao=3),  # before its checkpoint, and before what is looked at
            checkpoint(2, 3),
            said("bAck", 5, aol=[5]),
            checkpoint(5, 2),
            said("ck", 90, it=1, n=1, bm=0),  # not there
            said("ck", 0, it=1, n=1, bm=0, c="gone"),
        )
        commit(member, REVIVE_GROUP, REVIVE, 1)
        adoption = PopAdoption(member.store, member.state)
        waits = [checkpoint(9, 1, TIMERS), said("ck", 1, TIMERS, it="x")]
        found = [record.decode(one.encode(n, 0, 0, HOST)) for n, one in enumerate(waits)]
        assert [adoption.takes(one) for one in found] == [True, False], "on its way to the log"
        adoption.read()
        assert adoption.settle(epoch=3) == 4

        state = member.state
        assert state.groups["G"].policy.mode is ConsumeMode.POP
        queue = state.pops.find("G", ("T", 0))
        assert queue is not None
        state.validate()
        assert [(lease.first, lease.mask, lease.visible_ms) for lease in queue] == [
            (2, 0b101, POPPED_MS + 1_002),
            (6, 1, POPPED_MS + 1_005),
            (9, 1, POPPED_MS + 1_009),
        ]
        assert all(lease.number >> 32 == 3 and lease.attempt == 1 for lease in queue)
        assert (queue.floor, queue.next_offset) == (2, 10)
        committed = state.offsets.get("G", ("T", 0))
        assert committed is not None
        assert committed.offset == 2
        looked_at = state.offsets.get(REVIVE_GROUP, (REVIVE, 0))
        assert looked_at is not None
        assert looked_at.offset == 6, "it does not come again when RocketMQ goes on"
        await member.on_disk()


async def test_a_group_without_any_stays_as_it_was(tmp_path: Path) -> None:
    async with living_member(tmp_path / "store") as member:
        ready(member, checkpoint(2, 1), said("ack", 2, ao=2))
        adoption = PopAdoption(member.store, member.state)
        adoption.read()
        assert adoption.settle(epoch=3) == 0
        assert member.state.groups["G"].policy.mode is ConsumeMode.PULL
        assert member.state.pops.groups() == []
        await member.on_disk()
