"""A writer: opens its epoch, holds the lease, feeds its followers, keeps the in-sync set. What
``services/broker`` and ``cometmq/member/state.py`` do, without a network and files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cometmq.errors import (
    InvalidRequest,
    LeaseConflict,
    LeaseUnavailable,
    MemberIdTaken,
    NoFollower,
    SlaveNotAvailable,
    StaleEpoch,
)
from cometmq.format import record
from cometmq.format.halves import OP_TOPIC, OpRecord, op_records
from cometmq.member.clocks import member_name
from cometmq.member.state.halves import now_of, open_halves
from cometmq.member.state.statelog import encode_record, load
from cometmq.member.state.tail import progress_of
from cometmq.messaging.changes import KINDS, DelaysReached
from cometmq.messaging.delay import DelayProgress
from cometmq.messaging.generations import EPOCH_SHIFT, History
from cometmq.messaging.handle_secrets import SECRET_BYTES
from cometmq.messaging.locks import LockTable
from cometmq.messaging.state import BrokerState
from cometmq.replication.epoch_history import common_end
from cometmq.replication.follower import (
    HEARTBEAT_S,
    Replica,
    choose_successor,
    start_of_copy,
)
from cometmq.replication.handshake import Handshake
from cometmq.replication.insync import Own, replicated_positions, wanted_sets
from cometmq.replication.lease import LeaseRecord, Reason, ReplicaId, ReplicaIds
from cometmq.replication.lease_state import LeaseState
from cometmq.replication.refusals import Refusals
from cometmq.replication.versions import own_release
from cometmq.replication.watermarks import (
    DurabilityClass,
    HighWatermarks,
)
from services.broker.sending.produce import Accepted, Claim
from tests.sim.broker import Broker
from tests.sim.disk import Disk, Histories, Record
from tests.sim.follower import FollowerHello, Frame, ToldAck, WriterHello
from tests.sim.lease import LeaseClient
from tests.sim.log import Log
from tests.sim.member import GROUP, Member, Role, reason_of
from tests.sim.network import End, Stream
from tests.sim.services import CHECK_RULES
from tests.sim.storage import (
    HOST,
    STATE_INDEX,
    TOPIC,
    Storage,
    histories_of,
    newest_generation,
    stamped,
)

RETRY_S = 0.5
LOOK_S = 0.1
CATCH_UP_S_MAX = 10.0
CHUNK_BYTES_MAX = 4_000  # in a frame
WINDOW_BYTES = 8_000  # sent and not acknowledged; in the place of WINDOW_BYTES_MAX
FLUSH_INTERVAL_S = 0.5


class Deposed(Exception):
    """The lease names another."""


class Sender:
    """A follower's stream, as the writer has it."""

    def __init__(self, writer: Writer, stream: Stream, end: End[object], replica: Replica) -> None:
        self.replica = replica
        self._writer = writer
        self._stream = stream
        self._end = end
        self._told: tuple[HighWatermarks, int] | None = None
        self._told_s = 0.0
        self._ack_boot_ms: tuple[int, int] | None = None  # of its newest answer, and ours
        end.taken, end.ended = self._acked, self._gone
        self.pump()

    def _acked(self, message: object) -> None:
        writer = self._writer
        if not isinstance(message, ToldAck):
            self.close()
            return
        clocks, ack = writer.member.clocks, message.ack
        if ack.answers_ms:
            clocks.note(member_name(self.replica.member_id), ack.answers_ms, message.clock_ms)
            self._ack_boot_ms = message.boot_ms, clocks.boot_ms()
        no_election_ms = min(ack.no_election_ms, round(writer.rules.duration_s * 1000))
        try:
            self.replica.acked(ack._replace(no_election_ms=no_election_ms), writer.disk.end)
        except InvalidRequest as error:
            writer.tell("refuses an ack", error)
            writer.world.counts["acks refused"] += 1
            self.close()
            return
        self.pump()
        writer.refresh()

    def close(self) -> None:
        self._stream.close(self._end)
        self._gone()

    def _gone(self) -> None:
        if self.is_current:
            del self._writer.senders[self.replica.member_id]
            self.replica.connected = False

    @property
    def is_current(self) -> bool:
        return self._writer.senders.get(self.replica.member_id) is self

    def beat(self) -> None:
        """Once a second something is told anyway."""
        if self.is_current:
            self.pump()
            self._writer.after(HEARTBEAT_S / 2, self.beat)

    def pump(self) -> None:
        """Send what there is to send."""
        writer = self._writer
        if not writer.serving:
            return
        now_s = writer.clock.boottime_s()
        to_tell = writer.storage.shown, writer.storage.copies_wanted
        end = writer.disk.end
        while self.replica.sent < min(end, self.replica.appended + WINDOW_BYTES):
            records = writer.disk.up_to(self.replica.sent, CHUNK_BYTES_MAX)
            self._send(tuple(records), to_tell, now_s)
        if to_tell != self._told or now_s - self._told_s >= HEARTBEAT_S:
            self._send((), to_tell, now_s)

    def _send(
        self, records: tuple[Record, ...], to_tell: tuple[HighWatermarks, int], now_s: float
    ) -> None:
        writer, sent_ms = self._writer, int(now_s * 1000)
        if records:
            self.replica.sent_to(records[-1].end)
        self._told, self._told_s = to_tell, now_s
        self.replica.framed(sent_ms, writer.disk.end)
        answers_ms = None
        if self._ack_boot_ms is not None:
            theirs_ms, came_ms = self._ack_boot_ms
            answers_ms = theirs_ms + writer.member.clocks.boot_ms() - came_ms
        frame = Frame(writer.epoch, records, *to_tell, sent_ms, writer.clock.wall_ms(), answers_ms)
        self._stream.send(self._end, frame)


