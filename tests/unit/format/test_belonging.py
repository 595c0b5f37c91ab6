from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import belonging, queueunit, record
from cometmq.native import accelerator

QUEUE = ("orders", 3)
LOG_OFFSET = 4096
FIRST = 7  # queue offset


@pytest.fixture(params=[None, accelerator], ids=["plain", "native"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is None and accelerator is None:
        pytest.skip("the C extension is missing")
    monkeypatch.setattr(belonging, "accelerator", request.param)


def encoded(log_offset: int, queue_offset: int, topic: str = "orders", queue_id: int = 3) -> bytes:
    return record.encode(
        topic.encode(),
        queue_id,
        b"body" * (queue_offset % 3),
        b"",
        born_time_ms=1,
        born_host=bytes(8 if queue_offset % 2 else 20),
        store_host=bytes(8),
        queue_offset=queue_offset,
        log_offset=log_offset,
        store_time_ms=1,
    )


def queue_of(count: int) -> tuple[list[bytes], bytes]:
    """Records of the queue with others between them, and its units."""
    records, units, at = [], b"", LOG_OFFSET
    for number in range(count):
        records.append(encoded(at, FIRST + number))
        units += queueunit.pack(at, len(records[-1]), 0)
        at += len(records[-1]) + 100
    return records, units


@given(st.sets(st.integers(0, 5)))
def test_some_of_the_messages_in_their_order_are_its_own(chosen: set[int]) -> None:
    records, units = queue_of(6)
    some = b"".join(records[number] for number in sorted(chosen))
    assert belonging.first_strange(some, units, FIRST, QUEUE) is None
    places = array("q", [part for number in sorted(chosen) for part in (3, FIRST + number)])
    assert belonging.first_misplaced(some, "orders", places) is None


@pytest.mark.parametrize(
    "change",
    [{"topic": "order"}, {"topic": "ordersx"}, {"queue_id": 2}, {"queue_offset": FIRST + 2}],
    ids=str,
)
def test_a_record_that_says_something_else_is_strange(change: dict[str, object]) -> None:
    records, units = queue_of(3)
    at, _, _ = queueunit.unit_at(units, 1)
    fields: dict[str, object] = {"log_offset": at, "queue_offset": FIRST + 1, **change}
    some = records[0] + encoded(**fields) + records[2]  # type: ignore[arg-type]
    assert belonging.first_strange(some, units, FIRST, QUEUE) == len(records[0])
    places = array("q", [3, FIRST, 3, FIRST + 1, 3, FIRST + 2])
    assert belonging.first_misplaced(some, "orders", places) == len(records[0])


def test_units_of_another_offset_are_strange() -> None:
    records, units = queue_of(3)
    some = b"".join(records)
    assert belonging.first_strange(some, units, FIRST + 1, QUEUE) == 0
    assert belonging.first_strange(some, units[20:], FIRST + 1, QUEUE) == 0
    assert belonging.first_strange(records[2] + records[1], units, FIRST, QUEUE) == len(records[2])


def test_what_is_no_record_is_strange() -> None:
    records, units = queue_of(2)
    some = b"".join(records)
    assert belonging.first_strange(some[:-1], units, FIRST, QUEUE) == len(records[0])
    assert belonging.first_misplaced(some[:-1], "orders", array("q", [3, FIRST, 3, FIRST + 1])) == (
        len(records[0])
    )
    assert belonging.first_misplaced(some, "orders", array("q", [3, FIRST])) == len(records[0])
