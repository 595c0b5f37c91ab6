from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest

from cometmq.client.reading import start_positions
from cometmq.client.reading.start_positions import NewTopics
from cometmq.model import QueueRef

G1, G2 = QueueRef("T", 0, "g1"), QueueRef("T", 0, "g2")


class Topic:
    """The topic T at two broker groups. ``begun``: where the group has begun, call by call."""

    def __init__(self, *begun: set[str], is_shared: bool = True) -> None:
        self.begun = list(begun)
        self.calls: Any = mock.Mock()
        self.calls.queues_of.return_value = [G1, G2]
        self.calls.was_absent.return_value = False
        self.topics = NewTopics(self.calls, self._begun_at, is_shared=is_shared)

    async def _begun_at(self, queues: Collection[QueueRef]) -> set[str]:
        assert list(queues) == [G1, G2]
        return self.begun.pop(0) if len(self.begun) > 1 else self.begun[0]

    async def new_at(self) -> set[str]:
        return set(await self.topics.new_at("T"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_positions, "BEGUN_POLL_S", 0.0)
    monkeypatch.setattr(start_positions, "BEGIN_S_MAX", 0.05)


async def test_a_group_without_any_position_is_new_at_all_broker_groups() -> None:
    topic = Topic(set())
    assert await topic.new_at() == {"g1", "g2"}
    topic.topics.begun("T", ["g1"])
    assert await topic.new_at() == {"g2"}, "what appears at g1 now appeared later"


async def test_a_position_anywhere_makes_it_new_nowhere() -> None:
    assert await Topic({"g2"}).new_at() == set()


async def test_a_member_that_begins_just_now_may_end_first() -> None:
    """It has begun at one broker group, and is about to at the other."""
    topic = Topic({"g1"}, {"g1"}, {"g1", "g2"})
    assert await topic.new_at() == set()
    assert topic.begun == [{"g1", "g2"}], "it was waited for"
    alone = Topic({"g1"}, {"g1", "g2"}, is_shared=False)
    assert await alone.new_at() == set()
    assert alone.begun == [{"g1", "g2"}], "nobody else begins: asked once"


async def test_a_topic_that_was_absent_is_new_nowhere() -> None:
    topic = Topic(set())
    topic.calls.was_absent.return_value = True
    assert await topic.new_at() == set()
