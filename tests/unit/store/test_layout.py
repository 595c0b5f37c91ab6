from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreForeignFile, TopicNameInvalid
from cometmq.store import layout

ROOT = Path("/store")


@given(st.integers(0, 2**63 - 1))
def test_offsets_and_names_are_one_to_one(offset: int) -> None:
    name = layout.offset_name(offset)
    assert len(name) == 20
    assert layout.parse_offset_name(name, ROOT) == offset


def test_rocketmqs_names() -> None:
    assert layout.offset_name(1 << 30) == "00000000001073741824"
    assert layout.StorePaths(ROOT).queue("%RETRY%g", 3) == ROOT / "consumequeue/%RETRY%g/3"


@pytest.mark.parametrize(
    "name", ["1", "0" * 19 + "x", "0" * 21, "lost+found", "0" * 20 + "\n", "\u0660" * 20]
)
def test_other_names_are_foreign(name: str) -> None:
    with pytest.raises(StoreForeignFile, match="20 digits"):
        layout.parse_offset_name(name, ROOT)


@pytest.mark.parametrize("name", ["", "01", "-1", "x", "1\n"])
def test_queues_are_numbers(name: str) -> None:
    with pytest.raises(StoreForeignFile):
        layout.parse_queue_id(name, ROOT)


@pytest.mark.parametrize("topic", ["", ".", "..", "../x", "a/b", "a\n", "a" * 128, "ä", "a\0"])
def test_a_topic_is_never_a_path(topic: str) -> None:
    with pytest.raises(TopicNameInvalid):
        layout.StorePaths(ROOT).topic(topic)
    with pytest.raises(StoreForeignFile):
        layout.parse_topic(topic, ROOT)


def test_index_files_are_named_after_a_local_time() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 67_000)
    assert layout.index_name(round(moment.timestamp() * 1000)) == "20260102030405067"
    assert layout.INDEX_NAME.fullmatch(layout.index_name(0))


@pytest.mark.parametrize("time_ms", [-(2**63), -1, layout.STORE_TIME_MS_MAX, 2**48, 2**63 - 1])
def test_every_time_names_an_index_file(time_ms: int) -> None:
    """Also one that a damaged record has."""
    assert layout.INDEX_NAME.fullmatch(layout.index_name(time_ms))
