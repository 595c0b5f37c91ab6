"""The stream from the writer: a handshake, then chunks of the log, which are appended and answered.

There is one stream at a time, to the address that the lease names. It ends by an error, by silence,
by a new address, or because the log must be cut first. ``app.py`` cuts it, after everything else
that uses the store has stopped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from cometmq.clock import Clock
from cometmq.errors import (
    CometError,
    PeerUnavailable,
    ReplicationBroken,
    StateTooNew,
    VersionUnsupported,
)
from cometmq.member.clocks import Clocks, member_name
from cometmq.member.state.follower import FollowerStorage
from cometmq.messaging.changes import KINDS
from cometmq.native import crc32
from cometmq.replication.follower import SILENCE_S_MAX, LogView, Plan, owned, plan
from cometmq.replication.handshake import check_writer
from cometmq.replication.refusals import Reason, Refusals
from cometmq.replication.versions import CLOCK_COMPARISON, Agreed, agreed_by, own_release
from cometmq.replication.watermarks import HighWatermarks
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.streams import Stream, read
from cometmq.rpc.tasks import race, stop_all
from cometmq.telemetry import OutageLogger, fields
from cometmq.v1 import member_pb2, member_pb2_grpc

log = logging.getLogger(__name__)

Replicate: TypeAlias = "Stream[member_pb2.ReplicateRequest, member_pb2.ReplicateResponse]"

# A frame that brought nothing but positions is answered when the last answer is so old.
ANSWER_MS = 250
# Hand-overs and restarts are short, so the first retry comes soon.
RECONNECT = BackoffPolicy(first_s=0.05, max_s=2.0)


class CutNeeded(Exception):
    """The two logs differ. ``offset``: where to cut ours; with ``whole`` the whole log is removed,
    and begins again at ``offset``.
    """

    def __init__(self, offset: int, *, whole: bool) -> None:
        super().__init__(f"cut at {offset}, whole: {whole}")
        self.offset = offset
        self.whole = whole


@dataclass(frozen=True, slots=True)
class Follower:
    """This member, as it introduces itself to a writer."""

    cluster: str
    broker_group: str
    member_id: int
    log_file_bytes: int
    secret: SharedSecret | None = None  # for the writer's internal port


class Following:
    """Keeps the copy in step. :meth:`run` as a task; it ends with CutNeeded or StoreFailed, and
    after :meth:`leave`.
    """

    def __init__(
        self,
        storage: FollowerStorage,
        follower: Follower,
        promise: Callable[[int], int],
        clock: Clock,
        clocks: Clocks | None = None,
    ) -> None:
        """``promise(ms)``: see :meth:`services.haslave.elector.Elector.promise`. ``clocks``
        compares the writer's clock with this machine's.
        """
        self.refusals = Refusals()  # of what a writer sent
        self.bytes_copied = 0
        self.behind_bytes = 0  # as of the newest frame
        self.heard_s: float | None = None  # CLOCK_BOOTTIME of it
        self.connected = False  # the writer has agreed, and has not fallen silent
        self.lost = asyncio.Event()  # set when a stream has ended: the lease may be another's
        self.adopted = asyncio.Event()  # set when a writer's epoch was taken over
        # Why the last stream has ended, if the writer's release and this one do not fit.
        self.misfit: VersionUnsupported | StateTooNew | None = None
        self._storage = storage
        self._store = storage.store
        self._follower = follower
        self._promise = promise
        self._promise_ms = 0  # that the writer wants
        self._answers_ms = 0  # of the newest frame that was taken
        self._taken = asyncio.Event()  # such a frame
        self._clock = clock
        self._clocks = clocks
        self._release = own_release(KINDS)
        self._compares_clocks = False
        self._writer_clock = ""  # its name; empty: the clocks are not compared
        self._in_step_s = clock.monotonic_s()
        self._address = ""
        self._missed: tuple[str, type[CometError]] | None = None  # what was logged last
        self._misfits = OutageLogger(
            log,
            logging.ERROR,
            "cannot follow this writer: the releases do not fit; tries again",
            "follows a writer again",
        )
        self._readdressed = asyncio.Event()
        self._leaves = False
        self._left = asyncio.Event()  # a stream on which that was said has ended

    def follow(self, address: str) -> None:
        """Follow the writer at ``address`` from now on; empty: none."""
        if address != self._address:
            self._address = address
            self._readdressed.set()

    async def leave(self) -> None:
        """Announce the stop. Replication continues until the writer, which no longer waits for this
        member, ends the stream, or until the caller gives up.
        """
        self._leaves = True
        self._taken.set()
        if self.connected:
            await self._left.wait()

    def behind_s(self) -> float:
        """How long ago this copy last had everything; 0 while it has, as far as is known."""
        if self.connected and not self.behind_bytes:
            return 0.0
        return self._clock.monotonic_s() - self._in_step_s

    async def run(self) -> None:
        backoff = Backoff(RECONNECT, random.Random())
        while True:
            self._readdressed.clear()
            if self._address:
                try:
                    await self._until_readdressed(self._address, backoff)
                except (VersionUnsupported, StateTooNew) as error:
                    self.misfit = error
                    self._misfits.failing(error, writer=self._address)
                except CometError as error:
                    self._log_end(error)
                if self._leaves:
                    self._left.set()
                    return
                self.lost.set()
            pause_s = backoff.next_s() if self._address else None
            await race(self._readdressed.wait(), timeout_s=pause_s)

    def _log_end(self, error: CometError) -> None:
        # Once: while there is no writer there is an attempt every other second.
        before, self._missed = self._missed, (self._address, type(error))
        level = logging.DEBUG if before == self._missed else logging.INFO
        log.log(level, "stream ended", extra=fields(writer=self._address, error=error))

    async def _until_readdressed(self, address: str, backoff: Backoff) -> None:
        try:
            await race(self._stream_from(address, backoff), self._readdressed.wait())
        finally:
            self.connected = False

    # --- one stream -------------------------------------------------------------------------------

    async def _stream_from(self, address: str, backoff: Backoff) -> None:
        async with open_channel(address, self._follower.secret) as channel:
            call = member_pb2_grpc.MemberServiceStub(channel).Replicate()
            try:
                with wire_errors():
                    await self._agree(call)
                    await self._copy(call, backoff)
            finally:
                call.cancel()

    async def _agree(self, call: Replicate) -> None:
        view, hello = await self._hello()
        with suppress(asyncio.InvalidStateError):  # the call has ended; reading raises the reason
            await call.write(member_pb2.ReplicateRequest(hello=hello))
        try:
            answer = await _read(call)
        except VersionUnsupported as error:  # in the words of the writer's release
            raise VersionUnsupported(
                f"the writer refuses this follower, which speaks replication "
                f"{self._release.protocols}, and says: {error.message}"
            ) from error
        with self.refusals.counting(Reason.ORDER):
            if answer.WhichOneof("kind") != "hello":
                raise ReplicationBroken("the writer's first message is no hello")
        agreed = self._check(answer.hello, view)
        assert not self.connected, "one stream at a time"
        self._promise_ms = answer.hello.no_election_ms
        self._answers_ms = 0
        start = answer.hello.start_offset
        self._compares_clocks = CLOCK_COMPARISON in agreed.features
        is_named = self._compares_clocks and answer.hello.HasField("member_id")
        self._writer_clock = member_name(answer.hello.member_id) if is_named else ""
        match plan(view, start):
            case Plan.CUT:
                raise CutNeeded(start, whole=False)
            case Plan.RESET:
                raise CutNeeded(start, whole=True)
        epochs = [(epoch.epoch, epoch.start_offset) for epoch in answer.hello.epochs]
        await asyncio.to_thread(self._store.adopt_epochs, epochs)
        assert self._store.epoch == epochs[-1][0], (self._store.epoch, epochs[-1])
        assert self._store.appended_offset == start, "the writer begins at the end of the log"
        self._storage.watermarks.agreed()
        self.connected = True
        self.adopted.set()
        log.info(
            "following",
            extra=fields(epoch=self._store.epoch, start=start, protocol=agreed.protocol),
        )

    def _check(self, hello: member_pb2.WriterHello, own: LogView) -> Agreed:
        with self.refusals.counting(Reason.VERSION):
            agreed = agreed_by(
                hello.protocol_version, hello.format_version, hello.features, self._release
            )
            if hello.log_file_bytes != self._follower.log_file_bytes:
                raise VersionUnsupported(
                    f"the writer's log files have {hello.log_file_bytes} bytes, ours "
                    f"{self._follower.log_file_bytes} (mapped_file_size_commit_log)"
                )
        epochs = [(epoch.epoch, epoch.start_offset) for epoch in hello.epochs]
        with self.refusals.counting(Reason.EPOCH):
            check_writer(epochs, own)
        with self.refusals.counting(Reason.OFFSET):
            if hello.start_offset < 0:
                raise ReplicationBroken(f"the writer would begin at {hello.start_offset}")
        return agreed

    async def _hello(self) -> tuple[LogView, member_pb2.FollowerHello]:
        store = self._store
        offset, last = await asyncio.to_thread(store.last_record)
        end = store.appended_offset
        view = LogView(owned(store.epochs, end), store.min_offset, end, offset, crc32(last))
        return view, member_pb2.FollowerHello(
            protocol_version=self._release.protocol_min,
            protocol_version_max=self._release.protocol_max,
            format_version=self._release.format_version,
            features=sorted(self._release.features),
            state_kinds=sorted(self._release.state_kinds),
            cluster=self._follower.cluster,
            broker_group=self._follower.broker_group,
            member_id=self._follower.member_id,
            store_id=store.store_id,
            epochs=[
                member_pb2.EpochStart(epoch=number, start_offset=start)
                for number, start in view.epochs
            ],
            log_min_offset=view.log_min,
            log_end_offset=view.log_end,
            last_record_offset=view.last_offset,
            last_record_crc32=view.last_crc32,
        )

    async def _copy(self, call: Replicate, backoff: Backoff) -> None:
        acking = asyncio.ensure_future(self._tell(call))
        try:
            while True:
                frame = await _read(call)
                if acking.done():  # else the writer would wait for answers that never come
                    acking.result()
                with self.refusals.counting(Reason.ORDER):
                    if frame.WhichOneof("kind") != "chunk":
                        raise ReplicationBroken("a message came that is no chunk")
                await self._take(frame.chunk)
                backoff.reset()  # not before: a writer may agree, and then not let us in
                self._missed = self.misfit = None
                self._misfits.recovered(writer=self._address)
        finally:
            await stop_all([acking])

    async def _take(self, chunk: member_pb2.LogChunk) -> None:
        if self._clocks is not None and self._writer_clock and chunk.HasField("answers_boot_ms"):
            self._clocks.note(self._writer_clock, chunk.answers_boot_ms, chunk.sent_ms)
        data = chunk.data  # each time it is asked for it is copied
        self._check_chunk(chunk, data)
        if data:
            with self.refusals.counting(Reason.RECORDS):
                await self._storage.copy(chunk.offset, data)
            assert self._store.appended_offset >= chunk.offset + len(data)
            self.bytes_copied += len(data)
        visible = HighWatermarks(
            chunk.visible_flushed_offset,
            chunk.visible_replicated_offset,
            chunk.visible_replicated_flushed_offset,
        )
        self._storage.raise_marks(visible, chunk.flush_to_offset)
        self._answers_ms = chunk.sent_boot_ms
        self.heard_s = self._clock.boottime_s()
        self._taken.set()
        self.behind_bytes = max(0, chunk.writer_end_offset - self._store.appended_offset)
        if not self.behind_bytes:
            self._in_step_s = self._clock.monotonic_s()

    def _check_chunk(self, chunk: member_pb2.LogChunk, data: bytes) -> None:
        end = self._store.appended_offset
        with self.refusals.counting(Reason.EPOCH):
            if chunk.epoch != self._store.epoch:
                raise ReplicationBroken(f"a chunk of epoch {chunk.epoch} in {self._store.epoch}")
        with self.refusals.counting(Reason.OFFSET):
            if data and chunk.offset != end:
                raise ReplicationBroken(f"a chunk of {chunk.offset} came, this log ends at {end}")
            if chunk.writer_end_offset < chunk.offset + len(data):
                raise ReplicationBroken(f"a chunk beyond its log's end, {chunk.writer_end_offset}")
        with self.refusals.counting(Reason.CHECKSUM):
            if crc32(data) != chunk.data_crc32:
                raise ReplicationBroken(f"the chunk at {chunk.offset} changed on its way")

    async def _tell(self, call: Replicate) -> None:
        sent, sent_ms = (-1, -1, False), -ANSWER_MS
        taken = self._taken
        marks = self._storage.watermarks
        with self._storage.moved.subscribed(taken):
            while True:
                now = marks.appended, marks.flushed, self._leaves
                assert 0 <= marks.flushed <= marks.appended
                if now != sent or self._answers_ms - sent_ms >= ANSWER_MS:
                    sent, sent_ms = now, self._answers_ms
                    ack = member_pb2.ReplicaAck(
                        appended_offset=sent[0],
                        flushed_offset=sent[1],
                        answers_boot_ms=sent_ms,
                        no_election_ms=self._promise(self._promise_ms),
                        leaving=sent[2],
                    )
                    if self._compares_clocks:
                        ack.sent_ms = self._clock.wall_ms()
                        ack.sent_boot_ms = int(self._clock.boottime_s() * 1000)
                    with suppress(asyncio.InvalidStateError):  # reading raises why it has ended
                        await call.write(member_pb2.ReplicateRequest(ack=ack))
                await taken.wait()
                taken.clear()


async def _read(call: Replicate) -> member_pb2.ReplicateResponse:
    try:
        async with asyncio.timeout(SILENCE_S_MAX):
            response = await read(call)
    except TimeoutError:
        raise PeerUnavailable(f"the writer was silent for {SILENCE_S_MAX:g} s") from None
    if response is None:
        raise PeerUnavailable("the writer ended the stream")
    return response