class Writer(Role):
    """Writes as long as the lease, or its followers' promises, say that nobody else does."""

    def __init__(self, member: Member, reason: Reason) -> None:
        super().__init__(member)
        self.state: LeaseState
        self.storage: Storage
        self.senders: dict[int, Sender] = {}
        self.reason = reason  # why it was started
        self.before: LeaseRecord | None = None  # what the lease said when it was started
        self._by_replica_id: dict[ReplicaId, Replica] = {}
        self._lease = LeaseClient(self.group.lease, self, member.id)
        self._version = ""
        self._busy = False  # somebody writes to the lease
        self._released = False
        self._flushing = False
        self._flush_at_s = 0.0
        self._histories: Histories = ()
        self._messages: BrokerState
        self.delays: DelayProgress
        self.broker: Broker
        self._since_s = 0.0
        others = [m.id for m in self.group.members if m is not member]
        self._handshake = Handshake(own_release(KINDS), "c", GROUP, member.id, others, Refusals())

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        record = await self._our_lease()
        if record is None:
            self.alive = False
            self.member.execute()
            return
        await self.sleep(self.world.between(0.02, 0.3))
        self._open(record)
        if record.holder_store_id != self.disk.store_id:
            self.become(None, "the lease is another store's")
            return
        try:
            await self._begin()
        except Deposed:
            self.become(None, "deposed before it began")
            return
        self._serve()

    async def _our_lease(self) -> LeaseRecord | None:
        while True:
            try:
                reading = await self._lease.read()
            except LeaseUnavailable:
                await self.sleep(1.0)
                continue
            record = reading.record
            if record is None or record.released or record.holder_id != self.member.id:
                return None
            self._version = reading.version
            return record

    # --- opening ----------------------------------------------------------------------------------

    def _open(self, record: LeaseRecord) -> None:
        disk, handed_over = self.disk, self.reason is Reason.HANDOVER
        disk.start(self.member.boot)
        self.reason = reason_of(record)
        handed_over = handed_over and self.reason is Reason.HANDOVER
        self.state = LeaseState(
            record, lambda: self.storage.shown if self.serving else HighWatermarks()
        )
        self.epoch = disk.begin_epoch(record.epoch)
        clean, disk.recovered = not disk.recovered, False
        raised = not self.reason.keeps_positions or (not clean and not handed_over)
        self._histories = _copy_of_state(self, raised=raised)
        self._messages, self.delays = self._state_of(disk)
        start = disk.end
        disk.append([self._snapshot()])
        disk.flushed = disk.end
        self.group.judge.opened(self)
        self.tell("opens epoch", self.epoch, self.reason.value, "at", start, disk.replica_id)

    def _state_of(self, disk: Disk) -> tuple[BrokerState, DelayProgress]:
        """What the log tells of clients, by the product's own reading."""
        log: Any = Log(disk, self.group.indexes)
        topics = self.rules.topics
        state = load(log, lambda: topics.new_state(self._histories))
        topics.put_histories(state, self._histories)
        delays = progress_of(log, state, self.clock.monotonic_s())
        for change in state.plan_secret(
            self.clock.wall_ms(), self.world.rng.randbytes(SECRET_BYTES)
        ):
            state.apply(change)
        state.apply(DelaysReached(delays.offsets))
        delays.written = delays.offsets
        self._open_halves(state, log)
        return state, delays

    def _open_halves(self, state: BrokerState, log: Any) -> None:
        """As ``cometmq.member.state.opening`` does it."""
        table = state.halves
        missing = open_halves(log, table, table.log_end, CHECK_RULES, now_of(self.clock))
        if missing:
            self.world.counts["halves that a crash left without an op record"] += len(missing)
            for op in op_records(missing, HOST):
                self._append_op(op)
            table.told(len(self.disk.queues[self.group.indexes[OP_TOPIC, 0]]), missing)
        table.log_end = {}
        table.written = table.progress

    def _append_op(self, op: OpRecord) -> None:
        disk, index, now_ms = self.disk, self.group.indexes[OP_TOPIC, 0], self.clock.wall_ms()
        units, uid = disk.queues[index], self.group.new_uids(1)
        number, chain = (units[-1].number, units[-1].chain) if units else (0, 0)
        data = op.encode(number, disk.end, now_ms, HOST)
        made = Record(
            disk.end,
            disk.end + len(data),
            uid,
            self.epoch,
            index,
            number + 1,
            hash((chain, uid)),
            self.rules.demands[index],
            (),
            data,
            op.tags_code(now_ms),
        )
        disk.append([made])

    def _snapshot(self) -> Record:
        """A state snapshot begins the epoch."""
        [told] = self._messages.snapshot_records(
            next_offset_of=lambda *key: len(self.disk.queues[self.group.indexes[key]])
        )
        sent = record.decode(encode_record(told, HOST, 0))
        disk = self.disk
        data, tags = stamped(sent, 0)(len(disk.states), disk.end, self.clock.wall_ms())
        uid = self.group.new_uids(1)
        return Record(
            disk.end,
            disk.end + len(data),
            uid,
            self.epoch,
            STATE_INDEX,
            len(disk.states) + 1,
            0,
            histories=self._histories,
            data=data,
            tags=tags,
        )

    async def _begin(self) -> None:
        state, epoch = self.state, self.epoch
        self._busy = True
        await self._settle(
            lambda: (
                state.begun(self.disk.epoch_pairs(), self.member.address)
                if state.record.epoch < epoch
                else state.renewal()
            )
        )
        self._busy = False

    def _serve(self) -> None:
        disk = self.disk
        before = self.state.record.shown
        self.storage = storage = Storage(
            disk,
            self.epoch,
            self.rules.demands,
            before,
            self.group.indexes,
            self.clock,
            lambda: self.group.new_uids(1),
        )
        storage.histories = self._histories
        storage.is_only_writer = self.is_valid
        storage.are_enough = lambda: self._are_enough
        storage.on_ack = lambda batch: self.group.judge.acked(self, batch)
        storage.on_show = lambda: self.group.judge.shown(self)
        storage.on_move = self._moved
        storage.on_write = lambda one: self.group.judge.messages.stored(self, one)
        self._since_s = self.clock.boottime_s()
        self.serving = self.writes = True
        self.tell(
            "serves epoch", self.epoch, "in sync:", self._members(self.state.must_acknowledge())
        )
        self.broker = Broker(self, storage, self._messages, self.delays)
        self.group.judge.begun(self)
        self.broker.start()
        self.refresh()
        self.spawn(self._renew())
        self.spawn(self._keep_sets())
        self._flush_at_times()

    def _off_clocks(self) -> list[int]:
        clocks = self.member.clocks
        return [m.id for m in self.group.members if clocks.is_other_off(m.id)]

    def is_valid(self) -> bool:
        """Nobody else can be the writer now."""
        return self.state.is_valid(self.clock.boottime_s(), self._promised_until_s)

    def _promised_until_s(self, replica_id: ReplicaId) -> float:
        replica = self._by_replica_id.get(replica_id)
        return 0.0 if replica is None else replica.promised_until_s

    # --- the lease --------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while not self._released:
            await self.sleep(self.rules.renew_s)
            await self._in_turn()
            if not self._released:
                await self._guarded(self.state.renewal)
            self._busy = False

    async def _in_turn(self) -> None:
        while self._busy:
            await self.sleep(0.02)
        self._busy = True

    async def _guarded(self, wanted: Callable[[], LeaseRecord]) -> None:
        try:
            await self._try(wanted())
        except Deposed:
            self._depose()

    def _depose(self) -> None:
        if self.serving:
            self.storage.depose()
            self._released = True
            self._end_streams()
            self.become(None, "deposed")

    async def _settle(self, wanted: Callable[[], LeaseRecord]) -> bool:
        while True:
            try:
                await self._write(wanted())
                return False
            except (LeaseConflict, LeaseUnavailable):
                if await self._look():
                    return True
            await self.sleep(RETRY_S)

    async def _try(self, record: LeaseRecord) -> None:
        try:
            await self._write(record)
        except (LeaseConflict, LeaseUnavailable):
            self.world.counts["lease writes that failed"] += 1
            await self._look()

    async def _write(self, record: LeaseRecord) -> None:
        self.state.sent(record, self.clock.boottime_s())
        self.refresh()
        try:
            self._version = await self._lease.write(record, self._version)
        except LeaseConflict:
            self.state.refused(record)
            raise
        self.state.written(record)
        self.refresh()

    async def _look(self) -> bool:
        try:
            reading = await self._lease.read()
        except LeaseUnavailable:
            return False
        if self.state.is_release(reading.record):
            return True
        if not self.state.saw(reading.record, self.clock.boottime_s()):
            raise Deposed
        self._version = reading.version
        self.refresh()
        return False

    # --- the sets ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Something is known that may let acknowledgements go on."""
        if not self.serving:
            return
        self.group.judge.counts_on(self)
        must_acknowledge = self.state.must_acknowledge()
        if not self._are_enough:
            self.storage.stand_still()
        else:
            own = self._own()
            electable_others = self.state.electable_others() if self.rules.replicated else ()
            found = replicated_positions(
                must_acknowledge, electable_others, own, self._by_replica_id
            )
            if found is not None:
                self.storage.advance_replicated(*found, alone=must_acknowledge == {own.replica_id})
        self._flush()
        self.storage.settle()

    @property
    def _are_enough(self) -> bool:
        return len(self.state.must_acknowledge()) >= self.rules.policy.size_min

    def _own(self) -> Own:
        marks = self.storage.watermarks
        return Own(
            self.state.record.holder, marks.appended, marks.flushed, marks.marks, self._since_s
        )

    async def _keep_sets(self) -> None:
        while not self._released:
            await self.sleep(LOOK_S)
            before = self.state.record
            if self.state.settled and self._wanted() == (before.in_sync, before.electable):
                continue
            await self._in_turn()
            if not self._released:
                await self._guarded(lambda: self.state.with_sets(*self._wanted()))
            self._busy = False
            if not self.state.settled:
                await self.sleep(RETRY_S)
                continue
            gone = set(before.in_sync) - set(self.state.record.in_sync)
            self.world.counts["set shrinks"] += len(gone)
            self.tell("in sync:", self._members(self.state.must_acknowledge()))

    def _wanted(self) -> tuple[ReplicaIds, ReplicaIds]:
        return wanted_sets(
            self.state.record,
            self._own(),
            self._by_replica_id,
            self.rules.policy,
            self.clock.boottime_s(),
            replicated=self.rules.replicated,
        )

    @staticmethod
    def _members(replica_ids: frozenset[ReplicaId]) -> str:
        return " ".join(replica_id.store_id for replica_id in sorted(replica_ids))

    # --- followers --------------------------------------------------------------------------------

    def accept(self, stream: Stream, end: End[object], hello: object) -> None:
        """A follower's stream comes."""
        if not self.serving or not isinstance(hello, FollowerHello):
            stream.close(end)
            return
        writer_log = self.disk.view(writes=True)
        try:
            view = self._handshake.checked_log(*_fields_of(hello))
            start = start_of_copy(writer_log, view, self.disk.crc_at)
            self._handshake.check_free(hello.replica_id, self._connected(), self.clock.boottime_s())
        except (InvalidRequest, StaleEpoch, MemberIdTaken) as error:
            self.tell("refuses", hello.replica_id, error)
            stream.close(end)
            return
        no_election_ms = round(self.rules.duration_s * 1000)
        told = WriterHello(self.disk.epoch_pairs(), start, no_election_ms, self.disk.records)
        stream.send(end, told)
        if start != view.log_end:
            return  # it cuts its log, and comes again
        before = self.senders.get(hello.replica_id.member_id)
        sender = Sender(self, stream, end, self._replica(hello.replica_id, start))
        self.senders[hello.replica_id.member_id] = sender
        if before is not None:
            # Its end comes when it next wants to send; till then its acks may still come.
            self.after(self.world.between(0.0, 0.05), before.close)
        sender.beat()

    def _connected(self) -> list[Replica]:
        return [sender.replica for sender in self.senders.values()]

    def _replica(self, replica_id: ReplicaId, start: int) -> Replica:
        for other in [
            other for other in self._by_replica_id if other.member_id == replica_id.member_id
        ]:
            if other != replica_id:
                del self._by_replica_id[other]
        replica = self._by_replica_id.get(replica_id)
        if replica is None:
            replica = self._by_replica_id[replica_id] = Replica(
                replica_id, start, self.clock.boottime_s()
            )
        else:
            replica.join(start)
        return replica

    def _end_streams(self) -> None:
        for sender in list(self.senders.values()):
            sender.close()

    def _moved(self) -> None:
        for sender in list(self.senders.values()):
            sender.pump()
        self._flush()

    # --- messages ---------------------------------------------------------------------------------

    async def send(self, records: bytes, claims: Sequence[Claim]) -> Accepted:
        """A producer's batch. Raises what its refusal is."""
        try:
            return await self.broker.send(records, claims)
        except SlaveNotAvailable:
            self.world.counts["sends refused for want of copies"] += 1
            raise

    def _flush_at_times(self) -> None:
        self.storage.flush_wanted = self.disk.end
        self._flush()
        self.after(FLUSH_INTERVAL_S, self._flush_at_times)

    def _flush(self) -> None:
        if not self._flushing and self.storage.flush_wanted > self.storage.watermarks.flushed:
            self._flushing = True
            end = self.disk.end
            self.after(self.member.flush_s(), lambda: self._flushed(end))

    def _flushed(self, position: int) -> None:
        self._flushing = False
        self.storage.flushed(position)
        self._flush()

    def visible(self, demands: DurabilityClass) -> int:
        return self.storage.shown.visible(demands)

    def readable(self, queue: int) -> int:
        return self.storage.maxima.readable((TOPIC, queue))

    def history(self, queue: int) -> History | None:
        return self._histories[queue]

    @property
    def locks(self) -> LockTable:
        return self.broker.state.locks

    # --- handing over -----------------------------------------------------------------------------

    def step_down(self) -> None:
        """An operator wants another to write."""
        if not self.serving or self.storage.sealed:
            return
        try:
            follower = choose_successor(self._connected(), None, self.disk.end, self._off_clocks())
        except NoFollower:
            return
        self.storage.sealed = True
        self.tell("is sealed at", self.disk.end, "for", follower.member_id)
        self.spawn(self._hand_over(follower, self.disk.end, self.world.now + CATCH_UP_S_MAX))

    async def _hand_over(self, follower: Replica, end: int, until_s: float) -> None:
        self.storage.flush_wanted = end
        self._flush()
        while not (self.storage.watermarks.flushed >= end and self.is_valid()):
            if self.world.now > until_s:
                self.storage.sealed = False
                return
            await self.sleep(0.02)
        while not follower.has_all(end):
            if self.world.now > until_s or not follower.connected:
                self.storage.sealed = False
                return
            await self.sleep(0.02)
        await self._in_turn()
        if not self._released:
            await self._release(follower.member_id, end)
        self._busy = False

    async def _release(self, transfer_to: int, end: int) -> None:
        try:
            try:
                await self._write(self.state.release(transfer_to, end))
            except (LeaseConflict, LeaseUnavailable):
                if not await self._settle(self.state.renewal):
                    self.storage.sealed = False
                    return
        except Deposed:
            self._depose()
            return
        self._released = True
        self.storage.depose()
        self._end_streams()
        self.become(None, "handed over")


def _fields_of(
    hello: FollowerHello,
) -> tuple[tuple[tuple[int, int], ...], int, int, int, int]:
    view = hello.view
    return view.epochs, view.log_min, view.log_end, view.last_offset, view.last_crc32


def _copy_of_state(writer: Writer, *, raised: bool) -> Histories:
    """The generations that this epoch begins with."""
    disk = writer.disk
    found = histories_of(disk)
    # No generation of another writer, also of one whose records nobody has.
    newest = newest_generation(found) or (writer.rules.counted_to if writer.epoch == 1 else 0)
    last = max(writer.epoch << EPOCH_SHIFT, newest)
    if not found:
        return tuple(History(((last + 1, 0),)) for _ in disk.queues)
    if not raised:
        return found
    writer.world.counts["generations raised"] += 1
    branches = writer.state.record.epochs
    common = common_end(disk.epoch_pairs(), branches, newest >> EPOCH_SHIFT)
    writer.world.counts["generations raised below the log's end"] += common < disk.end
    starts = [sum(unit.start < common for unit in units) for units in disk.queues]
    return tuple(h.raised(last + 1, start) for h, start in zip(found, starts, strict=True))
