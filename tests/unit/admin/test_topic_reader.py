from __future__ import annotations

import pytest

from cometmq.admin.connection import Connection
from cometmq.admin.topic_reader import TopicReader, open_reader
from cometmq.errors import InternalError, QueueNotFound
from cometmq.v1 import common_pb2

from .conftest import FakeCluster


@pytest.fixture
def filled(cluster: FakeCluster) -> FakeCluster:
    """Topic T: queues g1/0, g1/1, g2/0, g2/1 with 5, 0, 4 and 1 messages, tags a and b in turn."""
    for broker, queue_id, count in ((cluster.g1, 0, 5), (cluster.g2, 0, 4), (cluster.g2, 1, 1)):
        broker.put("T")
        for number in range(count):
            body = f"{broker.group}/{queue_id}/{number}".encode()
            broker.add("T", queue_id, body, tag="ab"[number % 2])
    return cluster


async def everything(reader: TopicReader) -> list[str]:
    """Bodies until the end, sorted."""
    found: list[str] = []
    while run := await reader.read():
        found += [str(message.body_text) for message in run]
    return sorted(found)


ALL = sorted([f"g1/0/{n}" for n in range(5)] + [f"g2/0/{n}" for n in range(4)] + ["g2/1/0"])


async def test_every_message_is_read_once(connection: Connection, filled: FakeCluster) -> None:
    reader = await open_reader(connection, "T")
    assert await everything(reader) == ALL
    assert await reader.read() == []


async def test_tags_are_searched_through_runs_without_a_match(
    connection: Connection, filled: FakeCluster
) -> None:
    reader = await open_reader(connection, "T", tags=["b"])
    assert await everything(reader) == ["g1/0/1", "g1/0/3", "g2/0/1", "g2/0/3"]


async def test_one_queue_alone(connection: Connection, filled: FakeCluster) -> None:
    reader = await open_reader(connection, "T", broker_group="g2", queue_id=1)
    assert await everything(reader) == ["g2/1/0"]


async def test_reading_from_the_end_sees_only_what_comes_later(
    connection: Connection, filled: FakeCluster
) -> None:
    reader = await open_reader(connection, "T", from_end=True)
    assert await reader.read() == []
    filled.g1.add("T", 1, b"new")
    assert await everything(reader) == ["new"]


async def test_reading_starts_at_the_first_that_is_left(
    connection: Connection, filled: FakeCluster
) -> None:
    filled.g1.min_offsets["T", 0] = 4
    reader = await open_reader(connection, "T", broker_group="g1")
    assert await everything(reader) == ["g1/0/4"]


async def test_a_fenced_position_goes_on_at_the_fence(
    connection: Connection, filled: FakeCluster
) -> None:
    reader = await open_reader(connection, "T", broker_group="g1", queue_id=0)
    filled.g1.fence = (2, 3)
    assert await everything(reader) == ["g1/0/3", "g1/0/4"]


async def test_who_has_not_read_all_that_was_appended_has_not_caught_up(
    connection: Connection, filled: FakeCluster
) -> None:
    filled.g1.unreadable_count = 1
    reader = await open_reader(connection, "T", broker_group="g1", queue_id=0)
    await everything(reader)
    assert not reader.caught_up
    filled.g1.add("T", 0, b"late")
    assert await everything(reader) == ["late"]
    assert reader.caught_up


@pytest.mark.parametrize(("broker_group", "queue_id"), [("g9", None), ("g1", 7)])
async def test_a_queue_that_is_not_there(
    connection: Connection, filled: FakeCluster, broker_group: str, queue_id: int | None
) -> None:
    with pytest.raises(QueueNotFound, match="that can be read"):
        await open_reader(connection, "T", broker_group=broker_group, queue_id=queue_id)


async def test_a_broker_that_moves_a_reader_for_ever_ends_the_reading(
    connection: Connection, filled: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await open_reader(connection, "T", broker_group="g2", queue_id=1)
    moves = 0

    async def fenced(_reader: TopicReader, cursor: object) -> None:
        nonlocal moves
        moves += 1
        assert moves < 1_000
        cursor.position = common_pb2.Position(generation=moves)  # type: ignore[attr-defined]

    monkeypatch.setattr(TopicReader, "_pull_once", fenced)
    with pytest.raises(InternalError, match="reading T"):
        await reader.read()
