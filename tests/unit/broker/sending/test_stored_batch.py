from __future__ import annotations

from typing import Any

import pytest

from cometmq.format import delayed, halves, properties, record, timers
from cometmq.format.halves import HALF_QUEUE, HalfForm
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_QUEUE
from services.broker.sending.stored_batch import is_same
from tests.support.stores.small_stores import HOST

STORED_MS = 1_800_000_000_000
PAIRS = {"UNIQ_KEY": "order-5", "TAGS": "A", "a": "1", "b": "2"}
FORMS = {
    "plain": (("T", 1), b""),
    "level": (
        (delayed.SCHEDULE_TOPIC, 2),
        delayed.stored_prefix(3, "T", 1, wait_store=False),
    ),
    "time": (TIMER_QUEUE, timers.prefix_at("T", 1, STORED_MS + 5)),
    "half": (HALF_QUEUE, halves.prefix(HalfForm("P", 60), "T", 1)),
}


def made(
    pairs: dict[str, str], queue: tuple[str, int] = ("T", 1), prefix: bytes = b"", **fields: Any
) -> Record:
    wanted = {"body": b"b", "flag": 0, "born_time_ms": 1, **fields}
    body = wanted.pop("body")
    raw = prefix + properties.encode(pairs)
    data = record.encode(
        queue[0].encode(), queue[1], body, raw, born_host=HOST, store_host=HOST, **wanted
    )
    return record.decode(data)


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_properties_means_nothing(form: str) -> None:
    queue, prefix = FORMS[form]
    backwards = dict(reversed(PAIRS.items()))
    assert is_same(made(PAIRS, queue, prefix), made(backwards, queue, prefix))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "other",
    [
        {**PAIRS, "a": "2", "b": "1"},
        {**PAIRS, "c": "3"},
        {name: PAIRS[name] for name in ("UNIQ_KEY", "TAGS", "a")},
    ],
)
def test_other_properties_are_another_message(form: str, other: dict[str, str]) -> None:
    queue, prefix = FORMS[form]
    assert not is_same(made(PAIRS, queue, prefix), made(other, queue, prefix))


@pytest.mark.parametrize("other", [{"body": b"c"}, {"flag": 1}, {"born_time_ms": 2}])
def test_anything_else_is_another_message(other: dict[str, Any]) -> None:
    assert not is_same(made(PAIRS), made(PAIRS, **other))


def test_a_delay_is_stored_as_a_time() -> None:
    prefixes = [timers.prefix_at("T", 1, ms) for ms in (STORED_MS + 5_000, 5_000, 4_000, STORED_MS)]
    stored, sent, shorter, earlier = (
        made(PAIRS, TIMER_QUEUE, prefix, store_time_ms=STORED_MS) for prefix in prefixes
    )
    backwards = made(dict(reversed(PAIRS.items())), TIMER_QUEUE, prefixes[1])
    assert is_same(stored, sent)
    assert is_same(stored, backwards)
    assert not is_same(stored, shorter)
    assert not is_same(stored, earlier)


def test_a_delay_may_count_from_before_the_store_time() -> None:
    """The log is ahead of the clock after a jump."""
    prefixes = [timers.prefix_at("T", 1, ms) for ms in (STORED_MS - 600_000 + 5_000, 5_000)]
    stored, sent = (
        made(PAIRS, TIMER_QUEUE, prefix, store_time_ms=STORED_MS) for prefix in prefixes
    )
    assert is_same(stored, sent)
