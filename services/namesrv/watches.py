"""Who wants to hear about which topics. Pure: waking a stream is a function handed in.

A watcher remembers names, not routes: the route is read when the stream can take it, so a slow
stream gets only the latest, and what waits for it never grows beyond the topics that it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cometmq.errors import LimitExceeded
from cometmq.messaging.topics import check_name


class Watcher:
    """One stream: the topics that it watches, and those that changed since they were sent."""

    __slots__ = ("_pending", "_wake", "topics")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.topics: set[str] = set()
        self._pending: dict[str, None] = {}  # in order of the first change
        self._wake = wake

    def note(self, topic: str) -> None:
        """The topic has to be sent (again)."""
        self._pending[topic] = None
        self._wake()

    def forget(self, topic: str) -> None:
        self._pending.pop(topic, None)

    def wake(self) -> None:
        self._wake()

    def take(self) -> str | None:
        """The next topic to send; None: all is sent."""
        if not self._pending:
            return None
        topic = next(iter(self._pending))
        del self._pending[topic]
        return topic


class Watchers:
    """All streams, found by topic."""

    def __init__(self, *, streams_max: int, topics_max: int) -> None:
        self._streams_max = streams_max
        self._topics_max = topics_max  # of one stream
        self._all: set[Watcher] = set()
        self._by_topic: dict[str, set[Watcher]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def open(self, wake: Callable[[], None]) -> Watcher:
        """A new stream that watches nothing yet. LimitExceeded."""
        if len(self._all) >= self._streams_max:
            raise LimitExceeded(f"{self._streams_max} watch streams are open (watch_streams_max)")
        watcher = Watcher(wake)
        self._all.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        """Forget a stream."""
        self.remove(watcher, list(watcher.topics))
        self._all.discard(watcher)

    def add(self, watcher: Watcher, topics: Iterable[str]) -> None:
        """Watch ``topics`` too and send their state now, known ones again.

        TopicNameInvalid or LimitExceeded: then nothing has changed.
        """
        wanted = dict.fromkeys(topics)
        for topic in wanted:
            check_name(topic)
        if len(watcher.topics | wanted.keys()) > self._topics_max:
            raise LimitExceeded(f"a stream watches {self._topics_max} topics (watch_topics_max)")
        for topic in wanted:
            watcher.topics.add(topic)
            self._by_topic.setdefault(topic, set()).add(watcher)
            watcher.note(topic)

    def remove(self, watcher: Watcher, topics: Iterable[str]) -> None:
        """Watch ``topics`` no longer; those that are not watched do not matter."""
        for topic in watcher.topics.intersection(topics):
            watcher.topics.remove(topic)
            watcher.forget(topic)
            watching = self._by_topic[topic]
            watching.remove(watcher)
            if not watching:
                del self._by_topic[topic]

    def changed(self, topics: Iterable[str]) -> None:
        """The routes of ``topics`` are others now."""
        for topic in topics:
            for watcher in self._by_topic.get(topic, ()):
                watcher.note(topic)

    def wake_all(self) -> None:
        """Let every stream look around: the process drains."""
        for watcher in self._all:
            watcher.wake()
