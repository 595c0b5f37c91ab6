"""What was asked of a store and what it promised, and whether it kept its word.

Naive on purpose: a list of messages in the order of the log. A record of topic ``S`` deletes the
topic that its body names, as :class:`tests.support.stores.small_stores.Deletions` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.format import record
from cometmq.store.base import BaseStore
from tests.support.faults import tally
from tests.support.stores.small_stores import Run, find_by_key, read_queue

Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Message:
    topic: str
    queue_id: int
    body: bytes
    keys: str = ""


class Ledger:
    """``messages`` are all that ever were in the log, oldest first; the first ``promised`` of them
    must survive whatever comes, but for the first ``gone``, which retention removed. ``doubtful``:
    the batch whose fate nobody was told.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ends: list[int] = []  # a log offset behind each of them, in the same file
        self.promised = 0
        self.gone = 0
        self.doubtful: list[Message] = []

    # --- what happens -----------------------------------------------------------------------------

    def asks(self, runs: Sequence[Run], keys: str = "") -> None:
        """A batch is handed to the store, with ``keys`` for all of its messages."""
        assert not self.doubtful, "one at a time"
        self.doubtful = [Message(t, q, body, keys) for t, q, bodies in runs for body in bodies]

    def refused(self) -> None:
        """The store said that nothing of it was stored."""
        self.doubtful = []

    def stored(self, end: int) -> None:
        """The store said that all of it is in the log, which ends at ``end``."""
        self.messages += self.doubtful
        self.ends += [end] * len(self.doubtful)
        self.doubtful = []

    def flushed(self, position: int) -> None:
        """The store said that the log is on the disk up to ``position``."""
        self.promised = max(self.promised, sum(end <= position for end in self.ends))

    def removed(self, log_start: int) -> None:
        """Retention has let everything before ``log_start`` go."""
        self.gone = sum(end <= log_start for end in self.ends)

    # --- what is left of it -----------------------------------------------------------------------

    def recovered(self, store: BaseStore, *, power_cut: bool) -> None:
        """After a stop that was not in order: what the opened store holds is a beginning of what
        was asked, and all that was promised is in it. From now on it must stay.
        """
        found = logged(store)
        self.removed(store.min_offset)
        asked = [*self.messages, *self.doubtful][self.gone :]
        assert [m for m, _ in found] == asked[: len(found)], "other messages, or in another order"
        least = (self.promised if power_cut else len(self.messages)) - self.gone
        tally.count("messages that had to be there", max(0, least))
        tally.count("messages lost", max(0, least - len(found)))
        assert len(found) >= least, f"lost: {least - len(found)} of {least} messages"
        self.messages[self.gone :] = [message for message, _ in found]
        self.ends[self.gone :] = [end for _, end in found]
        self.doubtful = []
        assert store.flushed_offset == store.appended_offset
        self.promised = len(self.messages)
        self.check(store)

    def check(self, store: BaseStore) -> None:
        """The store serves exactly what it holds, each message at its place in its queue."""
        queues = self.queues()
        for key in set(store.queues()) - set(queues):  # all that they had was lost, or deleted
            assert store.queue_bounds(*key) == (0, 0), key
        for (topic, queue_id), expected in queues.items():
            low = sum(message is None for message in expected)
            assert store.queue_bounds(topic, queue_id) == (low, len(expected)), (topic, queue_id)
            found = [r.body for r in read_queue(store, topic, queue_id)]
            assert found == [message.body for message in expected[low:] if message]

    def check_index(self, store: BaseStore) -> None:
        """Once the index has come to the end, every key finds its messages, the newest first."""
        while store.index_some():
            pass
        held = self.messages[self.gone :]
        for topic, key in {(m.topic, key) for m in held for key in m.keys.split()}:
            named = [m for m in held if m.topic == topic and key in m.keys.split()]
            found = [one.message.body for one in find_by_key(store, topic, key)]
            assert found == [m.body for m in reversed(named)], (topic, key)

    def queues(self) -> dict[Queue, list[Message | None]]:
        """The messages of every queue that was not deleted; None for one that retention removed."""
        queues: dict[Queue, list[Message | None]] = {}
        for number, message in enumerate(self.messages):
            held = message if number >= self.gone else None
            queues.setdefault((message.topic, message.queue_id), []).append(held)
            if message.topic == "S":
                dropped = message.body.decode()
                queues = {key: held for key, held in queues.items() if key[0] != dropped}
        return queues


def logged(store: BaseStore) -> list[tuple[Message, int]]:
    """Every message of the log with the offset behind it, every record checked."""
    found: list[tuple[Message, int]] = []
    at = store.min_offset
    while chunk := store.read_chunk(at, 64 * 1024):
        if chunk.data[4:8] != b"\xcb\xd4\x31\x94":  # not an end mark
            found += _messages(chunk.data, at)
        at = chunk.next_offset
    return found


def _messages(data: bytes, start: int) -> list[tuple[Message, int]]:
    found, at = [], 0
    while at < len(data):
        checked = record.check(data, at, log_offset=start + at, bytes_left=1 << 30)
        assert checked.record is not None, f"at {start + at}: {checked.reason}"
        one = checked.record
        at += checked.size
        keys = one.properties.get("KEYS", "")
        found.append((Message(one.topic, one.queue_id, one.body, keys), start + at))
    return found
