"""A follower: the real ``Elector`` on a simulated lease, a copy of the writer's log, and the word
not to stand. What ``services/haslave`` does, without a network and files.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.errors import InvalidRequest, LeaseConflict, LeaseUnavailable, StaleEpoch
from cometmq.format import record
from cometmq.member.clocks import member_name
from cometmq.messaging.generations import EPOCH_SHIFT, History
from cometmq.messaging.locks import LockTable
from cometmq.messaging.state import BrokerState, StateLoader
from cometmq.replication.election import Lead, ReplicaStatus
from cometmq.replication.follower import SILENCE_S_MAX, Ack, LogView, Plan, plan
from cometmq.replication.handshake import check_writer
from cometmq.replication.lease import ReplicaId
from cometmq.replication.watermarks import (
    STRICTEST,
    DurabilityClass,
    FollowerWatermarks,
    HighWatermarks,
    ReadableMaxima,
)
from services.haslave.elector import Elector
from tests.sim.disk import Histories, Record
from tests.sim.lease import LeaseClient
from tests.sim.member import GROUP, Member, MemberPeers, Role
from tests.sim.network import End, Stream
from tests.sim.storage import TOPIC, histories_of, newest_generation
from tests.sim.world import Notifier

ANSWER_MS = 250
FLUSH_INTERVAL_S = 0.5
BACKOFF_S = (0.05, 2.0)


class FollowerHello(NamedTuple):
    replica_id: ReplicaId
    view: LogView


class WriterHello(NamedTuple):
    epochs: list[tuple[int, int]]
    start: int
    no_election_ms: int
    log: list[Record]  # for the judge alone


class Frame(NamedTuple):
    epoch: int
    records: tuple[Record, ...]
    shown: HighWatermarks
    flush_to: int
    sent_ms: int
    clock_ms: int = 0  # the writer's time of day
    answers_boot_ms: int | None = None  # by the follower's own clock


class ToldAck(NamedTuple):
    """An acknowledgement with the clocks of the follower."""

    ack: Ack
    clock_ms: int
    boot_ms: int


class Refused(NamedTuple):
    """It does not write, or not for this follower."""


class Follower(Role):
    """Follows whom the lease names, until it may lead, or its log has to be cut."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self.elector: Elector
        self.marks = FollowerWatermarks(0, 0)
        self._maxima = ReadableMaxima()
        self._histories: Histories = ()
        self._loader = StateLoader(BrokerState())
        self._states: list[Record] = []  # copies of the state that wait to be seen
        self._address = ""
        self._stream: Stream | None = None
        self._end: End[object] | None = None
        self._agreed = False
        self._view = LogView((), 0, 0)
        self._promise_ms = 0
        self._answers_ms = 0
        self._told = (-1, -1, -ANSWER_MS)
        self._leaves = False
        self._heard_s = 0.0
        self._flush_wanted = 0
        self._flushing = False
        self._backoff_s = BACKOFF_S[0]
        self._lost_bell = Notifier(self)

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        await self.sleep(self.world.between(0.02, 0.3))
        self.disk.start(self.member.boot)
        self._open()
        lease = LeaseClient(self.group.lease, self, self.member.id)
        peers = MemberPeers(self)

        def status(promised_until_s: float, forced: bool) -> ReplicaStatus:
            disk = self.disk
            return ReplicaStatus(
                GROUP,
                self.member.id,
                disk.store_id,
                self.member.address,
                disk.epoch,
                disk.flushed,
                disk.former_store_id,
                promised_until_s,
                peers.ids,
                forced,
                epochs=tuple(disk.epoch_pairs()),
                counted_in=newest_generation(histories_of(disk)) >> EPOCH_SHIFT,
                shown=self.marks.shown,
                clock_is_off=self.member.clocks.is_off,
            )

        self.elector = Elector(lease, self.rules.duration_s, status, peers, self.clock)
        step = await self.elector.look()
        if isinstance(step, Lead):
            self.become(step.reason, "leads at once")
            return
        self.serving = True
        self.after(FLUSH_INTERVAL_S, self._flush_at_times)
        self._connect_to("" if step is None else step.address)
        self._reconnect_later()
        await self._watch_lease()

    def be_told_to_lead(self) -> None:
        """By an operator."""
        self.spawn(self._force())

    async def _force(self) -> None:
        try:
            await self.elector.force()
        except (LeaseConflict, LeaseUnavailable) as error:
            self.tell("does not take the order", error)

    def _open(self) -> None:
        disk = self.disk
        self.tell("follows with", disk.replica_id, "end", disk.end, "epoch", disk.epoch)
        self.epoch = disk.epoch
        self.marks = FollowerWatermarks(disk.end, disk.flushed)
        self._histories = histories_of(disk)
        self._loader = StateLoader(BrokerState())
        for state in disk.states:
            self._feed(state)
        for queue, units in enumerate(disk.queues):
            if units:
                self._maxima.push(STRICTEST, disk.end, (TOPIC, queue), units[-1].number)

    async def _watch_lease(self) -> None:
        pause_s = self.rules.poll_s
        while True:
            await self._lost_bell.heard(pause_s)
            step = await self.elector.look()
            pause_s = self.rules.poll_s
            if isinstance(step, Lead):
                self._connect_to("")
                self.become(step.reason, f"leads: {step.reason.value}")
                return
            if step is not None:
                self._connect_to(step.address)
                pause_s = min(pause_s, max(step.look_again_s or pause_s, 0.01))

    # --- a stream ---------------------------------------------------------------------------------

    def _connect_to(self, address: str) -> None:
        if address != self._address:
            self._address = address
            self._leave()

    def _leave(self) -> None:
        if self._stream is not None and self._end is not None:
            self._stream.close(self._end)
        self._stream = self._end = None

    def _reconnect_later(self) -> None:
        """So often it is seen whether a stream is wanted that is not there."""
        if self._address and self._stream is None:
            self._connect(int(self._address))
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
        self.after(self.world.between(0.5, 1.0) * self._backoff_s, self._reconnect_later)

    def _connect(self, other: int) -> None:
        network, writer = self.group.network, self.group.members[other].process
        if (self.member.id, other) in network.cut or writer is None:
            return
        mine, theirs = End[object](self, self.member.id), End[object](writer, other)
        stream = Stream(network, (mine, theirs))
        mine.taken, mine.ended = self._take, self._lost
        theirs.taken = lambda hello: writer.accept(stream, theirs, hello)
        self._stream, self._end, self._agreed = stream, mine, False
        self._heard_s = self.world.now
        self._view = self.disk.view()
        stream.send(mine, FollowerHello(self.disk.replica_id, self._view))
        self.after(SILENCE_S_MAX, lambda: self._check_silence(stream))

    def _check_silence(self, stream: Stream) -> None:
        if self._stream is not stream:
            return
        left_s = self._heard_s + SILENCE_S_MAX - self.world.now
        if left_s <= 0:
            self._leave()
            self._lost()
        else:
            self.after(left_s + 1e-3, lambda: self._check_silence(stream))

    def _lost(self) -> None:
        self._stream = self._end = None
        self._lost_bell.notify()

    def _take(self, message: object) -> None:
        if not self.serving:
            return
        self._heard_s = self.world.now
        try:
            if isinstance(message, WriterHello):
                self._agree(message)
            elif isinstance(message, Frame) and self._agreed:
                self._copy(message)
            else:
                raise InvalidRequest(f"unexpected: {message}")
        except (InvalidRequest, StaleEpoch) as error:
            self.tell("refuses", error)
            self._leave()
            self._lost()

    def _agree(self, hello: WriterHello) -> None:
        check_writer(hello.epochs, self._view)
        decision = plan(self._view, hello.start)
        if decision is not Plan.COPY:
            self._cut(hello.start, anew=decision is Plan.RESET)
            return
        self.disk.adopt_epochs(hello.epochs)
        self.marks.agreed()
        self.epoch = max(self.epoch, hello.epochs[-1][0])
        self._agreed = True
        self._promise_ms, self._answers_ms = hello.no_election_ms, 0
        self._told = (-1, -1, -ANSWER_MS)
        self._backoff_s = BACKOFF_S[0]
        self.tell("copies epoch", self.epoch, "from", hello.start)
        self.group.judge.agreed(self, hello.log)
        self._answer()

    def _cut(self, offset: int, *, anew: bool) -> None:
        self.tell("cuts its log at", offset, "of", self.disk.end)
        self.world.counts["truncations"] += 1
        self._leave()
        self.serving = False

        def cut() -> None:
            if anew:
                self.disk.begin_anew()
            else:
                self.disk.cut(offset)
            self.become(None, "cut")

        self.after(0.01, cut)

    def _copy(self, frame: Frame) -> None:
        if frame.answers_boot_ms is not None:
            name = member_name(int(self._address))
            self.member.clocks.note(name, frame.answers_boot_ms, frame.clock_ms)
        if frame.epoch != self.epoch:
            raise InvalidRequest(f"a frame of epoch {frame.epoch} in {self.epoch}")
        if frame.records:
            if frame.records[0].start != self.disk.end:
                raise InvalidRequest(f"{frame.records[0].start} comes at {self.disk.end}")
            self.disk.append(frame.records)
            self.marks.append_to(self.disk.end)
            for record in frame.records:
                if record.queue < 0:
                    self._states.append(record)
                else:
                    key = (TOPIC, record.queue)
                    self._maxima.push(record.demands, record.end, key, record.number)
        self.marks.raise_to(frame.shown)
        self._want_flush(max(frame.flush_to, self.marks.announced_on_disk))
        self._answers_ms = frame.sent_ms
        self._show()
        self._answer()

    def leave(self) -> None:
        self._leaves = True
        self._told = (-1, -1, -ANSWER_MS)
        self._answer()

    def _answer(self) -> None:
        now = self.marks.appended, self.marks.flushed, self._answers_ms
        if not self._agreed or self._stream is None or self._end is None:
            return
        if now[:2] != self._told[:2] or now[2] - self._told[2] >= ANSWER_MS:
            self._told = now
            no_election_ms = self.elector.promise(self._promise_ms)
            ack = Ack(*now, no_election_ms, self._leaves)
            boot_ms = self.member.clocks.boot_ms()
            self._stream.send(self._end, ToldAck(ack, self.clock.wall_ms(), boot_ms))
            self.world.counts["leaves"] += self._leaves

    # --- the disk, and what is seen ---------------------------------------------------------------

    def _flush_at_times(self) -> None:
        self._want_flush(self.disk.end)
        self.after(FLUSH_INTERVAL_S, self._flush_at_times)

    def _want_flush(self, position: int) -> None:
        self._flush_wanted = max(self._flush_wanted, min(position, self.disk.end))
        if not self._flushing and self._flush_wanted > self.disk.flushed:
            self._flushing = True
            end = self.disk.end
            self.after(self.member.flush_s(), lambda: self._flushed(end))

    def _flushed(self, position: int) -> None:
        self._flushing = False
        if not self.serving:  # the log is about to be cut
            return
        self.disk.flushed = max(self.disk.flushed, position)
        self.marks.flush_to(self.disk.flushed)
        self._show()
        self._answer()
        self._want_flush(self._flush_wanted)

    def _show(self) -> None:
        # Nobody may see a message before the generation that it belongs to.
        while self._states and self._states[0].end <= self.marks.most_visible:
            state = self._states.pop(0)
            self._histories = state.histories
            self._feed(state)
        self._maxima.advance(self.marks)
        self.group.judge.shown(self)

    @property
    def locks(self) -> LockTable:
        return self._loader.state.locks

    def _feed(self, state: Record) -> None:
        found = record.decode(state.data)
        self._loader.feed(found.tag, found.body)

    def visible(self, demands: DurabilityClass) -> int:
        return self.marks.visible(demands)

    def readable(self, queue: int) -> int:
        return self._maxima.readable((TOPIC, queue))

    def history(self, queue: int) -> History | None:
        return self._histories[queue] if self._histories else None
