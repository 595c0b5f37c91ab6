from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import pyarrow
import pytest

from cometmq.client import QueueRef, ReceivedMessage, to_arrow
from cometmq.errors import ConfigInvalid, InvalidRequest
from cometmq.format.record import encode

QUEUE = QueueRef("T", 3, "g1")


def message(body: bytes, properties: bytes, **fields: Any) -> ReceivedMessage:
    hosts = {"born_host": bytes(8), "store_host": bytes(8)}
    raw = encode(b"T", 3, body, properties, **{"born_time_ms": 5, **hosts, **fields})
    return ReceivedMessage(raw, QUEUE)


def test_a_message_is_a_row() -> None:
    properties = b"UNIQ_KEY\x01ID\x02KEYS\x01k1 k2\x02TAGS\x01A\x02"
    full = message(
        b"\x00\xff",
        properties,
        queue_offset=7,
        log_offset=800,
        store_time_ms=6,
        reconsume_times=4,
        flag=-2,
    )
    first, second = to_arrow([full, message(b"", b"")]).to_pylist(maps_as_pydicts="strict")
    assert first == {
        "topic": "T",
        "broker_group": "g1",
        "queue_id": 3,
        "queue_offset": 7,
        "message_id": "g1/800",
        "unique_id": "ID",
        "born_time": datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC),
        "store_time": datetime(1970, 1, 1, 0, 0, 0, 6_000, UTC),
        "reconsume_times": 4,
        "flag": -2,
        "tag": "A",
        "keys": ["k1", "k2"],
        "properties": {"UNIQ_KEY": "ID", "KEYS": "k1 k2", "TAGS": "A"},
        "body": b"\x00\xff",
    }
    assert [second[name] for name in ("unique_id", "tag", "keys", "body")] == [None, None, [], b""]


def test_only_the_wanted_columns_are_there_and_types_do_not_depend_on_rows() -> None:
    table = to_arrow([], ["body", "queue_offset"])
    assert table.schema == pyarrow.schema(
        [("body", pyarrow.binary()), ("queue_offset", pyarrow.int64())]
    )
    assert to_arrow([]).schema == to_arrow([message(b"", b"")]).schema


@pytest.mark.parametrize("columns", ["body", ["body", "size"]])
def test_a_column_that_is_not_there_is_refused(columns: Any) -> None:
    with pytest.raises(InvalidRequest, match="columns is a collection of some of topic, "):
        to_arrow([], columns)


def test_without_arrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'cometmq\[arrow\]'"):
        to_arrow([])
