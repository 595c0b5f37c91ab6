from __future__ import annotations

import pytest

from cometmq.errors import StoreDamaged
from cometmq.format import queueunit, record
from cometmq.store.log.lost import LOST_RECORD_BYTES_MIN, LOST_TOPIC, lost_record, lost_unit
from cometmq.store.log.units import run_of


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
