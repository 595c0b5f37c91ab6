"""From records that are in the log already to their queues: after a stop, and as a copy grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cometmq.format import queueunit
from cometmq.format.record import LAYOUTS
from cometmq.format.scan import QueueRun
from cometmq.store.log.scan import Stretch
from cometmq.store.log.units import LOST_TOPIC, lost_unit
from cometmq.store.queues.consumequeue import ConsumeQueue
from cometmq.store.queues.dispatch import Dispatcher

UNITS_HELD_MAX = 200_000  # in memory, before they are written
RECORD_BYTES_MIN = LAYOUTS[0].record_bytes_min


class QueueEdits(Protocol):
    """What an observer may do to the queues that are being built."""

    def drop_topic(self, topic: str) -> None:
        """A record deletes the topic: its messages must not come back, and those of its successor
        count from 0 again.
        """

    def start_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """A queue is known to have counted up to ``offset``, though none of its messages is in the
        log any more: it continues there, unless it has messages.
        """


class Observer(Protocol):
    """Sees records of some topics while the log is read again."""

    @property
    def topics(self) -> frozenset[str]: ...

    def observe_record(
        self, topic: str, log_offset: int, record: bytes, queues: QueueEdits
    ) -> None:
        """A record of one of ``topics``, in the order of the log, when all before it are in their
        queues.
        """


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The record that ends the log; ``size`` 0: there is none. ``store_time_ms``: no record before
    its end is younger.
    """

    log_offset: int = 0
    size: int = 0
    store_time_ms: int = 0


class Loss(NamedTuple):
    """Messages that damage took out of a queue."""

    topic: str
    queue_id: int
    first_queue_offset: int
    message_count: int
    log_offset: int  # of the damaged place


