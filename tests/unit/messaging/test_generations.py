"""Generations, against a naive model of what can have been lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import NotWriter, OffsetInvalid, PositionFenced, QueueNotFound, StoreDamaged
from cometmq.messaging.generations import (
    HISTORY_PAIRS_MAX,
    GenerationTable,
    History,
    is_history,
)
from cometmq.model import Position

HISTORY = History(((3, 0), (5, 100), (8, 250)))


def fence_of(history: History, position: Position) -> tuple[int, int] | None:
    try:
        history.validate(position)
    except PositionFenced as error:
        return error.fence
    return None


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (Position(8, 900), Position(8, 900)),  # the current generation
        (Position(5, 250), Position(8, 250)),  # at the start of the later one
        (Position(4, 100), Position(8, 100)),  # a number that only other queues had
        (Position(3, 0), Position(8, 0)),
        (Position(2, 0), Position(8, 0)),  # of a deleted topic, but before all messages
        (Position(0, 10**12), Position(8, 10**12)),  # does not track: never fenced
    ],
)
def test_a_position_that_still_holds_gets_the_current_generation(
    position: Position, expected: Position
) -> None:
    assert HISTORY.validate(position) == expected
    assert HISTORY.settle(position) == expected


@pytest.mark.parametrize(
    ("position", "fence"),
    [
        (Position(5, 251), (8, 250)),
        (Position(3, 260), (8, 100)),  # the lowest start of all later generations
        (Position(3, 101), (8, 100)),
        (Position(2, 1), (8, 0)),  # of a deleted topic: nothing holds
        (Position(9, 700), (8, 250)),  # of a lineage that is gone
        (Position(9, 100), (8, 100)),
    ],
)
def test_a_position_that_may_be_lost_is_fenced(position: Position, fence: tuple[int, int]) -> None:
    assert fence_of(HISTORY, position) == fence
    assert HISTORY.settle(position) == Position(*fence)


@pytest.mark.parametrize("generation", [0, 3, 8, 9])
def test_a_negative_offset_is_refused(generation: int) -> None:
    with pytest.raises(OffsetInvalid):
        HISTORY.validate(Position(generation, -1))


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        ((0, 0),),
        ((1, 5),),
        ((2, 0), (2, 3)),
        ((2, 0), (3, 9), (4, 8)),
        tuple((n, n - 1) for n in range(1, HISTORY_PAIRS_MAX + 2)),
    ],
)
def test_what_is_no_history(pairs: tuple[tuple[int, int], ...]) -> None:
    assert not is_history(pairs)


def test_a_queue_that_stands_still_needs_no_room() -> None:
    history = History(((1, 0),)).raised(2, 80)
    for generation in range(3, 100):
        history = history.raised(generation, 80)
    assert history.pairs == ((1, 0), (99, 80))


# --- the model: each crash loses the messages from some offset on, others take their places ------

Crash = tuple[int, int]  # messages lost at the end, messages written afterwards


def raise_through(crashes: list[Crash]) -> tuple[History, list[list[str]]]:
    """A queue's history, and what it held at the end of each generation, message by message."""
    queue: list[str] = []
    history = History(((1, 0),))
    ends: list[list[str]] = []
    for generation, (lost, written) in enumerate(crashes, start=1):
        if generation > 1:
            history = history.raised(generation, len(queue))
        queue = [*queue, *(f"{generation}.{n}" for n in range(written))]
        ends.append(queue)
        # Never more than the generation wrote itself: the record that began it is in the log
        # behind all older messages, so a log that knows the generation has them.
        queue = queue[: len(queue) - min(lost, written)]
    return history, ends


CRASHES = st.tuples(st.integers(0, 5), st.integers(0, 6))


def lowest_later_start(crashes: list[Crash], generation: int) -> int:
    """By the rule's own words, from the whole list of starts."""
    starts = [0]
    for lost, written in crashes:
        starts.append(starts[-1] + written - min(lost, written))
    return min(starts[generation:-1])


@given(st.lists(CRASHES, min_size=1, max_size=12), st.data())
def test_a_reader_that_is_not_fenced_has_read_what_is_there(
    crashes: list[Crash], data: st.DataObject
) -> None:
    history, ends = raise_through(crashes)
    generation = data.draw(st.integers(1, len(crashes)))
    offset = data.draw(st.integers(0, len(ends[generation - 1])))
    position = Position(generation, offset)
    settled = history.settle(position)
    assert settled.generation == history.current
    read, now = ends[generation - 1][:offset], ends[-1]
    assert read[: settled.offset] == now[: settled.offset]  # nothing is skipped silently
    if generation < history.current:
        fence = lowest_later_start(crashes, generation)
        assert settled.offset == min(offset, fence)
        assert fence_of(history, position) == ((history.current, fence) if offset > fence else None)


