from __future__ import annotations

import pytest

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import properties, queueunit, record, taghash
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.store.log.units import (
    LOST_RECORD_BYTES_MIN,
    LOST_TOPIC,
    lost_record,
    lost_unit,
    run_of,
    tags_code,
)

HOST = record.host_bytes("127.0.0.1", 1)


def made(topic: str = "T", sys_flag: int = 0, **given: str) -> record.Record:
    return record.decode(
        record.encode(
            topic.encode(),
            3,
            b"body",
            properties.encode(given),
            born_time_ms=1,
            born_host=HOST,
            store_host=HOST,
            sys_flag=sys_flag,
            queue_offset=5,
            log_offset=700,
            store_time_ms=10_000,
        )
    )


def test_a_record_is_a_run_of_one() -> None:
    found = made(TAGS="x")
    run = run_of(found, 44)
    assert (run.end, run.record_count, run.last_bytes) == (44, 1, found.size)
    assert (run.first_time_ms, run.last_time_ms, run.times_fall) == (10_000, 10_000, False)
    [queue] = run.queues
    unit = queueunit.pack(700, found.size, taghash.tags_code(b"x"))
    assert queue == ("T", 3, 5, unit)


@pytest.mark.parametrize(
    ("transaction", "queues"),
    [(0, 1), (4, 0), (8, 1), (12, 0)],
    ids="none prepared commit rollback".split(),  # noqa: SIM905
)
def test_only_committed_messages_get_a_unit(transaction: int, queues: int) -> None:
    assert len(run_of(made(sys_flag=transaction), 0).queues) == queues


@pytest.mark.parametrize("flag", [64, 128, 192])
def test_a_record_that_holds_a_batch_is_refused_by_name(flag: int) -> None:
    with pytest.raises(StoreForeignFile, match="BatchCQ"):
        run_of(made(sys_flag=flag, INNER_NUM="3"), 0)


@pytest.mark.parametrize("flag", [64, 128, 192])
def test_the_bits_of_a_batch_alone_are_flipped_bits_of_one_message(flag: int) -> None:
    assert run_of(made(sys_flag=flag), 0).queues == run_of(made(), 0).queues


@pytest.mark.parametrize(
    ("level", "delay_s"),
    [("1", 1), ("3", 10), ("5", 60), ("14", 600), ("15", 1200), ("18", 7200), ("19", 7200)],
)
def test_a_delayed_message_has_its_time_instead_of_a_tag(level: str, delay_s: int) -> None:
    assert tags_code(made(SCHEDULE_TOPIC, DELAY=level, TAGS="x")) == 10_000 + 1000 * delay_s


def test_what_was_delivered_after_a_delay_has_its_tag() -> None:
    assert tags_code(made("T", DELAY="3", TAGS="x")) == taghash.tags_code(b"x")
    assert tags_code(made(SCHEDULE_TOPIC, TAGS="x")) == taghash.tags_code(b"x")


@pytest.mark.parametrize("level", ["0", "-2", "soon"])
def test_what_is_no_level_leaves_the_tag(level: str) -> None:
    assert tags_code(made(SCHEDULE_TOPIC, DELAY=level, TAGS="x")) == taghash.tags_code(b"x")


# --- messages that damage took --------------------------------------------------------------------


@pytest.mark.parametrize("size", [LOST_RECORD_BYTES_MIN, LOST_RECORD_BYTES_MIN + 1, 5000])
def test_the_place_of_what_was_lost_is_a_good_record_without_a_unit(size: int) -> None:
    damaged = bytes(range(256)) * 20
    written = lost_record(4096, damaged[:size], 77)
    found = record.check(written, 0, log_offset=4096, bytes_left=size + 8)
    assert found.record is not None
    assert (found.size, found.record.topic, found.record.store_time_ms) == (size, LOST_TOPIC, 77)
    assert found.record.body == damaged[: size - LOST_RECORD_BYTES_MIN], "what stood there is kept"
    assert run_of(found.record, size).queues == []


def test_too_small_a_place_cannot_be_marked() -> None:
    with pytest.raises(StoreDamaged, match="too few to be written off"):
        lost_record(0, bytes(LOST_RECORD_BYTES_MIN - 1), 0)


def test_a_unit_of_a_lost_message_is_no_end_and_no_filler() -> None:
    position, size, code = queueunit.unit_at(lost_unit(500), 0)
    assert (position, size, code) == (500, queueunit.LOST_SIZE, 0)
    assert queueunit.is_message(position, size)
