from __future__ import annotations

from typing import Any

import pytest

from cometmq.errors import DelayLevelInvalid, FlowControl, GroupNameInvalid
from cometmq.format import delayed, record
from cometmq.messaging import retry
from cometmq.messaging.retry import Attempt, AttemptTable, attempt_of
from tests.unit.format.test_batch import make


def found(topic: str = "orders", raw: bytes = b"", **fields: Any) -> record.Record:
    return record.decode(make(topic.encode(), raw=raw, **fields))


def test_tries_take_ten_seconds_to_two_hours_and_then_two_hours_each() -> None:
    waits = [retry.wait_after(times, 0, 20) for times in range(21)]
    levels = [None if wait is None else wait.level for wait in waits]
    assert levels == [*range(3, 19), 18, 18, 18, 18, None]
    assert [delayed.delay_ms(level) for level in (3, 18)] == [10_000, 7_200_000]


@pytest.mark.parametrize(
    ("times", "asked", "most", "level"),
    [(0, 5, 16, 5), (15, 1, 16, 1), (16, 1, 16, None), (0, -1, 16, None), (0, 0, 0, None)],
)
def test_what_a_consumer_asks_for(times: int, asked: int, most: int, level: int | None) -> None:
    wait = retry.wait_after(times, asked, most)
    assert (None if wait is None else wait.level) == level


@pytest.mark.parametrize("asked", [-2, 19, 1 << 31])
def test_a_level_that_is_none_is_refused(asked: int) -> None:
    with pytest.raises(DelayLevelInvalid):
        retry.wait_after(0, asked, 16)


def test_a_name_too_long_for_its_topics_is_refused() -> None:
    assert retry.retry_topic("g" * 120) == "%RETRY%" + "g" * 120
    with pytest.raises(GroupNameInvalid):
        retry.retry_topic("g" * 121)


def test_properties_through_two_tries_to_the_dead_letters() -> None:
    own = b"user\x01x\x02UNIQ_KEY\x0101AB\x02"
    first = found(raw=delayed.prefix(3, "orders", 7) + own)  # it was a delayed message
    raw = retry.retry_properties(first, 3, "%RETRY%G", 0, "ID1")
    expected = {"DELAY": "3", "REAL_TOPIC": "%RETRY%G", "REAL_QID": "0", "RETRY_TOPIC": "orders"}
    kept = {"ORIGIN_MESSAGE_ID": "ID1", "user": "x", "UNIQ_KEY": "01AB"}
    assert found(raw=raw).properties == expected | kept
    assert raw.endswith(own)
    again = retry.retry_properties(found("%RETRY%G", raw), 4, "%RETRY%G", 0, "ID2")
    assert found(raw=again).properties == expected | kept | {"DELAY": "4"}
    dead = retry.dead_properties(found("%RETRY%G", again), "ID3")
    origin = {"DLQ_ORIGIN_TOPIC": "orders", "DLQ_ORIGIN_MESSAGE_ID": "ID1", "RETRY_TOPIC": "orders"}
    assert found(raw=dead).properties == origin | kept
    assert dead.endswith(own)


def test_a_send_back_is_known_by_its_group_source_and_try() -> None:
    prefix = delayed.prefix(3, "%RETRY%G", 0)
    scheduled = found("SCHEDULE_TOPIC_XXXX", prefix, prepared_offset=70, reconsume_times=2)
    assert attempt_of(scheduled) == Attempt("G", 70, 2)
    assert attempt_of(found("%DLQ%G", prepared_offset=70, reconsume_times=3)) == ("G", 70, 3)
    assert attempt_of(found("%RETRY%G", prefix, prepared_offset=70, reconsume_times=2)) is None
    assert attempt_of(found("orders", delayed.prefix(3, "orders", 0), prepared_offset=70)) is None


def test_the_last_send_backs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "ATTEMPTS_KNOWN_MAX", 3)
    table = AttemptTable()
    attempts = [Attempt("G", source, 1) for source in range(5)]
    for end, attempt in enumerate(attempts, 100):
        table.add(attempt, end, 1.0)
    table.check_room(1, 61.0)
    assert [table.end_of(attempt) for attempt in attempts] == [None, None, 102, 103, 104]


def test_all_send_backs_of_a_minute_are_known_and_more_than_that_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "ATTEMPTS_KNOWN_MAX", 3)
    monkeypatch.setattr(retry, "ATTEMPTS_MAX", 8)
    table, reader = AttemptTable(), AttemptTable()
    attempts = [Attempt("G", source, 1) for source in range(8)]
    for second, attempt in enumerate(attempts):
        table.check_room(1, float(second))
        table.add(attempt, 100, float(second))
    assert all(table.end_of(attempt) == 100 for attempt in attempts)
    with pytest.raises(FlowControl):
        table.check_room(1, 59.0)
    reader.restore(table.unwritten())
    assert list(reader) == list(table) == attempts[5:], "the state has a bound of its own"
    table.check_room(2, 61.0)
    known = [table.end_of(attempt) for attempt in attempts]
    assert known == [None, None, *[100] * 6]
    with pytest.raises(FlowControl):
        table.check_room(3, 61.0)
    table.forget_group("H")
    assert [attempt for attempt in attempts if table.end_of(attempt)] == list(reader)
