"""Leases of groups and what the state log has of them."""

from __future__ import annotations

import pytest

from cometmq.errors import FlowControl
from cometmq.messaging.pop import table as pop_table
from cometmq.messaging.pop.leases import Done, Given
from cometmq.messaging.pop.table import PopTable, QueueMoved

KEY = ("T", 0)


def generation(_: tuple[str, int]) -> int:
    return 7


def given(table: PopTable, first: int, mask: int, attempt: int = 1) -> int:
    number = table.next_number(epoch=1)
    table.give("G", KEY, Given(number, 0, first, mask, 1_000 * attempt, attempt))
    return number


def written(table: PopTable) -> list[QueueMoved]:
    moved = table.unwritten(generation)
    for one in moved:
        table.written(one)
    assert not table.has_unwritten
    return moved


def copy_of(*turns: list[QueueMoved]) -> PopTable:
    made = PopTable()
    for moved in turns:
        for one in moved:
            made.restore(one)
    return made


def leases(table: PopTable) -> list[tuple[int, int, int]]:
    queue = table.find("G", KEY)
    assert queue is not None
    queue.validate()
    return [(one.number, one.first, one.mask) for one in queue]


def test_what_is_acknowledged_in_parts_in_one_turn_is_written_whole() -> None:
    table = PopTable()
    table.open("G", KEY, 0)
    number = given(table, 0, 0xFF)
    first = written(table)
    table.finish("G", KEY, Done(number, 1, 0b11))
    table.finish("G", KEY, Done(number, 6, 0b1))
    table.finish("G", KEY, Done(number, 0, 0b1))
    second = written(table)
    assert leases(copy_of(first, second)) == leases(table) == [(number, 3, 0b10111)]
    table.finish("G", KEY, Done(number))
    assert leases(copy_of(first, second, written(table))) == []


def test_a_crash_between_two_records_of_a_turn_loses_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message in no lease is done. So messages that wait, which lie between those that were
    delivered, come in the same record, and the last record says how far the group has looked.
    """
    monkeypatch.setattr(pop_table, "CHANGE_BYTES", 60)
    table = PopTable()
    table.open("G", KEY, 0)
    for round_ in range(4):
        given(table, 8 * round_, 0b01010101)
        given(table, 8 * round_ + 1, 0b01010101, attempt=0)
    table.skip("G", KEY, 40)
    moved = written(table)
    assert len(moved) == 4
    for count in range(1, 5):
        known = copy_of(moved[:count])
        queue = known.find("G", KEY)
        assert queue is not None
        assert queue.open_count == queue.next_offset if count < 4 else 32
    assert leases(copy_of(moved)) == leases(table)
    assert copy_of(moved).find("G", KEY).next_offset == 40  # type: ignore[union-attr]


def test_numbers_rise_over_epochs_and_copies() -> None:
    table = PopTable()
    table.open("G", KEY, 0)
    number = given(table, 0, 1)
    known = copy_of(list(table.as_moved(generation)))
    assert known.next_number(epoch=1) > number
    assert known.next_number(epoch=3) == (3 << 32) + 1


def test_there_is_a_limit_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_table, "LEASES_MAX", 2)
    table = PopTable()
    table.open("G", KEY, 0)
    numbers = [given(table, 0, 1), given(table, 1, 1)]
    with pytest.raises(FlowControl):
        table.check_room()
    table.finish("G", KEY, Done(numbers[0]))
    table.check_room()
