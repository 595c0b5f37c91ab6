"""Batches that come again, against a list: random senders, losses of answers, crashes and stops."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cometmq.format import record
from cometmq.member.metrics import MemberMetrics
from cometmq.member.state.statelog import newest_progress
from cometmq.messaging import state
from cometmq.messaging.dedup import Ids, StreamTable
from cometmq.model import TopicConfig
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, WallClock

QUEUES = 2


class Sender:
    """Numbers its messages, keeps what may have to be sent again."""

    def __init__(self, number: int, source: random.Random) -> None:
        self.stream = f"{number:026X}"
        self.source = source
        self.counter = 0
        self.sent: list[tuple[bytes, list[Claim], list[bytes]]] = []

    def batch(self) -> tuple[bytes, list[Claim], list[bytes]]:
        """A new batch; now and then one before it is never sent."""
        self.counter += self.source.choice([0, 0, 0, 3])
        data, claims, bodies = b"", [], []
        for _ in range(self.source.choice([1, 1, 2])):
            queue_id, count = self.source.randrange(QUEUES), self.source.choice([1, 2, 30])
            claims.append(Claim("T", queue_id, count))
            for _ in range(count):
                unique_id = f"{self.stream}{self.counter:08X}"
                self.counter += 1
                bodies.append(unique_id.encode())
                raw = b"UNIQ_KEY\x01" + bodies[-1] + b"\x02"
                data += encoded("T", queue_id, bodies[-1], properties=raw)
        self.sent.append((data, claims, bodies))
        return self.sent[-1]


async def stored(member: Member) -> list[bytes]:
    await member.on_disk()
    bodies = []
    for queue_id in range(QUEUES):
        low, high = member.store.queue_bounds("T", queue_id)
        for offset in range(low, high):
            unit = member.store.read_units("T", queue_id, offset, 1)
            span = int.from_bytes(unit[:8], "big"), int.from_bytes(unit[8:12], "big")
            bodies.append(record.decode(member.store.read_records([span])).body)
    return bodies


@pytest.mark.parametrize("seed", range(12))
async def test_every_message_is_stored_once_whatever_is_sent_again(
    tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    senders = [Sender(number, source) for number in range(3)]
    places: dict[bytes, tuple[int, list[int]]] = {}  # of the batches by their first body
    for life in range(4):
        clean = source.random() < 0.4
        async with living_member(tmp_path / "store", clean=clean) as member:
            await member.put("T", QUEUES)
            metrics = MemberMetrics(CollectorRegistry(), "c", "g")
            policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
            produce = ProduceHandler(
                member.storage, member.keeper, policy, HOST, metrics, WallClock()
            )
            for _ in range(source.randrange(5, 30)):
                sender = source.choice(senders)
                data, claims, bodies = (
                    source.choice(sender.sent[-20:])
                    if sender.sent and source.random() < 0.5
                    else sender.batch()
                )
                if source.random() < 0.2 and bodies[0] not in places:
                    continue  # lost on its way
                accepted = await produce.take(data, claims, HOST)
                appended = accepted.ticket.appended
                place = appended.log_offset, appended.queue_offsets
                assert accepted.record_count == len(bodies)
                assert accepted.is_known == (bodies[0] in places)
                assert places.setdefault(bodies[0], place) == place
                if source.random() < 0.2:
                    await member.on_disk()
                    member.keeper.write_progress(1.0 + life)
                if source.random() < 0.05:
                    member.keeper.write_snapshot()
            found = await stored(member)
            wanted = [
                b for s in senders for _, _, bodies in s.sent if bodies[0] in places for b in bodies
            ]
            assert sorted(found) == sorted(wanted)
            member.state.streams.validate()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_known_is_what_was_added(seed: int) -> None:
    """The table against a set of counters, with gaps that fill late."""
    source = random.Random(seed)
    table, stored_counters, begun = StreamTable(), set[int](), 0
    waiting: list[Ids] = []
    for step in range(400):
        if waiting and source.random() < 0.3:
            ids = waiting.pop(source.randrange(len(waiting)))
        else:
            count = source.randrange(1, 6)
            ids = Ids(b"S" * 26, begun, count)
            begun += count
            if source.random() < 0.2:
                waiting.append(ids)
                continue
        counters = set(range(ids.first, ids.first + ids.id_count))
        if not counters & stored_counters:
            try:
                assert table.find(ids) is None
            except LookupError:  # its gap was closed: there were too many
                continue
            table.add(ids, 1_000 * step, 1.0)
            stored_counters |= counters
            assert table.find(ids) == (ids.first, ids.id_count, 1_000 * step)
        table.validate()
    entries = list(table)
    again = StreamTable()
    again.restore(entries, [])
    assert list(again) == entries


@pytest.mark.parametrize("seed", range(20))
def test_changes_tell_new_runs_only_and_make_the_same_table(seed: int) -> None:
    """A reader of the log against the writer's table: changes, some of which a full disk refuses,
    and snapshots that know what the next change tells again.
    """
    source = random.Random(seed)
    table, reader = StreamTable(), StreamTable()
    counters, end, new_runs = [0] * 5, 0, 0
    for _ in range(600):
        number = source.randrange(5)
        ids = Ids(b"%026X" % number, counters[number], source.randrange(1, 9))
        counters[number] = ids.first + ids.id_count + source.choice([0, 0, 0, 2])
        table.add(ids, end, 1.0)
        end, new_runs = end + 100, new_runs + 1
        match source.randrange(12):
            case 0 | 1:
                changed, gone = table.unwritten()
                assert sum(len(entry.runs) for entry in changed) <= new_runs
                reader.restore(changed, gone)
                table.written(changed, gone)
                new_runs = 0
                assert sorted(reader) == sorted(table)
            case 2:
                changed, gone = table.unwritten()
                some = changed[:2]  # a full disk refuses the record of the others
                reader.restore(some, gone)
                table.written(some, gone)
            case 3:
                reader = StreamTable()
                reader.restore(table, [])
            case 4:
                table.expire(source.choice([2.0, 2.0, 1_000.0]))


async def test_progress_counts_from_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of many streams needs several: a crash may cut the log between them."""
    monkeypatch.setattr(state, "RECORD_BYTES_MAX", state.STREAM_BYTES)
    async with living_member(tmp_path / "store") as member:
        end = member.store.appended_offset
        for number in range(50):
            member.keeper.state.streams.add(Ids(b"%026X" % number, 0, 1), end + number, 1.0)
        before = member.store.queue_bounds(state.STATE_TOPIC, 0)[1]
        member.keeper.write_progress(1.0)
        records = member.store.queue_bounds(state.STATE_TOPIC, 0)[1]
        assert records > before + 1
        last = member.store.read_units(state.STATE_TOPIC, 0, records - 1, 1)
        assert newest_progress(member.store) == int.from_bytes(last[:8], "big")
