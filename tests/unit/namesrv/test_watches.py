"""Watchers: what is pending, what is forgotten, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cometmq.errors import LimitExceeded, TopicNameInvalid
from services.namesrv.watches import Watcher, Watchers


class Wakes:
    """Counts how often a stream was woken."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def watchers() -> Iterator[Watchers]:
    watchers = Watchers(streams_max=2, topics_max=3)
    yield watchers
    watchers.validate()


def _all_of(watcher: Watcher) -> list[str]:
    return list(iter(watcher.take, None))


def test_a_new_topic_is_answered_at_once(watchers: Watchers) -> None:
    wakes = Wakes()
    watcher = watchers.open(wakes)
    watchers.add(watcher, ["b", "a"])

    assert wakes.count > 0
    assert _all_of(watcher) == ["b", "a"]
    assert _all_of(watcher) == []


def test_a_known_topic_is_answered_again(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    watchers.add(watcher, ["a"])
    _all_of(watcher)
    watchers.add(watcher, ["a"])
    assert _all_of(watcher) == ["a"]


def test_changes_wait_once_each(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    watchers.add(watcher, ["a", "b"])
    _all_of(watcher)
    for _ in range(100):
        watchers.changed(["b", "a", "other"])
    assert _all_of(watcher) == ["b", "a"]


def test_only_those_who_watch_are_woken(watchers: Watchers) -> None:
    wakes = Wakes(), Wakes()
    first, second = (watchers.open(wake) for wake in wakes)
    watchers.add(first, ["a"])
    watchers.add(second, ["b"])
    _all_of(first)
    _all_of(second)
    before = wakes[1].count
    watchers.changed(["a"])

    assert (_all_of(first), _all_of(second)) == (["a"], [])
    assert wakes[1].count == before


def test_a_removed_topic_is_silent(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    watchers.add(watcher, ["a", "b"])
    watchers.remove(watcher, ["a", "never watched"])
    watchers.changed(["a"])
    assert _all_of(watcher) == ["b"]


def test_a_closed_stream_leaves_nothing_behind(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    watchers.add(watcher, ["a", "b"])
    watchers.close(watcher)
    watchers.close(watcher)

    assert len(watchers) == 0
    assert watchers._by_topic == {}


def test_bad_names_change_nothing(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    with pytest.raises(TopicNameInvalid):
        watchers.add(watcher, ["a", "../b"])
    assert (watcher.topics, _all_of(watcher)) == (set(), [])


def test_the_limits_of_streams_and_topics(watchers: Watchers) -> None:
    watcher = watchers.open(Wakes())
    watchers.open(Wakes())
    with pytest.raises(LimitExceeded, match="watch_streams_max"):
        watchers.open(Wakes())
    watchers.add(watcher, ["a", "b", "b"])
    with pytest.raises(LimitExceeded, match="watch_topics_max"):
        watchers.add(watcher, ["c", "d"])
    assert watcher.topics == {"a", "b"}


def test_all_are_woken_to_look_around(watchers: Watchers) -> None:
    wakes = Wakes()
    watchers.open(wakes)
    watchers.wake_all()
    assert wakes.count == 1


def test_one_address_has_its_share_whatever_its_connections() -> None:
    watchers = Watchers(streams_max=10, topics_max=3, streams_per_peer_max=2, topics_per_peer_max=4)
    one, same = (watchers.open(Wakes(), "10.0.0.1") for _ in range(2))
    with pytest.raises(LimitExceeded, match="watch_streams_per_peer_max"):
        watchers.open(Wakes(), "10.0.0.1")
    other = watchers.open(Wakes(), "10.0.0.2")
    watchers.add(one, ["a", "b", "c"])
    watchers.add(one, ["a", "b"])  # known ones count once
    with pytest.raises(LimitExceeded, match="watch_topics_per_peer_max"):
        watchers.add(same, ["a", "b"])
    assert not same.topics
    watchers.add(same, ["a"])
    watchers.add(other, ["a", "b"])
    watchers.remove(one, ["c", "d"])
    watchers.add(same, ["b"])
    watchers.close(one)
    watchers.close(one)  # twice is no matter
    watchers.add(same, ["c"])
    watchers.open(Wakes(), "10.0.0.1")
