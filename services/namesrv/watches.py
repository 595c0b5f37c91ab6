"""Watches of routes and registrations. Pure: a function that wakes the stream is passed in.

A watcher keeps names, not routes. The route is read when the stream can take it, so a slow stream
gets only the latest, and has never more to send than the topics that it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from cometmq.errors import LimitExceeded
from cometmq.messaging.topics import check_name
from cometmq.rpc.shares import Shares

STREAMS_PER_PEER_MAX = 5_000
TOPICS_PER_PEER_MAX = 200_000


class Watcher:
    """One stream: its topics, and those that changed since the stream has sent them."""

    __slots__ = ("_pending", "address", "topics", "wake")

    def __init__(self, wake: Callable[[], None], address: str = "") -> None:
        self.wake = wake
        self.address = address
        self.topics: set[str] = set()
        self._pending: dict[str, None] = {}  # in order of the first change

    def note(self, topic: str) -> None:
        """The stream has to send the topic (again)."""
        self._pending[topic] = None
        self.wake()

    def forget(self, topic: str) -> None:
        self._pending.pop(topic, None)

    @property
    def pending_count(self) -> int:
        """Topics that the stream has to send."""
        return len(self._pending)

    def take(self) -> str | None:
        """The next topic to send; None: all are sent."""
        if not self._pending:
            return None
        topic = next(iter(self._pending))
        del self._pending[topic]
        return topic


class Registrations:
    """Watches of registrations, by the key of the member or the pull-hold."""

    def __init__(self, *, streams_max: int) -> None:
        self._streams_max = streams_max
        self._wakes: dict[Hashable, list[Callable[[], None]]] = {}
        self._count = 0

    @contextmanager
    def watching(self, key: Hashable, wake: Callable[[], None]) -> Iterator[None]:
        """Calls ``wake`` at each change until the block ends. LimitExceeded."""
        if self._count >= self._streams_max:
            raise LimitExceeded(f"{self._streams_max} registrations are watched (members_max)")
        self._count += 1
        self._wakes.setdefault(key, []).append(wake)
        try:
            yield
        finally:
            self._count -= 1
            self._wakes[key].remove(wake)
            if not self._wakes[key]:
                del self._wakes[key]

    def changed(self, *key: Hashable) -> None:
        for wake in self._wakes.get(key, ()):
            wake()

    def wake_all(self) -> None:
        """Wakes every stream, because the process drains."""
        for wakes in self._wakes.values():
            for wake in wakes:
                wake()


class Watchers:
    """The streams that watch routes, by topic."""

    def __init__(
        self,
        *,
        streams_max: int,
        topics_max: int,
        streams_per_peer_max: int = STREAMS_PER_PEER_MAX,
        topics_per_peer_max: int = TOPICS_PER_PEER_MAX,
    ) -> None:
        self._streams_max = streams_max
        self._topics_max = topics_max  # of one stream
        self._streams = Shares(streams_per_peer_max, "watch streams", "watch_streams_per_peer_max")
        self._topics = Shares(topics_per_peer_max, "watched topics", "watch_topics_per_peer_max")
        self._all: set[Watcher] = set()
        self._by_topic: dict[str, set[Watcher]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def open(self, wake: Callable[[], None], address: str = "") -> Watcher:
        """A new stream of a client at ``address``, without topics. LimitExceeded."""
        if len(self._all) >= self._streams_max:
            raise LimitExceeded(f"{self._streams_max} watch streams are open (watch_streams_max)")
        self._streams.take(address)
        watcher = Watcher(wake, address)
        self._all.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        """Removes a stream."""
        self.remove(watcher, list(watcher.topics))
        if watcher in self._all:
            self._all.remove(watcher)
            self._streams.give_back(watcher.address)

    def add(self, watcher: Watcher, topics: Iterable[str]) -> None:
        """Watches ``topics`` too, and sends the routes of all of them now. TopicNameInvalid,
        LimitExceeded: nothing has changed.
        """
        wanted = dict.fromkeys(topics)
        for topic in wanted:
            check_name(topic)
        if len(watcher.topics | wanted.keys()) > self._topics_max:
            raise LimitExceeded(f"a stream watches {self._topics_max} topics (watch_topics_max)")
        self._topics.take(watcher.address, len(wanted.keys() - watcher.topics))
        for topic in wanted:
            watcher.topics.add(topic)
            self._by_topic.setdefault(topic, set()).add(watcher)
            watcher.note(topic)

    def remove(self, watcher: Watcher, topics: Iterable[str]) -> None:
        """Stops watching ``topics``; one that is not watched is no error."""
        for topic in watcher.topics.intersection(topics):
            watcher.topics.remove(topic)
            self._topics.give_back(watcher.address)
            watcher.forget(topic)
            watching = self._by_topic[topic]
            watching.remove(watcher)
            if not watching:
                del self._by_topic[topic]

    def changed(self, topics: Iterable[str]) -> None:
        """The routes of ``topics`` have changed."""
        for topic in topics:
            for watcher in self._by_topic.get(topic, ()):
                watcher.note(topic)

    def validate(self) -> None:
        """Topics and streams name each other; for tests."""
        by_topic: dict[str, set[Watcher]] = {}
        for watcher in self._all:
            assert len(watcher.topics) <= self._topics_max
            assert watcher.pending_count <= len(watcher.topics)
            for topic in watcher.topics:
                by_topic.setdefault(topic, set()).add(watcher)
        assert self._by_topic == by_topic
        assert len(self._all) <= self._streams_max

    def wake_all(self) -> None:
        """Wakes every stream, because the process drains."""
        for watcher in self._all:
            watcher.wake()
