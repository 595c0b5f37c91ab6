"""The places of committed messages. A call ends many halves at once, so a receipt is made when
somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from cometmq.client.messages import StoredRun
from cometmq.model import QueueRef
from cometmq.v1 import broker_pb2


class Halves(NamedTuple):
    """Half messages that were stored one behind the other: from index ``first`` of a run on."""

    run: StoredRun
    first: int
    size: int


class Ended(NamedTuple):
    """The outcome of halves that follow each other: from message ``first`` of a result on."""

    result: broker_pb2.TransactionResult
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """The place where consumers find a committed message."""

    message_id: str
    queue: QueueRef
    queue_offset: int


class CommitReceipts(Sequence[CommitReceipt]):
    """The receipts of a transaction that is committed, in the order of sending."""

    __slots__ = ("_broker_group", "_count", "_ended", "_shown")

    def __init__(
        self, ended: Sequence[Ended], broker_group: str, shown: Callable[[str], str]
    ) -> None:
        """``shown``: a topic as the application names it."""
        self._ended = ended
        self._broker_group = broker_group
        self._shown = shown
        self._count = sum([count for _, _, count in ended])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> CommitReceipt: ...

    @overload
    def __getitem__(self, place: slice) -> list[CommitReceipt]: ...

    def __getitem__(self, place: int | slice) -> CommitReceipt | list[CommitReceipt]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(self._count))]
        left = range(self._count)[place]
        for result, first, count in self._ended:
            if left < count:
                return self._receipt(result, first + left)
            left -= count
        raise AssertionError("the counts add up")

    def _receipt(self, result: broker_pb2.TransactionResult, index: int) -> CommitReceipt:
        message_id = result.message_id
        if index:
            message_id = f"{self._broker_group}/{result.following_log_offsets[index - 1]}"
        topic = self._shown(result.queue.topic)
        queue = QueueRef(topic, result.queue.queue_id, self._broker_group)
        return CommitReceipt(message_id, queue, result.position.offset + index)

    def __repr__(self) -> str:
        return f"CommitReceipts({list(self)!r})"
