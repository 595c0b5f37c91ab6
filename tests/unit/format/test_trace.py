"""Trace records against a reader of RocketMQ's form, written from its TraceDataEncoder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import trace
from cometmq.format.trace import EndTransaction, Pub, Recall, SubAfter, SubBefore, TraceRecord

HOSTILE = st.one_of(
    st.sampled_from(["", "null", "a\x01b", "\x02", "Pub\x011\x02", "k1 k2", "ключ", "x" * 5_000]),
    st.text(max_size=20),
)
NUMBER = st.integers(0, 2**31 - 1)
TIME = st.integers(0, 2**53)
RECORDS: st.SearchStrategy[TraceRecord] = st.one_of(
    st.builds(
        Pub,
        *(TIME, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),
        *(NUMBER, NUMBER, st.integers(0, 4), HOSTILE, st.booleans()),
    ),
    st.builds(SubBefore, TIME, HOSTILE, HOSTILE, HOSTILE, NUMBER, HOSTILE),
    st.builds(
        SubAfter,
        *(HOSTILE, HOSTILE, NUMBER, st.booleans(), HOSTILE, st.integers(0, 4), TIME, HOSTILE),
    ),
    st.builds(
        EndTransaction,
        *(TIME, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),
        *(st.integers(0, 4), HOSTILE, st.sampled_from(["COMMIT_MESSAGE"]), st.booleans()),
    ),
    st.builds(Recall, TIME, HOSTILE, HOSTILE, HOSTILE, st.booleans()),
)


def java_split(text: str, separator: str) -> list[str]:
    """String.split: empty parts at the end are dropped."""
    parts = text.split(separator)
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts


def java_int(text: str) -> int:
    """Integer.parseInt."""
    assert text.isascii()
    number = int(text)
    assert -(2**31) <= number < 2**31
    return number


def read_as_rocketmq(body: str) -> list[dict[str, Any]]:
    """TraceDataEncoder.decoderFromTraceDataString of 5.x, field by field."""
    found = []
    for context in java_split(body, "\x02"):
        line = java_split(context, "\x01")
        if line[0] == "Pub":
            assert len(line) == 14
            found.append(
                {
                    "type": "Pub",
                    "time": int(line[1]),
                    "group": line[3],
                    "topic": line[4],
                    "id": line[5],
                    "keys": line[7],
                    "bytes": java_int(line[9]),
                    "cost": java_int(line[10]),
                    "message_type": ["Normal", "Half", "Commit", "Delay", "Order"][int(line[11])],
                    "offset_id": line[12],
                    "success": line[13],
                }
            )
        elif line[0] == "SubBefore":
            found.append(
                {
                    "type": "SubBefore",
                    "time": int(line[1]),
                    "group": line[3],
                    "request": line[4],
                    "id": line[5],
                    "retries": java_int(line[6]),
                    "keys": line[7],
                }
            )
        elif line[0] == "SubAfter":
            assert len(line) >= 9
            found.append(
                {
                    "type": "SubAfter",
                    "request": line[1],
                    "id": line[2],
                    "cost": java_int(line[3]),
                    "success": line[4],
                    "keys": line[5],
                    "code": java_int(line[6]),
                    "time": int(line[7]),
                    "group": line[8],
                }
            )
        elif line[0] == "EndTransaction":
            found.append(
                {
                    "type": "EndTransaction",
                    "id": line[5],
                    "transaction": line[10],
                    "state": line[11],
                    "from_check": line[12],
                }
            )
        elif line[0] == "Recall":
            found.append({"type": "Recall", "topic": line[4], "id": line[5], "success": line[6]})
        else:
            raise AssertionError(f"RocketMQ knows no {line[0]!r}")
    return found


def written(text: str) -> str:
    """What is left of a text."""
    return text[: trace.TEXT_LENGTH_MAX].replace("\x01", " ").replace("\x02", " ") or "null"


@given(st.lists(RECORDS, min_size=1, max_size=5))
def test_rocketmq_reads_what_we_write_and_so_do_we(records: list[TraceRecord]) -> None:
    body = "".join(map(trace.encode, records))
    theirs = read_as_rocketmq(body)
    assert [one["type"] for one in theirs] == [type(record).__name__ for record in records]
    for record, one in zip(records, theirs, strict=True):
        assert one["id"] == written(record.message_id)
        if isinstance(record, Pub):
            assert (one["time"], one["cost"]) == (record.time_ms, record.cost_ms)
            assert one["success"] == str(record.is_success).lower()
        if isinstance(record, SubBefore | SubAfter):
            assert (one["request"], one["keys"]) == (
                written(record.request_id),
                written(record.keys),
            )
    ours = list(trace.decode(body))
    assert [type(record) for record in ours] == [type(record) for record in records]
    assert [trace.encode(record) for record in ours] == [trace.encode(r) for r in records]


def test_a_line_as_rocketmq_writes_it() -> None:
    """Of a 4.9 producer and a 5.x consumer."""
    body = "Pub\x011700000000000\x01DefaultRegion\x01P\x01T\x01AC1100\x01tag\x01k1 k2\x01"
    body += "10.0.0.1:10911\x0112\x013\x010\x010A000001\x01true\x02"
    body += "SubBefore\x011700000000005\x01null\x01G\x01R1\x01AC1100\x012\x01k1 k2\x02"
    body += "SubAfter\x01R1\x01AC1100\x017\x01false\x01k1 k2\x014\x011700000000012\x01G\x02"
    body += "SubAfter\x01R1\x01AC1100\x017\x01true\x01k1 k2\x010\x02"  # 4.5
    host = "10.0.0.1:10911"
    times = 1700000000000
    assert list(trace.decode(body)) == [
        Pub(times, "P", "T", "AC1100", "tag", "k1 k2", host, 12, 3, 0, "0A000001", True),
        SubBefore(times + 5, "G", "R1", "AC1100", 2, "k1 k2"),
        SubAfter("R1", "AC1100", 7, False, "k1 k2", trace.FAILED, times + 12, "G"),
        SubAfter("R1", "AC1100", 7, True, "k1 k2", 0, 0, ""),
    ]


@pytest.mark.parametrize(
    "body", ["", "\x02\x02", "Pub", "Pub\x01x\x02", "SubBefore\x011\x01r\x02", "Other\x01a", "\x01"]
)
def test_what_is_no_record_is_passed_by(body: str) -> None:
    good = trace.encode(Recall(1, "G", "T", "M", True))
    assert list(trace.decode(f"{body}\x02{good}")) == [Recall(1, "G", "T", "M", True)]


@given(st.text(alphabet="\x01\x02PubSuRecal10 x", max_size=200))
def test_any_text_is_read(body: str) -> None:
    for record in trace.decode(body):
        assert isinstance(record, tuple)


def test_numbers_stay_within_what_java_reads() -> None:
    record = Pub(1, "P", "T", "M", "", "", "", 2**40, -5, 0, "", True)
    [read] = read_as_rocketmq(trace.encode(record))
    assert (read["bytes"], read["cost"]) == (2**31 - 1, 0)
