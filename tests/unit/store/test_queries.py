from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import record
from cometmq.format.indexfile import Sizes, key_hash
from cometmq.format.properties import encode
from cometmq.store import queries
from cometmq.store.queries import Boundary, KeySearch, offset_by_time, store_time_ms
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    HOST,
    LOG_FILE_BYTES,
    SMALL,
    START_MS,
    WallClock,
    append,
    append_keyed,
    find_by_key,
    open_store,
)

LOWER, UPPER = Boundary.LOWER, Boundary.UPPER
ONE_FILE = replace(SMALL, index_sizes=Sizes(hash_slots=4, entries=101))
PHYSICAL_OFFSET_AT = 28  # in a record


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def store(tmp_path: Path, clock: WallClock) -> Iterator[MessageStore]:
    store = open_store(tmp_path, clock=clock)
    yield store
    store.abandon()


def found(
    store: MessageStore, topic: str, key: str, first_ms: int = 0, last_ms: int = 10**15
) -> list[int]:
    """Queue offsets, newest first, of what is found when all is indexed."""
    store.flush_log()
    while store.index_some():
        pass
    return [one.message.queue_offset for one in find_by_key(store, topic, key, first_ms, last_ms)]


def test_a_message_is_found_by_each_of_its_keys_and_by_its_id(store: MessageStore) -> None:
    data = record.encode(
        b"T", 0, b"x", encode({"UNIQ_KEY": "id", "KEYS": "a  b"}),
        born_time_ms=1, born_host=HOST, store_host=HOST,
    )  # fmt: skip
    appended = store.append(data, [("T", 0, 1)], born_host=HOST, store_host=HOST)
    assert found(store, "T", "id") == found(store, "T", "a") == found(store, "T", "b") == [0]
    assert found(store, "T", "a  b") == found(store, "T", "") == found(store, "U", "a") == []
    (one,) = find_by_key(store, "T", "a")
    assert one.raw == store.read_record(appended.log_offset)
    assert record.decode(one.raw) == one.message


def pieces(search: KeySearch) -> Iterator[tuple[int, int]]:
    """Of each piece: messages looked at, and found."""
    while not search.is_over:
        before = search.read_count
        found = search.piece()
        yield search.read_count - before, len(found)


def test_a_search_is_made_in_small_pieces(
    tmp_path: Path, clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "PIECE_READS", 4)
    monkeypatch.setattr(queries, "PIECE_ENTRIES", 10)
    store = open_store(tmp_path, ONE_FILE, clock=clock)
    append_keyed(store, "T", 0, *["k"] * 10)
    clock.now_ms += 60_000
    append_keyed(store, "T", 0, *["k"] * 30)
    assert len(found(store, "T", "k")) == 40
    assert list(pieces(KeySearch(store, "T", "k"))) == [(4, 4)] * 10 + [(0, 0)]
    older = KeySearch(store, "T", "k", last_ms=START_MS)
    assert list(pieces(older))[:3] == [(0, 0)] * 3  # nothing is read, and yet one may stop
    assert len(list(find_by_key(store, "T", "k", last_ms=START_MS))) == 10
    store.abandon()


def test_collisions_are_never_shown(store: MessageStore) -> None:
    append_keyed(store, "T", 0, "Aa", "BB")
    assert key_hash("T", "Aa") == key_hash("T", "BB")
    assert found(store, "T", "Aa") == [0]
    assert found(store, "T", "BB") == [1]
    append_keyed(store, "Aa", 0, "k")
    append_keyed(store, "BB", 0, "k", "k")
    assert key_hash("Aa", "k") == key_hash("BB", "k")
    assert found(store, "Aa", "k") == [0]
    assert found(store, "BB", "k") == [1, 0]


def test_a_key_that_stands_twice_is_one_message(store: MessageStore) -> None:
    append_keyed(store, "T", 0, "k k", "k")
    assert found(store, "T", "k") == [1, 0]


def test_times_are_exact_and_include_both_ends(store: MessageStore, clock: WallClock) -> None:
    for _ in range(30):
        append_keyed(store, "T", 0, "k")
        clock.now_ms += 400
    assert found(store, "T", "k", START_MS + 400 * 8, START_MS + 400 * 10) == [10, 9, 8]
    assert found(store, "T", "k", START_MS + 400 * 8 + 1, START_MS + 400 * 10 - 1) == [9]
    assert found(store, "T", "k", 0, START_MS) == [0]
    assert found(store, "T", "k", START_MS + 400 * 29) == [29]


