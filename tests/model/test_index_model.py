"""The key index against a list of what was sent: any messages, any steps, any stops."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.stores.small_stores import (
    WallClock,
    append,
    append_keyed,
    find_by_key,
    open_store,
)

TOPICS = ("T", "U")
KEYS = ("a", "b", "Aa", "BB", "c#d")  # Aa and BB have one hash


class IndexModel(RuleBasedStateMachine):
    """Any messages, any stops: what is found is right, what lies before the position is found, and
    in the end everything is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.clock = WallClock()
        self.written: list[tuple[int, str, list[str]]] = []  # log offset, topic, keys
        self.open()

    def open(self) -> None:
        self.store = open_store(Path(self.scratch.name), clock=self.clock)

    @rule(
        topic=st.sampled_from(TOPICS),
        keys=st.lists(st.sampled_from(KEYS), max_size=3),
        later_ms=st.integers(0, 3000),
    )
    def send(self, topic: str, keys: list[str], later_ms: int) -> None:
        self.clock.now_ms += later_ms
        if keys:
            appended = append_keyed(self.store, topic, 0, " ".join(keys))
        else:
            appended = append(self.store, (topic, 0, [b"no key"]))
        self.written.append((appended.log_offset, topic, keys))

    @rule()
    def flush(self) -> None:
        self.store.flush_log()

    @rule()
    def checkpoint(self) -> None:
        self.store.flush_queues()

    @rule()
    def step(self) -> None:
        self.store.index_some()

    @rule()
    def stop(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        self.store.abandon()
        self.open()

    @invariant()
    def what_is_indexed_is_found(self) -> None:
        self.store.validate()
        indexed = self.store.index.status.position
        for topic, key in product(TOPICS, [*KEYS, "d"]):
            found = [one.message.log_offset for one in find_by_key(self.store, topic, key)]
            wanted = self.places(topic, key)
            assert found == wanted[len(wanted) - len(found) :], "the newest are missing, if any"
            assert len(found) >= sum(place < indexed for place in wanted)

    def teardown(self) -> None:
        self.store.flush_log()
        while self.store.index_some():
            pass
        assert self.store.index.status.position == self.store.appended_offset
        self.what_is_indexed_is_found()
        self.store.abandon()
        self.scratch.cleanup()

    def places(self, topic: str, key: str) -> list[int]:
        """Where the messages with the key are, newest first."""
        return [
            place
            for place, its_topic, keys in reversed(self.written)
            if its_topic == topic and key in keys
        ]


TestIndexModel = IndexModel.TestCase
