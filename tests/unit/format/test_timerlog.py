"""RocketMQ's timer files, read back by the rules of its own reader."""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import timerlog
from cometmq.format.timerlog import TimerCheck, WaitingRecord

NOW_MS = 1_700_000_000_123
BASE_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def deliveries(content: bytearray) -> dict[int, list[tuple[int, int]]]:
    """By second, (magic, log offset) of the units as RocketMQ finds them: it notes the last unit of
    each second, and follows the chain from there.
    """
    last: dict[int, int] = {}
    units: dict[int, tuple[int, int, int, int]] = {}
    for place in range(0, len(content), 52):
        size, before, magic, written, after = struct.unpack_from(">iqiqi", content, place)
        log_offset, record_size, _, zero = struct.unpack_from(">qiiq", content, place + 28)
        assert (size, zero) == (52, 0)
        assert record_size == 100
        units[place] = (before, magic, written + after, log_offset)
        last[written + after] = place
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for second, place in last.items():
        while place != -1:
            before, magic, its_second, log_offset = units[place]
            assert its_second == second
            found[second].append((magic, log_offset))
            place = before
    return found


@given(st.lists(st.integers(NOW_MS - 3 * DAY_MS, NOW_MS + 40 * DAY_MS), max_size=40), st.booleans())
def test_each_is_found_once_and_never_early(dues: list[int], last_waits: bool) -> None:
    records = [WaitingRecord(due_ms, 100 * n, 100) for n, due_ms in enumerate(dues)]
    last = records[-1][1:] if records and last_waits else (100_000, 100)
    content, first_ms = timerlog.encode_log(iter(records), last, NOW_MS)
    found = deliveries(content)
    listed = {at: (second, magic) for second, some in found.items() for magic, at in some}
    assert len(listed) == len(content) // 52
    for due_ms, log_offset, _ in records:
        second, magic = listed.pop(log_offset)
        assert second % 1000 == 0
        if magic == 3:  # RocketMQ stores it once more before its time
            assert BASE_MS + DAY_MS <= second <= BASE_MS + 2 * DAY_MS < due_ms
            continue
        assert magic == 1
        assert second + 1000 > due_ms or due_ms < second, "a second is delivered when it is over"
        assert second == max(due_ms // 1000 * 1000, BASE_MS - DAY_MS)
        assert second >= first_ms
    # RocketMQ goes on behind the record of the last unit.
    assert listed == ({} if not records or last == records[-1][1:] else {last[0]: (BASE_MS, 4)})
    if content:
        assert struct.unpack_from(">qi", content, len(content) - 24) == last


def test_the_room_of_a_file() -> None:
    assert timerlog.units_max(100 * 1024 * 1024) == 2_016_492
    assert timerlog.units_max(52 * 7 + 16) == 7


def test_the_checkpoint_that_rocketmq_reads() -> None:
    content = timerlog.encode_check(NOW_MS, 12, 104, NOW_MS)
    assert len(content) == 4_096
    assert struct.unpack_from(">7q", content) == (BASE_MS, 104, 12, 12, 0, NOW_MS, 0)
    assert timerlog.decode_check(content) == TimerCheck(BASE_MS, 12, is_ours=True)
    # RocketMQ writes its fields over ours, and leaves what is behind them.
    theirs = struct.pack(">7q", BASE_MS + 1000, 104, 13, 13, 0, NOW_MS, 1) + content[56:]
    assert timerlog.decode_check(theirs) == TimerCheck(BASE_MS + 1000, 13)


def test_the_checkpoint_is_read_strictly() -> None:
    good = struct.pack(">qqqq", NOW_MS, 7, 12, 0) + bytes(24)
    assert timerlog.decode_check(good) == TimerCheck(NOW_MS, 12)
    for wrong in (None, b"", good[:20], bytes(56), struct.pack(">qqq", NOW_MS, 0, -1)):
        assert timerlog.decode_check(wrong) is None
    forged = good[:56] + b"cometmq\0" + struct.pack(">I", zlib.crc32(good[:55]))
    assert timerlog.decode_check(forged) == TimerCheck(NOW_MS, 12)