class OutOfStep(Exception):
    """A queue does not end where the log continues: its files are not of this log, or not all of
    them. Rebuilding it from the whole log helps; when it does not, the record from ``start`` to
    ``end`` of the log says something wrong of itself.
    """

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class Replay:
    """Dispatches records in the order of the log. Units that it holds are in no queue before
    :meth:`dispatch_held`.

    It calls ``on_advance(topic, queue_id, end, next_offset)``, in the order of the log, when a
    queue has all its messages up to ``end`` of the log.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        observer: Observer | None,
        on_advance: Callable[[str, int, int, int], None] | None = None,
        *,
        may_start_late: bool = True,
        is_from_first: bool = False,
    ) -> None:
        self.last = LastRecord()
        self.record_count = 0
        self.losses: list[Loss] = []
        # A topic was deleted that had no queues: their files had gone already.
        self.deleted_what_was_gone = False
        self.topics = frozenset[str]() if observer is None else observer.topics
        self._dispatcher = dispatcher
        self._observer = observer
        self._on_advance = on_advance
        # A queue without messages may continue at any offset: older ones went with log files.
        self._may_start_late = may_start_late
        # None went with log files: what a queue without messages begins without was lost.
        self._is_from_first = is_from_first
        self._lost_at = 0  # the damaged place that was passed last
        # How many messages the places that were passed can have held, less those that were missed
        # since: a queue offset has no checksum, so a gap alone is no proof of a loss.
        self._lost_count_max = 0
        # The first record of each queue that began without its first messages, by queue offset:
        # one of another queue may say by mistake that it is of this one.
        self._late_starts: dict[int, tuple[ConsumeQueue, int, int]] = {}
        self._held: dict[ConsumeQueue, _Held] = {}
        self._held_count = 0

    def take(self, stretch: Stretch) -> None:
        """The next records. Raises OutOfStep."""
        assert stretch.start >= self.last.log_offset + self.last.size, (stretch.start, self.last)
        run = stretch.run
        for queue_run in run.queues:
            self._note(queue_run)
        time_ms = max(self.last.store_time_ms, run.first_time_ms, run.last_time_ms)
        self.last = LastRecord(stretch.last_offset, run.last_bytes, time_ms)
        self.record_count += run.record_count
        if stretch.apart:
            self._handle_apart(stretch)
        if self._held_count > UNITS_HELD_MAX:
            self.dispatch_held()

    def pass_over(self, damaged: int, behind: int) -> None:
        """From ``damaged`` to ``behind`` the log is damaged: messages that lay there are missing
        in their queues.
        """
        assert damaged < behind, (damaged, behind)
        self.dispatch_held()
        self._lost_at = damaged
        self._lost_count_max += (behind - damaged) // RECORD_BYTES_MIN

    def _handle_apart(self, stretch: Stretch) -> None:
        if stretch.topic == LOST_TOPIC:
            self.pass_over(stretch.start, stretch.end)
        elif stretch.topic in self.topics:
            self.dispatch_held()
            assert self._observer is not None
            self._observer.observe_record(stretch.topic, stretch.start, stretch.apart, self)

    def drop_topic(self, topic: str) -> None:
        """See :class:`QueueEdits`."""
        self.deleted_what_was_gone |= not self._dispatcher.queues_of(topic)
        self._dispatcher.drop(topic)
        # Nobody misses what was deleted; a successor counts from 0 again.
        self.losses = [loss for loss in self.losses if loss.topic != topic]

    def start_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """See :class:`QueueEdits`."""
        queue = self._dispatcher.get(topic, queue_id)
        if not queue.next_offset and self._may_start_late:
            self._dispatcher.start_at(queue, offset)

    def _note(self, run: QueueRun) -> None:
        queue = self._dispatcher.get(run.topic, run.queue_id)
        held = self._held.get(queue)
        if run.first_queue_offset != (queue.next_offset if held is None else held.next_offset):
            self.dispatch_held()
            queue = self._continued_at(queue, run)
            held = None
        if held is None:
            held = self._held[queue] = _Held(queue.next_offset)
        held.units.append(run.units)
        held.next_offset += run.unit_count
        self._held_count += run.unit_count

    def _continued_at(self, queue: ConsumeQueue, run: QueueRun) -> ConsumeQueue:
        """The queue, made to continue at the run's offset although it is not the next one."""
        offset = run.first_queue_offset
        # Of a successor the deletion's record is missing too, besides its first messages.
        is_new_topic = offset < queue.next_offset and offset < self._lost_count_max
        if queue.next_offset and (offset == 0 or is_new_topic):
            # The topic was deleted and created again. The observer sees the deletion and
            # drops the topic, so this is only for a record that slipped in between, and for a
            # deletion that was lost to damage together with the successor's first messages.
            self._dispatcher.restart(queue)
            queue = self._dispatcher.get(run.topic, run.queue_id)
        if queue.next_offset == 0 and offset > 0 and self._may_start_late:
            self._start_late(queue, offset, is_loss=is_new_topic or self._is_from_first)
            self._late_starts[offset] = (queue, *queueunit.unit_at(run.units, 0)[:2])
        elif 0 < offset - queue.next_offset <= self._lost_count_max:
            lost_count = offset - queue.next_offset
            self._note_loss(queue, lost_count)
            self._dispatcher.dispatch(queue, lost_unit(self._lost_at) * lost_count)
        if offset != queue.next_offset:
            raise self._out_of_step(queue, offset, run)
        return queue

    def _out_of_step(self, queue: ConsumeQueue, offset: int, run: QueueRun) -> OutOfStep:
        position, size, _ = queueunit.unit_at(run.units, 0)
        complaint = (
            f"the record at {position} of the log is message {offset} of "
            f"queue {queue.queue_id} of {queue.topic}, whose next is {queue.next_offset}"
        )
        stray = self._late_starts.get(queue.next_offset)
        if offset == queue.next_offset + 1 and stray is not None and stray[0] is not queue:
            other, position, size = stray
            complaint += (
                f". That one may be the record at {position}, which says that it is the first of "
                f"queue {other.queue_id} of {other.topic}"
            )
        return OutOfStep(complaint, position, position + size)

    def _start_late(self, queue: ConsumeQueue, offset: int, *, is_loss: bool) -> None:
        """Without its first messages, which went with older log files unless damage took them."""
        if is_loss and offset <= self._lost_count_max:
            self._note_loss(queue, offset)
        self._dispatcher.start_at(queue, offset)

    def _note_loss(self, queue: ConsumeQueue, count: int) -> None:
        """The queue's next ``count`` messages are lost."""
        assert 0 < count <= self._lost_count_max, (count, self._lost_count_max)
        self._lost_count_max -= count
        first, place = queue.next_offset, self._lost_at
        self.losses.append(Loss(queue.topic, queue.queue_id, first, count, place))

    def dispatch_held(self) -> None:
        """Put all that was taken into the queues."""
        ends: list[tuple[int, ConsumeQueue]] = []
        for queue, held in self._held.items():
            self._dispatcher.dispatch(queue, b"".join(held.units))
            if self._on_advance is not None:
                position, size, _ = queueunit.unit_at(held.units[-1], -1)
                ends.append((position + size, queue))
        self._held.clear()
        self._held_count = 0
        if self._on_advance is not None:
            for end, queue in sorted(ends, key=lambda entry: entry[0]):
                self._on_advance(queue.topic, queue.queue_id, end, queue.next_offset)


class _Held:
    """Units of a queue that are not in it yet."""

    __slots__ = ("next_offset", "units")

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset  # of the message to come
        self.units: list[bytes] = []
