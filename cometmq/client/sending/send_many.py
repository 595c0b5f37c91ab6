"""The messages of one ``send_many``: which are decided, and their receipts. A batch knows them as
ranges, so that nothing is made for a single message until somebody looks at it.
"""

from __future__ import annotations

from array import array
from asyncio import AbstractEventLoop, Future
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import overload

from cometmq.client.messages import SendReceipt, StoredRun, place_of
from cometmq.model import Message
from cometmq.native.interface import SendEach
from cometmq.telemetry import fields, logger

_log = logger(__name__)


CHUNK_COUNT = 1024
CHUNK_BYTES = 256 * 1024


def chunks(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages in lists that are small to keep. When the iterator raises, what it gave before
    comes first.
    """
    if isinstance(messages, list | tuple):  # they are in memory, whatever is done
        for at in range(0, len(messages), CHUNK_COUNT):
            yield list(messages[at : at + CHUNK_COUNT])
        return
    chunk: list[Message] = []
    size = 0
    raised: Exception | None = None
    try:
        for message in messages:
            chunk.append(message)
            size += len(message.body) if _has_body(message) else 0
            if len(chunk) == CHUNK_COUNT or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    except Exception as error:  # the application's
        raised = error
    if chunk:
        yield chunk
    if raised is not None:
        raise raised


def _has_body(message: object) -> bool:
    return isinstance(message, Message) and message.body.__class__ is bytes


class SendReceipts(Sequence[SendReceipt]):
    """The receipts of a ``send_many``, by the place of the message in the call. A receipt is made
    when it is looked at; for a message that was not stored that raises why.
    """

    __slots__ = ("_count", "_errors", "_firsts", "_is_seen", "_runs", "_taken")

    def __init__(
        self,
        count: int,
        runs: list[tuple[int, StoredRun, int]],
        errors: dict[int, BaseException],
        moved: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """``runs``: place of the first message, where it was stored, its index there. ``moved``:
        messages that were taken in another order than they had: a place, and in which order it and
        the next ones were taken. Runs and errors are by the place in which they were taken.
        """
        runs.sort(key=lambda run: run[0])
        self._count = count
        self._runs = runs
        self._firsts = [first for first, _, _ in runs]
        self._taken = array("I")  # by the place of a message in the call; empty: as it is there
        if moved:
            # A call that was broken off has not taken all of the last ones.
            end = max(count, max(first + len(order) for first, order in moved))
            places = array("I", range(end))  # by the place in which it was taken
            self._taken = array("I", range(end))
            for first, order in moved:
                for taken, place in enumerate(order, first):
                    places[taken] = first + place
                    self._taken[first + place] = taken
            errors = {places[taken]: error for taken, error in errors.items()}
        self._errors = errors
        self._is_seen = not errors  # somebody knows that messages were not stored

    @property
    def errors(self) -> Mapping[int, BaseException]:
        """Why messages were not stored, by their place; empty when all were."""
        self._is_seen = True
        return MappingProxyType(self._errors)

    def raise_first_error(self) -> None:
        """Raises the error of the first message that was not stored, with a note how many were
        not; does nothing without one.
        """
        errors = self.errors
        if not errors:
            return
        place = min(errors)
        note = f"{len(errors)} of {self._count} messages were not stored; this is number {place}."
        if note not in getattr(errors[place], "__notes__", ()):
            errors[place].add_note(note)
        raise errors[place]

    def _pieces(self) -> Iterator[tuple[StoredRun, int, int]]:
        """Where the messages are that were stored: a run, the index of the first one there, and how
        many of them follow each other.
        """
        ends = [*self._firsts[1:], self._count]
        for (first, run, index), end in zip(self._runs, ends, strict=False):
            failed = [place for place in self._errors if first <= place < end]
            yield run, index, min([end, *failed]) - first

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> SendReceipt: ...

    @overload
    def __getitem__(self, place: slice) -> list[SendReceipt]: ...

    def __getitem__(self, place: int | slice) -> SendReceipt | list[SendReceipt]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(self._count))]
        at = range(self._count)[place]
        if at in self._errors:
            raise self.errors[at]
        taken = self._taken[at] if self._taken else at
        first, run, index = self._runs[bisect_right(self._firsts, taken) - 1]
        return SendReceipt(run, index + taken - first)

    def __repr__(self) -> str:
        return f"SendReceipts({self._count} messages, {len(self._errors)} errors)"

    def __del__(self) -> None:
        if not self._is_seen:  # as asyncio says it of a future
            _log.warning(
                "messages not stored, and nobody looked at their errors",
                extra=fields(count=len(self._errors), error=self._errors[min(self._errors)]),
            )


class SendMany:
    """One call of ``send_many``. ``decided`` has the receipts when no message is taken any more and
    each one is stored, or has failed.
    """

    __slots__ = ("_errors", "_is_whole", "_moved", "_runs", "_undecided_count", "count", "decided")

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.decided: Future[SendReceipts] = loop.create_future()
        self.count = 0  # of the messages taken so far: the place of the next one
        self._undecided_count = 0
        self._is_whole = False
        self._runs: list[tuple[int, StoredRun, int]] = []
        self._errors: dict[int, BaseException] = {}
        self._moved: list[tuple[int, Sequence[int]]] = []

    def reorder(self, order: Sequence[int]) -> None:
        """The next messages are taken in this order, which counts from the first of them. All are
        taken before it is called again, and before the end.
        """
        self._moved.append((self.count, order))

    def take(self, count: int) -> MessageRange:
        """The next messages, for the caller to decide."""
        taken = MessageRange(self, self.count, count)
        self.count += count
        self._undecided_count += count
        return taken

    def give_back(self) -> None:
        """The message that was taken last counts as not taken."""
        self.count -= 1
        self._undecided_count -= 1

    def end(self) -> None:
        """There are no more messages."""
        self._is_whole = True
        self._decide(0)

    def stored(self, first: int, count: int, run: StoredRun, index: int) -> None:
        """Messages that were taken are stored; the first one at ``index`` of the run."""
        self._runs.append((first, run, index))
        self._decide(count)

    def failed(self, first: int, count: int, error: BaseException) -> None:
        """Messages that were taken are not stored, as far as is known."""
        self._errors |= dict.fromkeys(range(first, first + count), error)
        self._decide(count)

    def _decide(self, count: int) -> None:
        self._undecided_count -= count
        assert self._undecided_count >= 0
        if self._is_whole and not self._undecided_count:
            self.decided.set_result(SendReceipts(self.count, self._runs, self._errors, self._moved))


class MessageRange:
    """Consecutive messages of one ``send_many``, or of those sent one by one into an open run, that
    are consecutive in a batch, too.
    """

    __slots__ = ("count", "first", "many")

    def __init__(self, many: SendMany | SendEach, first: int, count: int) -> None:
        self.many = many
        self.first = first
        self.count = count

    def stored(self, run: StoredRun, index: int) -> None:
        """Its first message is at ``index`` of the run."""
        self.many.stored(self.first, self.count, run, index)

    def set_exception(self, error: BaseException) -> None:
        """As of a future, for all of them."""
        self.many.failed(self.first, self.count, error)

    def follow(self, future: Future[SendReceipt]) -> None:
        """Its only message has a future of its own."""
        future.add_done_callback(self._followed)

    def _followed(self, future: Future[SendReceipt]) -> None:
        error = future.exception()
        if error is None:
            self.stored(*place_of(future.result()))
        else:
            self.set_exception(error)

    def split_at(self, count: int) -> tuple[MessageRange, MessageRange]:
        """Two ranges in place of this one."""
        assert 0 < count < self.count
        rest = MessageRange(self.many, self.first + count, self.count - count)
        return MessageRange(self.many, self.first, count), rest
