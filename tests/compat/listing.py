"""Everything that a store holds, as CometMQ reads it, to be compared with what RocketMQ reads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cometmq.clock import SystemClock
from cometmq.format import compression, queueunit, record
from cometmq.format.ids import parse_message_id
from cometmq.format.indexfile import Sizes
from cometmq.store.base import BaseStore
from cometmq.store.writer import MessageStore, StoreOptions
from tests.compat.rocketmq import Listing, RocketMq
from tests.support.faults import tally
from tests.support.stores.small_stores import find_by_key

LOG_FILE_BYTES = 64 * 1024
QUEUE_FILE_BYTES = 400
INDEX = Sizes(100, 400)  # as in java/Driver.java
OPTIONS = StoreOptions(
    commit_log_file_bytes=LOG_FILE_BYTES,
    consume_queue_file_bytes=QUEUE_FILE_BYTES,
    index_sizes=INDEX,
)
QUERY_MAX = 64  # RocketMQ answers no more

Queue = tuple[str, int]  # topic, queue id


class Unit(NamedTuple):
    """A message of a queue."""

    queue_offset: int
    log_offset: int
    tags_code: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """All queues with messages, and where each key of a topic leads."""

    bounds: dict[Queue, tuple[int, int]]
    units: dict[Queue, list[Unit]]
    keys: dict[tuple[str, str], list[int]]

    @property
    def count(self) -> int:
        return sum(map(len, self.units.values()))


def rocketmq(version: str) -> RocketMq:
    return RocketMq(version, LOG_FILE_BYTES, QUEUE_FILE_BYTES)


def open_ours(directory: Path) -> MessageStore:
    return MessageStore.open(directory, OPTIONS, clock=SystemClock())


def content_of(store: BaseStore) -> Content:
    """What the store holds; its index is brought up to date first."""
    bounds = {queue: store.queue_bounds(*queue) for queue in store.queues()}
    units = {queue: _units(store, queue, *bounds[queue]) for queue in bounds}
    while store.index_some():
        pass
    keys = {
        key: sorted(found.message.log_offset for found in find_by_key(store, *key))[-QUERY_MAX:]
        for key in _keys(units)
    }
    return Content(bounds, units, keys)


def content_of_folder(directory: Path) -> Content:
    """As :func:`content_of`, of a folder that is opened and closed."""
    store = open_ours(directory)
    try:
        return content_of(store)
    finally:
        store.close()


def _units(store: BaseStore, queue: Queue, first: int, end: int) -> list[Unit]:
    found: list[Unit] = []
    while first < end:
        units = list(queueunit.iterate(store.read_units(*queue, first, end - first)))
        assert units, (queue, first)
        for number, (log_offset, size, code) in enumerate(units, first):
            raw = store.read_records([(log_offset, size)])
            message = record.decode(raw)
            assert (message.topic, message.queue_id, message.queue_offset) == (*queue, number)
            found.append(Unit(number, log_offset, code, raw))
        first += len(units)
    return found


def _keys(units: dict[Queue, list[Unit]]) -> set[tuple[str, str]]:
    found = set()
    for (topic, _), of_queue in units.items():
        for unit in of_queue:
            message = record.decode(unit.raw)
            found |= {(topic, key) for key in (*message.keys, message.unique_id) if key}
    return found


# --- comparing ------------------------------------------------------------------------------------


def note_compared(what: str, number: int = 1) -> None:
    """For the sum at the end of a run."""
    tally.count(f"compared with RocketMQ: {what}", number)


def assert_same(theirs: Listing, ours: Content, *, whole_index: bool = True) -> int:
    """Both read the same, to the byte; answers how many messages were compared. Without
    ``whole_index`` RocketMQ may find less by key.
    """
    assert {queue: both for queue, both in theirs.bounds.items() if both[1]} == ours.bounds
    found: defaultdict[Queue, list[Unit]] = defaultdict(list)
    for line in theirs.messages:
        raw = bytes.fromhex(line["raw"])
        unit = Unit(line["queue_offset"], line["log_offset"], line["tags_code"], raw)
        found[line["topic"], line["queue_id"]].append(unit)
        assert_fields(line, record.decode(raw))
    assert dict(found) == {queue: units for queue, units in ours.units.items() if units}
    assert theirs.queries.keys() == ours.keys.keys()
    for key, answer in theirs.queries.items():
        assert set(answer) <= set(ours.keys[key]), key
        assert not whole_index or answer == ours.keys[key], key
    assert ours.keys == _expected_keys(ours)
    note_compared("folders")
    note_compared("messages", len(theirs.messages))
    note_compared("answers by key", len(theirs.queries))
    return len(theirs.messages)


def _expected_keys(ours: Content) -> dict[tuple[str, str], list[int]]:
    """Where each key leads, found by looking at all messages."""
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for (topic, _), units in ours.units.items():
        for unit in units:
            message = record.decode(unit.raw)
            for key in {*message.keys, message.unique_id} - {""}:
                found[topic, key].add(unit.log_offset)
    return {key: sorted(offsets)[-QUERY_MAX:] for key, offsets in found.items()}


PLAIN_FIELDS = (
    *("topic", "queue_id", "queue_offset", "log_offset", "size", "flag", "body_crc"),
    *("born_time_ms", "store_time_ms", "reconsume_times", "prepared_offset"),
)


def assert_fields(theirs: dict[str, Any], ours: record.Record) -> None:
    """RocketMQ's decoded message says what ours says."""
    for name in PLAIN_FIELDS:
        assert theirs[name] == getattr(ours, name), name
    compressed = compression.SYS_FLAG_COMPRESSED
    # 5.x takes the sign off a body that it has unpacked.
    assert theirs["sys_flag"] | compressed == ours.sys_flag | compressed
    body = ours.plain_body
    assert bytes.fromhex(theirs["body"]) == body
    assert theirs["properties"] == ours.properties
    for name in ("born_host", "store_host"):
        host = getattr(ours, name)
        port = int.from_bytes(host[-4:], "big")
        assert theirs[name] == f"{host[:-4].hex()}:{port}"
    assert parse_message_id(theirs["id"]) == (None, ours.store_host, ours.log_offset)