def test_a_message_whose_log_file_is_gone_is_not_found(store: MessageStore) -> None:
    while store.appended_offset < 2 * LOG_FILE_BYTES:
        append_keyed(store, "T", 0, "k" * 400)
    before = found(store, "T", "k" * 400)
    store.flush_queues()
    store.cleaner.forget_before(LOG_FILE_BYTES)
    after = found(store, "T", "k" * 400)
    assert after == before[: len(after)]
    assert after[-1] == store.queue_bounds("T", 0)[0] > 0


def at(store: MessageStore, time_ms: int, boundary: Boundary) -> int:
    return offset_by_time(store, ("T", 0), store.queue_bounds("T", 0), time_ms, boundary)


def test_of_messages_of_one_time_the_first_or_the_last(
    store: MessageStore, clock: WallClock
) -> None:
    for count in (1, 3, 2):
        append(store, ("T", 0, [b"x"] * count), ("U", 0, [b"y"]))
        clock.now_ms += 10
    first, second, third = START_MS, START_MS + 10, START_MS + 20
    assert [at(store, time, LOWER) for time in (first, second, third)] == [0, 1, 4]
    assert [at(store, time, UPPER) for time in (first, second, third)] == [0, 3, 5]
    assert (at(store, second - 1, LOWER), at(store, second - 1, UPPER)) == (1, 0)
    assert (at(store, first - 1, LOWER), at(store, first - 1, UPPER)) == (0, 0)
    assert (at(store, third + 1, LOWER), at(store, third + 1, UPPER)) == (6, 5)


def test_an_empty_queue_has_one_place(store: MessageStore) -> None:
    assert at(store, START_MS, LOWER) == at(store, START_MS, UPPER) == 0


def test_bounds_keep_what_may_not_be_seen_out(store: MessageStore, clock: WallClock) -> None:
    append(store, ("T", 0, [b"x"] * 10))
    assert offset_by_time(store, ("T", 0), (2, 7), START_MS, UPPER) == 6
    assert offset_by_time(store, ("T", 0), (2, 7), START_MS, LOWER) == 2
    assert offset_by_time(store, ("T", 0), (2, 7), START_MS + 1, LOWER) == 7


@pytest.mark.parametrize("damaged", [{5}, {4, 5, 6}, {10}])
def test_damaged_messages_lead_nobody_astray(
    store: MessageStore, clock: WallClock, tmp_path: Path, damaged: set[int]
) -> None:
    starts = []
    for _ in range(11):
        starts.append(append(store, ("T", 0, [b"x"])).log_offset)
        clock.now_ms += 10
    store.flush_log()
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        for number in damaged:
            file.seek(starts[number] + PHYSICAL_OFFSET_AT)
            file.write(b"\xff" * 8)
    for number in set(range(11)) - damaged:
        before = min(other for other in range(number + 1) if set(range(other, number)) <= damaged)
        assert before <= at(store, START_MS + 10 * number, LOWER) <= number
        assert at(store, START_MS + 10 * number, UPPER) == number


def test_what_is_gone_counts_as_older(store: MessageStore, clock: WallClock) -> None:
    while store.appended_offset < 2 * LOG_FILE_BYTES:
        append(store, ("T", 0, [b"x" * 900]))
        clock.now_ms += 10
    store.flush_log()
    store.flush_queues()
    low, end = store.queue_bounds("T", 0)
    store.cleaner.forget_before(LOG_FILE_BYTES)
    kept = store.queue_bounds("T", 0)[0]
    assert kept > low
    assert offset_by_time(store, ("T", 0), (low, end), START_MS, LOWER) == kept
    assert store_time_ms(store, ("T", 0), low) is None
    assert store_time_ms(store, ("T", 0), kept) == START_MS + kept * 10


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(-2, 130))
def test_offsets_by_time_are_a_bisection(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], wanted: int
) -> None:
    clock = WallClock()
    store = open_store(tmp_path_factory.mktemp("store"), clock=clock)
    times = []
    for step in steps:
        clock.now_ms += step
        append(store, ("T", 0, [b"x"]))
        times.append(clock.now_ms)
    time_ms = START_MS + wanted
    assert at(store, time_ms, LOWER) == bisect_left(times, time_ms)
    assert at(store, time_ms, UPPER) == max(0, bisect_right(times, time_ms) - 1)
    store.abandon()