# Each leaves the queue longer: a history has room for starts that do not rise.
GROWTHS = st.tuples(st.integers(0, 2), st.integers(3, 6))


@given(st.lists(GROWTHS | CRASHES, min_size=17, max_size=60))
def test_a_long_history_fences_lower_but_never_higher(crashes: list[Crash]) -> None:
    history, ends = raise_through(crashes)
    assert is_history(history.pairs)
    for generation in range(1, len(crashes) + 1):
        offset = len(ends[generation - 1])
        settled = history.settle(Position(generation, offset))
        assert settled.offset <= offset
        if generation < history.current:
            assert settled.offset <= lowest_later_start(crashes, generation)


def test_a_long_history_keeps_the_newest_pairs_exact() -> None:
    history = History(((1, 0),))
    for generation in range(2, 41):
        history = history.raised(generation, generation * 10)
    assert len(history.pairs) == HISTORY_PAIRS_MAX
    assert history.born == 1
    assert fence_of(history, Position(30, 10**6)) == (40, 310)
    assert fence_of(history, Position(2, 10**6)) == (40, 20)


# --- the table ----------------------------------------------------------------------------------


def test_queues_get_the_generation_of_their_creation() -> None:
    table = GenerationTable()
    table.extend("orders", 2, table.allocate())
    table.extend("orders", 3, table.allocate())
    assert [h.pairs for h in table.topic("orders")] == [((1, 0),), ((1, 0),), ((2, 0),)]
    assert list(table.queues()) == [("orders", 0), ("orders", 1), ("orders", 2)]


def test_a_hidden_queue_keeps_its_history() -> None:
    table = GenerationTable()
    table.extend("orders", 3, table.allocate())
    table.extend("orders", 1, table.allocate())
    assert len(table.topic("orders")) == 3


def test_a_topic_created_again_is_above_all_it_ever_had() -> None:
    table = GenerationTable()
    table.extend("orders", 1, table.allocate())
    table.raise_all(table.allocate(), {"orders": (70,)})
    table.drop("orders")
    assert table.find("orders", 0) is None
    table.extend("orders", 1, table.allocate())
    assert fence_of(table.of("orders", 0), Position(2, 60)) == (3, 0)


def test_allocations_run_ahead_of_what_is_applied() -> None:
    table = GenerationTable()
    first, second = table.allocate(), table.allocate()
    assert (first, second, table.last) == (1, 2, 0)
    table.extend("a", 1, first)
    table.extend("b", 1, second)
    assert table.allocate() == 3


@pytest.mark.parametrize("queue_id", [-1, 1])
def test_unknown_queues(queue_id: int) -> None:
    table = GenerationTable()
    table.extend("orders", 1, 1)
    assert table.find("orders", queue_id) is None
    with pytest.raises(QueueNotFound):
        table.of("orders", queue_id)


def test_two_that_go_on_from_the_same_log_give_out_different_generations() -> None:
    given = []
    for epoch in (7, 8):
        table = GenerationTable()
        table.extend("orders", 1, (3 << 32) + 5)
        assert table.last_fork == 3
        table.count_in(epoch)
        table.raise_all(table.allocate(), {"orders": (10,)})
        assert table.last_fork == epoch
        given.append(table.of("orders", 0).current)
    assert given == [(7 << 32) + 1, (8 << 32) + 1]


def test_the_generations_of_the_highest_epoch_are_an_int64() -> None:
    table = GenerationTable()
    table.count_in((1 << 31) - 1)
    assert 1 << 62 < table.allocate() < 1 << 63


def test_a_generation_that_does_not_rise_is_damage() -> None:
    table = GenerationTable()
    table.extend("orders", 1, 5)
    with pytest.raises(StoreDamaged):
        table.extend("other", 1, 5)
    with pytest.raises(StoreDamaged):
        table.raise_all(5, {"orders": (1,)})


def test_raising_must_name_each_queue() -> None:
    table = GenerationTable()
    table.extend("orders", 2, 1)
    with pytest.raises(StoreDamaged):
        table.raise_all(2, {"orders": (0,)})
    with pytest.raises(StoreDamaged):
        table.raise_all(2, {"unknown": (0,)})


def test_a_follower_fences_by_what_it_knows_and_leaves_the_rest_to_the_writer() -> None:
    assert HISTORY.validate_at_copy(Position(8, 900)) == Position(8, 900)
    assert HISTORY.validate_at_copy(Position(3, 50)) == Position(8, 50)
    with pytest.raises(PositionFenced):
        HISTORY.validate_at_copy(Position(3, 101))
    with pytest.raises(NotWriter):
        HISTORY.validate_at_copy(Position(9, 0))
