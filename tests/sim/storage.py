"""What a writer lets be acknowledged and seen: as ``MemberStorage`` of the broker, without files
and threads. The parts of the broker that append run on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from cometmq.clock import Clock, DelayClock
from cometmq.errors import BrokerDraining, SlaveNotAvailable
from cometmq.format import record, timers
from cometmq.format.properties import tag_of
from cometmq.format.relay import Relayed, relay
from cometmq.format.relay_run import RelayRun
from cometmq.format.taghash import tags_code
from cometmq.member.storage.arrivals import Arrivals
from cometmq.member.storage.member_storage import Segment, Ticket
from cometmq.model import QueueKey
from cometmq.replication.watermarks import (
    REPLICATED,
    DurabilityClass,
    HighWatermarks,
    ReadableMaxima,
    Watermarks,
    union,
)
from cometmq.store.writer import Appended
from tests.sim.disk import Disk, Histories, Record
from tests.sim.log import STATE, Log
from tests.sim.world import Future

TOPIC = "T"
HOST = b"\x7f\x00\x00\x01\x00\x00\x00\x01"
STATE_INDEX = -1


class Batch(NamedTuple):
    """What somebody waits for: a producer, or a client whose request is in the state."""

    records: tuple[Record, ...]
    demands: DurabilityClass
    acked: Future | None = None

    @property
    def end(self) -> int:
        return self.records[-1].end


class Draft(NamedTuple):
    """A record to be appended. ``encode``: of queue offset, log offset and store time."""

    queue: int
    demands: DurabilityClass
    encode: Callable[[int, int, int], tuple[bytes, int]]  # the bytes, and what its unit holds


class Storage:
    """``is_only_writer`` is asked whenever something would be acknowledged or shown;
    ``are_enough``: whether enough members are in sync.
    """

    def __init__(
        self,
        disk: Disk,
        epoch: int,
        demands: list[DurabilityClass],
        before: HighWatermarks,
        indexes: Mapping[QueueKey, int],
        clock: Clock,
        new_uid: Callable[[], int],
    ) -> None:
        """``before``: by these marks consumers have seen what is there."""
        self.disk = disk
        self.store = Log(disk, indexes)
        self.epoch = epoch
        self.watermarks = Watermarks(disk.end, disk.flushed)
        self.maxima = _readable_at_start(disk, demands, before)
        self.shown = HighWatermarks()
        self.copies_wanted = 0
        self.sealed = False
        self.flush_wanted = 0
        self.waits_for_right = 0  # answers that had to wait until no other member could write
        self.authority = self  # it answers for itself
        self.arrivals = Arrivals()  # nobody watches
        self.is_only_writer: Callable[[], bool] = lambda: True
        self.are_enough: Callable[[], bool] = lambda: True
        self.on_ack: Callable[[Batch], None] = lambda _batch: None
        self.on_show: Callable[[], None] = lambda: None
        self.on_move: Callable[[], None] = lambda: None
        self.on_write: Callable[[Record], None] = lambda _made: None
        self.histories: Histories = ()
        self._indexes = {**indexes, STATE: STATE_INDEX}
        self._now_ms = clock.wall_ms
        self._promise: Callable[[int], None] = lambda _delay_ms: None
        self._new_uid = new_uid
        self._alone = False
        self._acks: dict[DurabilityClass, deque[Batch]] = {}

    def stamp_by(self, time: DelayClock) -> None:
        """As ``MessageStore.stamp_by``."""
        self._now_ms, self._promise = time.wall_ms, time.promise

    # --- appending --------------------------------------------------------------------------------

    def append(
        self, records: bytes, segments: Sequence[Segment], *, born_host: bytes, store_host: bytes
    ) -> Ticket:
        """A batch of a producer, or a record of the state. Raises BrokerDraining."""
        found = iter(record.decode_all(records))
        drafts = [
            Draft(
                self._indexes[segment.topic, segment.queue_id],
                segment.demands,
                stamped(next(found), segment.delay_ms, waits=bool(segment.timer)),
            )
            for segment in segments
            for _ in range(segment.count)
        ]
        ticket = self._append(drafts, union(segment.demands for segment in segments))
        self._promise(max(segment.delay_ms for segment in segments))
        firsts = list(accumulate((segment.count for segment in segments), initial=0))
        appended = ticket.appended
        return ticket._replace(
            appended=appended._replace(
                queue_offsets=[appended.queue_offsets[first] for first in firsts[:-1]],
                segment_bytes=[
                    sum(appended.segment_bytes[first:end]) for first, end in pairwise(firsts)
                ],
            )
        )

    def append_relayed(
        self, relayed: Sequence[Relayed], demands: Mapping[str, DurabilityClass], store_host: bytes
    ) -> Ticket:
        """Records that the broker makes itself. Raises BrokerDraining."""
        drafts = [
            Draft(self._indexes[one.topic, one.queue_id], demands[one.topic], _relayed(one))
            for one in relayed
        ]
        now_ms = self._now_ms()
        waits_ms = [one.wait_ms(now_ms) for one in relayed if hasattr(one, "wait_ms")]
        self._promise(max(waits_ms, default=0))
        return self._append(drafts, union(demands[one.topic] for one in relayed))

    def append_relay_run(
        self,
        run: RelayRun,
        demands: Mapping[str, DurabilityClass],
        store_host: bytes,
        behind: Sequence[Any] = (),
    ) -> Ticket:
        """The same, of many records at once and of some behind them; the answer has an entry for
        each queue, and for each record behind.
        """
        flags = run.transaction_flags
        relayed = [
            relay(
                record.decode(run.sources, place),
                *run.queues[index],
                store_host,
                transaction_flags=flags,
            )
            for place, index in zip(run.places, run.chosen, strict=True)
        ]
        ticket = self.append_relayed([*relayed, *behind], demands, store_host)
        sizes = [0] * len(run.queues)
        for one, index in zip(relayed, run.chosen, strict=True):
            sizes[index] += one.size_bytes
        firsts = [
            ticket.appended.queue_offsets[run.chosen.index(index)] for index in range(len(sizes))
        ]
        last = ticket.appended.queue_offsets[len(relayed) :]
        sizes += [one.size_bytes for one in behind]
        appended = ticket.appended._replace(queue_offsets=[*firsts, *last], segment_bytes=sizes)
        return ticket._replace(appended=appended)

    def _append(self, drafts: Sequence[Draft], demands: DurabilityClass) -> Ticket:
        self.check_open()
        now_ms = self._now_ms()
        records = [self._write(draft, now_ms) for draft in drafts]
        batch = Batch(tuple(records), demands, Future())
        self._appended(batch)
        appended = Appended(
            records[0].start,
            batch.end,
            [one.number - 1 for one in records],
            [len(one.data) for one in records],
            now_ms,
            now_ms,
        )
        assert batch.acked is not None
        acked = None if batch.acked.done() else batch.acked
        return Ticket(appended, acked, demands)  # type: ignore[arg-type]

    def _write(self, draft: Draft, now_ms: int) -> Record:
        index, start = draft.queue, self.disk.end
        units = self.disk.states if index == STATE_INDEX else self.disk.queues[index]
        number, chain = (units[-1].number, units[-1].chain) if units else (0, 0)
        data, tags = draft.encode(number, start, now_ms)
        uid = self._new_uid()
        made = Record(
            start,
            start + len(data),
            uid,
            self.epoch,
            index,
            number + 1,
            hash((chain, uid)),
            draft.demands,
            self.histories if index == STATE_INDEX else (),
            data,
            tags,
        )
        self.disk.append([made])
        self.on_write(made)
        return made

    def _appended(self, batch: Batch) -> None:
        self.watermarks.append_to(batch.end)
        for one in batch.records:
            if one.queue != STATE_INDEX:
                self.maxima.push(one.demands, batch.end, (TOPIC, one.queue), one.number)
        self.on_move()
        if self.watermarks.ack(batch.demands) >= batch.end and self.is_only_writer():
            self._release(batch)
        else:
            self._wait(batch)

    def _wait(self, batch: Batch) -> None:
        if batch.demands & _ON_DISK or (batch.demands and self._alone):
            self.flush_wanted = batch.end
        if batch.demands & DurabilityClass.REPLICATED_FLUSHED:
            self.copies_wanted = batch.end
        self._acks.setdefault(batch.demands, deque()).append(batch)

    def _release(self, batch: Batch) -> None:
        self.on_ack(batch)
        if batch.acked is not None:
            batch.acked.set()

    # --- as the broker's parts ask ----------------------------------------------------------------

    def check_open(self) -> None:
        if self.sealed:
            raise BrokerDraining("the writer hands its role over")

    def check_room(self, size_bytes: int) -> None:
        """There is always room."""

    check_delivery_room = check_moving_room = check_room

    def check_in_sync(self) -> None:
        if not self.are_enough():
            raise SlaveNotAvailable("too few members are in sync")

    def may_acknowledge(self) -> bool:
        return self.is_only_writer()

    async def until_certain(self) -> None:
        self.waits_for_right += not self.is_only_writer()
        await self.stored(0, DurabilityClass.ASYNC)

    def bounds(self, key: QueueKey) -> tuple[int, int, int]:
        _, appended = self.store.queue_bounds(*key)
        return 0, self.maxima.readable((TOPIC, self._indexes.get(key, STATE_INDEX))), appended

    def acked(self, position: int, demands: DurabilityClass) -> Future | None:
        """When what ends at ``position`` counts; None: it does."""
        if self.watermarks.ack(demands) >= position and self.is_only_writer():
            self._note_acked(position, demands)
            return None
        last = self.disk.records[-1]
        waits = Future()
        waits.add_done_callback(lambda _: self._note_acked(position, demands))
        self._wait(Batch((last,), demands, waits))
        return waits

    async def stored(self, position: int, demands: DurabilityClass) -> None:
        waits = self.acked(position, demands)
        if waits is not None:
            await waits

    def _note_acked(self, position: int, demands: DurabilityClass) -> None:
        """The record that ends there was acknowledged, again perhaps."""
        found = self.disk.ending_at(position)
        if found is not None:
            self.on_ack(Batch((found,), demands))

    # --- what moves -------------------------------------------------------------------------------

    def advance_replicated(self, replicated: int, replicated_flushed: int, *, alone: bool) -> None:
        if alone and not self._alone:
            self.flush_wanted = self.watermarks.appended
        self._alone = alone
        self.watermarks.advance_replicated(replicated, replicated_flushed)

    def stand_still(self) -> None:
        """Too few are in sync: nothing more counts as copied."""
        self._alone = False

    def flushed(self, position: int) -> None:
        self.disk.flushed = max(self.disk.flushed, position)
        self.watermarks.flush_to(position)
        if self._alone:
            self.watermarks.advance_replicated(position, position)
        self.settle()
        self.on_move()

    def settle(self) -> None:
        """Acknowledge and show what may be."""
        if not self.is_only_writer():
            return
        for demands, waiting in list(self._acks.items()):
            position = self.watermarks.ack(demands)
            while waiting and waiting[0].end <= position:
                self._release(waiting.popleft())
        moved = self.maxima.advance(self.watermarks)
        if self.shown != self.watermarks.marks:
            self.shown = self.watermarks.marks
            self.on_show()
            self.on_move()
        elif moved:
            self.on_show()

    def depose(self) -> None:
        self.sealed = True
        self._acks.clear()


def stamped(
    sent: record.Record, delay_ms: int, *, waits: bool = False
) -> Callable[[int, int, int], tuple[bytes, int]]:
    """What a producer, or the broker itself, has encoded, as the log has it. ``waits``: for the
    time that it names.
    """
    due_ms = timers.due_ms(sent.raw_properties) if waits else None

    def encode(queue_offset: int, log_offset: int, now_ms: int) -> tuple[bytes, int]:
        data = record.encode(
            sent.topic.encode(),
            sent.queue_id,
            sent.body,
            sent.raw_properties,
            born_time_ms=sent.born_time_ms,
            born_host=HOST,
            store_host=HOST,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=now_ms,
        )
        if due_ms is not None:
            return data, due_ms
        return data, now_ms + delay_ms if delay_ms else tags_code(tag_of(sent.raw_properties))

    return encode


def _relayed(one: Relayed) -> Callable[[int, int, int], tuple[bytes, int]]:
    def encode(queue_offset: int, log_offset: int, now_ms: int) -> tuple[bytes, int]:
        return one.encode(queue_offset, log_offset, now_ms, HOST), one.tags_code(now_ms)

    return encode


def histories_of(disk: Disk) -> Histories:
    """The generations that the log tells of; empty: no writer was ever here."""
    return disk.states[-1].histories if disk.states else ()


def newest_generation(histories: Histories) -> int:
    """The highest that they tell of; 0 = none."""
    return max((history.current for history in histories), default=0)


def _readable_at_start(
    disk: Disk, demands: Iterable[DurabilityClass], before: HighWatermarks
) -> ReadableMaxima:
    maxima = ReadableMaxima()
    for queue, (units, wanted) in enumerate(zip(disk.queues, demands, strict=True)):
        copies, key = wanted & REPLICATED, (TOPIC, queue)
        seen = before.visible(wanted) if copies else disk.end
        count = sum(unit.start < seen for unit in units)
        if count:
            maxima.push(DurabilityClass.ASYNC, disk.end, key, count)
        if len(units) > count:
            maxima.push(copies, disk.end, key, len(units))
    maxima.advance(HighWatermarks(flushed=disk.flushed))
    return maxima


_ON_DISK = DurabilityClass.FLUSHED | DurabilityClass.REPLICATED_FLUSHED
