from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import StateTooNew, StoreDamaged
from cometmq.format import record
from cometmq.member.state import statelog
from cometmq.member.state.statelog import append_now, encode_record, keep_from, load
from cometmq.messaging.changes import Change, TopicDropped, TopicPut
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.queuechanges import QueueChanges
from cometmq.messaging.state import (
    CHANGE,
    STATE_QUEUE_ID,
    STATE_TOPIC,
    BrokerState,
    StateRecord,
    change_records,
)
from cometmq.model import TopicConfig
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import HOST, START_MS, append, open_store


def write(store: MessageStore, state: BrokerState, *changes: Change) -> None:
    """Changes that are appended and applied."""
    append_now(store, change_records(changes), HOST, START_MS)
    for change in changes:
        state.apply(change)


def put(state: BrokerState, name: str) -> TopicPut:
    return state.plan_topic(TopicConfig(name))


def same(a: BrokerState, b: BrokerState) -> bool:
    return list(a.as_changes()) == list(b.as_changes())


def test_a_state_record_is_a_record_like_any_other() -> None:
    data = encode_record(StateRecord(CHANGE, b"{}"), HOST, START_MS)
    found = record.decode(data)
    assert (found.topic, found.queue_id, found.tag) == (STATE_TOPIC, STATE_QUEUE_ID, CHANGE)
    assert (found.body, found.born_time_ms) == (b"{}", START_MS)


def test_an_empty_log_tells_an_empty_state(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert same(load(store, BrokerState), BrokerState())
    store.abandon()


def test_changes_without_a_copy_are_read_from_the_beginning(tmp_path: Path) -> None:
    store, state = open_store(tmp_path), BrokerState()
    write(store, state, put(state, "A"))
    write(store, state, state.plan_group(GroupSettings("g")))
    assert same(load(store, BrokerState), state)
    store.abandon()


def test_a_large_state_over_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of many records, changes between and behind them, units read in pieces."""
    monkeypatch.setattr(statelog, "_UNITS_AT_ONCE", 7)
    monkeypatch.setattr(statelog, "_RECORD_BYTES_AT_ONCE", 2_000)
    store, state = open_store(tmp_path), BrokerState()
    for number in range(60):
        write(store, state, put(state, f"topic-{number:03}"))
        if number % 25 == 20:
            append_now(store, state.snapshot_records(bytes_max=1_000), HOST, START_MS)
        append(store, ("T", 0, [b"between"]))
    write(store, state, TopicDropped("topic-007"))
    assert store.queue_bounds(STATE_TOPIC, 0)[1] > 65
    assert same(load(store, BrokerState), state)
    store.abandon()


def test_a_copy_that_a_crash_cut_short_is_passed_over(tmp_path: Path) -> None:
    store, state = open_store(tmp_path), BrokerState()
    for number in range(30):
        write(store, state, put(state, f"topic-{number:03}"))
    append_now(store, state.snapshot_records(bytes_max=1_000)[:-1], HOST, START_MS)
    write(store, state, TopicDropped("topic-007"))
    assert same(load(store, BrokerState), state)
    store.abandon()


def test_a_unit_with_a_strange_tag_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, (STATE_TOPIC, 0, [b"x"]), tag="STRANGE")
    with pytest.raises(StateTooNew, match=r"'STRANGE'.* --write-off 0-"):
        load(store, BrokerState)
    store.abandon()


@pytest.mark.parametrize(("at", "damage"), [(2, b"@"), (15, b"@"), (0, b"\x51" * 20)])
def test_a_damaged_unit_is_no_sign_of_a_newer_release(
    tmp_path: Path, at: int, damage: bytes
) -> None:
    """Of its place in the log, of the tag, or of all."""
    store, state = open_store(tmp_path), BrokerState()
    append_now(store, state.snapshot_records(), HOST, START_MS)
    queue = store._dispatcher.find(STATE_TOPIC, STATE_QUEUE_ID)
    assert queue is not None
    next(iter(queue.segments)).pwrite(at, damage)
    with pytest.raises(StoreDamaged, match=f"cometmq store repair {tmp_path}"):
        load(store, BrokerState)
    store.abandon()


def test_deletions_are_seen_while_the_log_is_read_again(tmp_path: Path) -> None:
    store, state = open_store(tmp_path), BrokerState()
    write(store, state, put(state, "A"), put(state, "B"))
    append(store, ("A", 0, [b"a"]), ("B", 0, [b"b"]))
    write(store, state, TopicDropped("A"))
    store.abandon()  # the files of A are still there
    store = open_store(tmp_path, observer=QueueChanges())
    assert store.queue_bounds("A", 0) == (0, 0)
    assert store.queue_bounds("B", 0) == (0, 1)
    store.abandon()


def test_retention_keeps_the_last_but_one_copy_that_is_whole_and_on_the_disk(
    tmp_path: Path,
) -> None:
    store, state = open_store(tmp_path), BrokerState()
    starts = []

    def copy(records: list[StateRecord]) -> None:
        starts.append(store.appended_offset)
        append_now(store, records, HOST, START_MS)

    write(store, state, put(state, "A"))
    assert keep_from(store) == store.min_offset
    copy(state.snapshot_records())
    write(store, state, put(state, "B"))
    assert keep_from(store) == store.min_offset, "there is none but the last"
    copy(state.snapshot_records(bytes_max=1))
    assert keep_from(store) == starts[0]
    copy(state.snapshot_records(bytes_max=1)[:-1])
    assert keep_from(store) == starts[0], "cut short"
    copy(state.snapshot_records())
    assert keep_from(store) == starts[1], "where its first record stands"
    [record_of_copy] = state.snapshot_records()
    data = encode_record(record_of_copy, HOST, START_MS)
    store.append(data, [(STATE_TOPIC, STATE_QUEUE_ID, 1)], born_host=HOST, store_host=HOST)
    assert keep_from(store) == starts[1], "a crash may take it back"
    store.flush_log()
    assert keep_from(store) == starts[3]
    store.abandon()
