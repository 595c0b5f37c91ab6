"""Receipts of sent messages, answers to pulls, verdicts: objects that applications get back, or
answer with. Light and lazy by design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from cometmq.client.received import ReceivedMessage
from cometmq.format.recall import Handle, RecallRun
from cometmq.model import Position, QueueRef, SendStatus
from cometmq.native import untracked


class StoredRun:
    """Where the messages of one segment were stored; shared by their receipts."""

    __slots__ = (
        "first",
        "first_counter",
        "id_stream",
        "is_delayed",
        "log_offset",
        "queue",
        "queue_offset",
        "recall",
        "starts",
        "status",
        "store_time_ms",
    )

    def __init__(self, queue: QueueRef, queue_offset: int, store_time_ms: int) -> None:
        self.queue = queue
        self.queue_offset = queue_offset  # of the segment's first message
        self.store_time_ms = store_time_ms
        self.log_offset = 0  # of the batch's first record
        self.starts: Sequence[int] = ()  # byte offset of each record of the batch
        self.first = 0  # index of the segment's first record in the batch
        self.status = SendStatus.SEND_OK
        self.is_delayed = False  # the messages wait in a system queue, at these offsets
        self.id_stream = ""
        self.first_counter = 0
        self.recall: Recallable | None = None  # of messages that wait for a time of their own


class Recallable(NamedTuple):
    """The parts of a segment's recall handles: the broker's signature, and when each message is
    due.
    """

    run: RecallRun
    mac: bytes
    dues_ms: Sequence[int]


@untracked
class SendReceipt:
    """Where a message was stored. All values are computed when asked for."""

    __slots__ = ("_index", "_run")

    def __init__(self, run: StoredRun, index: int) -> None:
        self._run = run
        self._index = index  # within the segment

    def __reduce__(self) -> tuple[type[SendReceipt], tuple[StoredRun, int]]:
        return type(self), (self._run, self._index)

    @property
    def message_id(self) -> str:
        """``<broker group>/<log offset>``."""
        run = self._run
        offset = run.log_offset + run.starts[run.first + self._index]
        return f"{run.queue.broker_group}/{offset}"

    @property
    def status(self) -> SendStatus:
        """Whether everything that the topic demands is fulfilled. Stored it is in any case: sending
        it again would store it twice.
        """
        return self._run.status

    @property
    def queue(self) -> QueueRef:
        return self._run.queue

    @property
    def queue_offset(self) -> int:
        """Its place in the queue; -1 for a delayed message or one of a transaction, which is not
        there yet.
        """
        return -1 if self._run.is_delayed else self._run.queue_offset + self._index

    @property
    def store_time_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, by the broker's clock."""
        return self._run.store_time_ms

    @property
    def unique_id(self) -> str:
        """The message's UNIQ_KEY: 34 hexadecimal digits."""
        return f"{self._run.id_stream}{self._run.first_counter + self._index:08X}"

    @property
    def recall_handle(self) -> str:
        """The handle by which ``Producer.recall`` takes the message back until it is due; empty
        unless it waits for a time of its own.
        """
        recall = self._run.recall
        if recall is None:
            return ""
        due_ms = recall.dues_ms[self._index]
        return Handle(recall.run, self._index, due_ms, self.unique_id, recall.mac).encode()

    def __repr__(self) -> str:
        return f"SendReceipt({self.message_id!r}, {self.queue}, queue_offset={self.queue_offset})"


def place_of(receipt: SendReceipt) -> tuple[StoredRun, int]:
    """Where the receipt's segment was stored, and the message's index in it."""
    return receipt._run, receipt._index


class ConsumeResult(Enum):
    """A listener's verdict on the messages it was given."""

    SUCCESS = "success"  # done; they will not come again unless the process dies before the commit
    LATER = "later"  # not now: they come again later, as Later() says


@dataclass(frozen=True, slots=True)
class Later:
    """A listener's verdict on a list of messages: the first ``done`` of them are done (RocketMQ's
    ackIndex, plus one), the others come again.

    ``delay_level``: after how long, 1 (1 s) to 18 (2 h); 0 = as the number of tries says; -1 =
    never, they are dead letters at once. ``delay_ms``: instead of a level, so many ms, at most 40
    days. ``suspend_ms``: of a consumer in order, how long the queue waits; 0 = ``suspend_queue_ms``
    of its options.
    """

    done: int = 0
    delay_level: int = 0
    suspend_ms: int = 0
    delay_ms: int = 0


class MessageModel(Enum):
    """Which members of a group get a message."""

    CLUSTERING = "clustering"  # one of them
    BROADCASTING = "broadcasting"  # all of them


class ConsumeMode(StrEnum):
    """The way in which members of a group get messages; a group has one mode."""

    PULL = "pull"  # each pulls its share of the queues
    POP = "pop"  # all receive from all queues, and acknowledge each message


class OrderBy(StrEnum):
    """The unit within which a consumer keeps the order."""

    QUEUE = "queue"  # all messages of a queue
    MESSAGE_GROUP = "message_group"  # those of a queue that have the same sharding key


class ConsumeFrom(Enum):
    """Where a group starts in a queue for which it has never committed."""

    FIRST = "first"  # the oldest message that is there
    LAST = "last"  # what arrives from now on
    TIMESTAMP = "timestamp"  # the first message stored at consume_from_time_ms or later


class PullOutcome(Enum):
    """The outcome of a pull."""

    FOUND = "found"
    NO_MATCH = "no_match"  # messages, but none with the wanted tags: pull on at once
    NOT_FOUND = "not_found"  # nothing there yet
    OFFSET_MOVED = "offset_moved"  # the position lay outside the queue: go on at next_position


@dataclass(frozen=True, slots=True)
class PullBatch:
    """The answer to one pull. ``min_offset`` and ``max_offset`` bound what can be read (the upper
    one exclusive). ``size_bytes``: of the messages' records.
    """

    outcome: PullOutcome
    messages: list[ReceivedMessage]
    next_position: Position
    min_offset: int
    max_offset: int
    size_bytes: int
