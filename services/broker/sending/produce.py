"""Batches of producers at the writer: checked, limited by bytes in flight, appended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from cometmq.clock import Clock
from cometmq.errors import (
    BatchChecksumMismatch,
    BatchOutsideWindow,
    CometError,
    FlowControl,
    InvalidRequest,
    TopicNotFound,
)
from cometmq.format import delayed, halves, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import HALF_QUEUE, HALF_TOPIC, OP_TOPIC, QUEUE_ID, HalfForm
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC, TimerForm
from cometmq.member.hosts import address_of_host, caller_of_host
from cometmq.member.read.records import log_offsets_of
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage, Segment, Ticket
from cometmq.messaging.dedup import Ids, ids_of
from cometmq.messaging.half_runs import HalfRun
from cometmq.messaging.quotas import Caller, Charge, QuotaMeter, Scope, Use, Way
from cometmq.messaging.topics import check_type
from cometmq.model import MessageType, SendStatus, TopicConfig
from cometmq.names import check_new_producer_group
from cometmq.native import crc32
from cometmq.replication.watermarks import REPLICATED, DurabilityClass, union
from cometmq.rpc.shares import Buckets
from cometmq.store.writer import Appended
from cometmq.turns import Turns
from services.broker.delay.timer_slots import TimerSlots
from services.broker.sending.stored_batch import stored_batch

AUTO_CREATED_QUEUES_MAX = 4  # of a topic that its first message makes, as in RocketMQ


class Claim(NamedTuple):
    """A run of records as its sender describes it. ``delay_level`` 0: it waits for no level.
    ``wait_store`` False: it is acknowledged when it is appended. ``half``: it belongs to
    transactions, and waits for their ends. ``timer``: how its records name the time that they wait
    for.
    """

    topic: str
    queue_id: int
    record_count: int
    delay_level: int = 0
    wait_store: bool = True
    half: HalfForm | None = None
    timer: TimerForm = TimerForm.NONE

    @property
    def waits(self) -> bool:
        """Whether consumers get the messages later, at some time."""
        return bool(self.delay_level or self.timer)


class SystemTopicMissing(Exception):
    """The first message of its kind in this broker group: system topics have to be made, with so
    many queues each.
    """

    def __init__(self, queue_counts: Mapping[str, int]) -> None:
        super().__init__(*queue_counts)
        self.queue_counts = queue_counts


class ProduceObserver(Protocol):
    """The counters of messages and batches that come in."""

    def messages_in(self, topic: str, count: int, size_bytes: int) -> None: ...
    def appended(self, seconds: float) -> None: ...
    def acknowledged(self, seconds: float) -> None: ...
    def late(self) -> None: ...
    def known(self, count: int) -> None: ...
    def sender_forgotten(self) -> None: ...
    def throttled(self, way: Way, scope: Scope) -> None: ...


class ReplyTaker(Protocol):
    """Hands replies to their requesters."""

    def check(self, records: bytes, claims: Sequence[Claim]) -> Sequence[Any]: ...
    def stored(self, replies: Sequence[Any], ticket: Ticket) -> None: ...


@dataclass(frozen=True, slots=True)
class ProducePolicy:
    """The limits that the writer sets."""

    in_flight_bytes_max: int
    auto_create_topics: bool
    new_topic: TopicConfig  # what a request that says nothing asks for
    sync_flush_timeout_s: float
    slave_timeout_s: float
    immunity_s: float = 6.0  # of half messages that say nothing
    dedup: bool = True  # a batch that is sent again is not stored again
    # Of topics that first messages make, by one address: at once, and then one each so often.
    topic_creations_max: int = 500
    topic_creation_interval_s: float = 5.0

    @property
    def auto_created_queues(self) -> int:
        """How many queues a topic gets that is made by its first message."""
        return min(AUTO_CREATED_QUEUES_MAX, self.new_topic.write_queue_count)


class Accepted(NamedTuple):
    """A batch that is in the log, and when its sender has to be answered. ``record_count``: how
    many of its records.
    """

    ticket: Ticket
    answer_by_s: float  # on the monotonic clock
    record_count: int
    is_known: bool = False  # it was stored when it came before
    is_partial: bool = False  # then only its first records: a crash has taken the others
    # Of its messages that wait for a time of their own: topic, first offset in the timer queue, and
    # how many, for each segment of them.
    timers: tuple[tuple[str, int, int], ...] = ()


class ProduceHandler:
    """Takes batches into the log. Everything here belongs to the event loop."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        policy: ProducePolicy,
        store_host: bytes,
        observer: ProduceObserver,
        clock: Clock,
        replies: ReplyTaker | None = None,
        timer_slots: TimerSlots | None = None,
    ) -> None:
        # Of batches that wait for copies, and of all others that wait, answered late or not: each
        # keeps its place in the queues of what waits, and copies may lag for long.
        self._in_flight_bytes = {True: 0, False: 0}
        self._storage = storage
        self._keeper = keeper
        self._topics = keeper.state.topics
        self._policy = policy
        self._store_host = store_host
        self._observer = observer
        self._clock = clock
        self._replies = replies
        self._timer_slots = timer_slots
        self._quotas = QuotaMeter(Way.SEND, lambda: keeper.state.quotas, observer.throttled)
        self._creations = Buckets(
            policy.topic_creations_max,
            policy.topic_creation_interval_s,
            "topics",
            "topic_creations_per_peer_max, topic_creation_interval_s",
        )

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of batches that wait for their acknowledgement."""
        return sum(self._in_flight_bytes.values())

    async def take(
        self,
        records: bytes,
        claims: Sequence[Claim],
        born_host: bytes,
        checksum: int | None = None,
        *,
        client_id: str = "",
    ) -> Accepted:
        """Append a batch whole, or raise what is wrong with it; one that is stored already is not
        stored again. Creates missing topics where that is allowed. ``client_id``: the client
        that it counts against, at the sender's address.
        """
        turns = Turns("creation of what a batch needs")
        while True:
            try:
                return self.append(records, claims, born_host, checksum, client_id=client_id)
            except (TopicNotFound, SystemTopicMissing) as missing:
                turns.next()
                await self.create_missing(missing, claims, born_host)

    async def create_missing(
        self,
        missing: TopicNotFound | SystemTopicMissing,
        claims: Sequence[Claim],
        born_host: bytes,
    ) -> None:
        """Creates what :meth:`append` missed, or raises it where that is not allowed."""
        if isinstance(missing, SystemTopicMissing):
            for topic, queue_count in missing.queue_counts.items():
                await self._keeper.create_system_topic(topic, queue_count)
            return
        if missing.segment is None or not self._policy.auto_create_topics:
            raise missing
        await self._create(claims[missing.segment].topic, missing, born_host)

    @property
    def dedup(self) -> bool:
        """Whether messages that are sent again are looked for."""
        return self._policy.dedup

    async def settled(self, accepted: Accepted) -> SendStatus:
        """Wait until the batch is acknowledged or its sender cannot wait any longer. StoreFailed:
        the disk refused, and whether the batch survives is not known.
        """
        acked = accepted.ticket.acked
        if acked is None:
            return SendStatus.SEND_OK
        if not acked.done():
            # Not wait_for: the batch stays in flight, whether its sender still waits or not.
            left_s = accepted.answer_by_s - self._clock.monotonic_s()
            await asyncio.wait([acked], timeout=max(0.0, left_s))
        if not acked.done():
            self._observer.late()
            return self._lacking(accepted.ticket)
        assert acked.done()
        acked.result()
        return SendStatus.SEND_OK

    def _lacking(self, ticket: Ticket) -> SendStatus:
        assert ticket.acked is not None, "a batch that waits for nothing is never late"
        on_disk = self._storage.watermarks.flushed >= ticket.appended.end_offset
        disk_wanted = ticket.demands & DurabilityClass.FLUSHED
        if disk_wanted and not on_disk:
            return SendStatus.FLUSH_DISK_TIMEOUT
        return SendStatus.FLUSH_SLAVE_TIMEOUT

    def append(
        self,
        records: bytes,
        claims: Sequence[Claim],
        born_host: bytes,
        checksum: int | None = None,
        *,
        has_ids: bool = True,
        client_id: str = "",
    ) -> Accepted:
        """As :meth:`take`, at once: raises TopicNotFound and SystemTopicMissing for what
        :meth:`create_missing` creates. ``has_ids`` False: its sender has not numbered the messages.
        """
        came_s = self._clock.monotonic_s()
        if checksum is not None and crc32(records) != checksum:
            raise BatchChecksumMismatch(f"CRC-32 of {len(records)} bytes is not {checksum:#010x}")
        segments = self._segments(claims)
        record_count = sum([claim.record_count for claim in claims])
        is_numbered = has_ids and self._policy.dedup and records
        ids = ids_of(records, record_count) if is_numbered else None
        if ids is not None:
            known = self._known(ids, records, segments, came_s)
            if known is not None:
                offsets = known.ticket.appended.queue_offsets
                return known._replace(timers=_timer_runs(claims, offsets, known.record_count))
        replies = self._replies.check(records, claims) if self._replies is not None else ()
        charges = self._check_quotas(claims, born_host, client_id, came_s)
        has_halves = self._check_half_room(claims)
        slots = self._check_slots(records, claims)
        self._storage.check_room(len(records))
        acks = union([segment.ack_demands for segment in segments])
        for_copies = acks is not DurabilityClass.ASYNC and bool(acks & REPLICATED)
        self._check_in_flight(len(records), for_copies)
        if for_copies:
            self._storage.authority.check_in_sync()
        assert len(segments) == len(claims)
        ticket = self._storage.append(
            records, segments, born_host=born_host, store_host=self._store_host
        )
        self._take_slots(slots)
        if has_halves:
            self._open_halves(claims, ticket.appended, came_s)
        streams = self._keeper.state.streams
        if ids is not None and streams.add(ids, ticket.appended.log_offset, came_s):
            self._observer.sender_forgotten()
        appended_s = self._clock.monotonic_s() - came_s
        self._observer.appended(appended_s)
        self._track(ticket.acked, len(records), for_copies, came_s)
        if replies:
            assert self._replies is not None
            self._replies.stored(replies, ticket)
        if charges:
            self._use_quotas(charges, claims, ticket.appended.segment_bytes, came_s)
        for claim, size_bytes in zip(claims, ticket.appended.segment_bytes, strict=True):
            self._observer.messages_in(claim.topic, claim.record_count, size_bytes)
        return Accepted(
            ticket,
            came_s + self._patience_s(ticket.demands),
            record_count,
            timers=_timer_runs(claims, ticket.appended.queue_offsets, record_count),
        )

    def _check_slots(self, records: bytes, claims: Sequence[Claim]) -> Counter[int]:
        """How many messages wait for which second. FlowControl: too many wait for one."""
        if self._timer_slots is None:
            return Counter()
        runs = [(claim.timer, claim.record_count) for claim in claims]
        return self._timer_slots.check(records, runs, self._clock.wall_ms())

    def _take_slots(self, counts: Counter[int]) -> None:
        if self._timer_slots is not None:
            self._timer_slots.add(counts)

    def _check_quotas(
        self, claims: Sequence[Claim], born_host: bytes, client_id: str, now_s: float
    ) -> list[list[Charge]]:
        """What each run counts against; empty: there are no quotas. FlowControl: one is used up."""
        if not self._keeper.state.quotas.limits_sends:
            return []
        caller = caller_of_host(born_host, client_id)
        self._quotas.check(self._quotas.charges(caller, ""), now_s)  # of all the batch
        charges = [self._quotas.charges(caller, claim.topic) for claim in claims]
        for index, some in enumerate(charges):
            try:
                self._quotas.check(some, now_s)
            except FlowControl as error:
                error.segment = index
                raise
        return charges

    def _use_quotas(
        self,
        charges: Sequence[Sequence[Charge]],
        claims: Sequence[Claim],
        sizes: Sequence[int],
        now_s: float,
    ) -> None:
        uses = [
            Use(some, claim.record_count, size_bytes)
            for some, claim, size_bytes in zip(charges, claims, sizes, strict=True)
        ]
        self._quotas.take(uses, now_s)

    def check_address(self, caller: Caller) -> None:
        """Raises FlowControl while an address has used up its quota of sends."""
        self._quotas.check(self._quotas.charges(caller, ""), self._clock.monotonic_s())

    def use_address(self, caller: Caller, count: int, size_bytes: int) -> None:
        """An address had so much stored that is of no topic of its own: what it sent back."""
        use = Use(self._quotas.charges(caller, ""), count, size_bytes)
        self._quotas.take([use], self._clock.monotonic_s())

    def _known(
        self, ids: Ids, records: bytes, segments: Sequence[Segment], came_s: float
    ) -> Accepted | None:
        """The batch as it was stored when it came before; None: it is new."""
        try:
            run = self._keeper.state.streams.find(ids)
        except LookupError:
            raise BatchOutsideWindow(
                f"of the {ids.id_count} messages from {ids.stream.decode()}{ids.first:08X} on some "
                "are stored, and it is not known any more where"
            ) from None
        if run is None:
            return None
        found = stored_batch(self._storage.store, run, ids, records, segments)
        if found is None:  # other messages with the same ids: this batch is not stored yet
            return None
        demands = union(segment.ack_demands for segment in segments)
        is_partial = len(found.segment_bytes) < ids.id_count
        return self.known(found, demands, came_s, is_partial=is_partial)

    def known(
        self, found: Appended, demands: DurabilityClass, came_s: float, *, is_partial: bool = False
    ) -> Accepted:
        """Answers a batch that is sent again with its place that was found in the log;
        ``segment_bytes`` has one entry for each of its records. BrokerDraining.
        """
        self._storage.check_open()
        ticket = Ticket(found, self._storage.acked(found.end_offset, demands), demands)
        count = len(found.segment_bytes)
        self._observer.known(count)
        answer_by_s = came_s + self._patience_s(demands)
        return Accepted(ticket, answer_by_s, count, is_known=True, is_partial=is_partial)

    def has_topic(self, topic: str) -> bool:
        """Whether the topic is there, and is not being deleted."""
        return self._keeper.has_topic(topic)

    def demands_of(self, topic: str) -> DurabilityClass:
        """The conditions that a message of the topic waits for."""
        return topic_demands(self._topics, topic)

    def _patience_s(self, demands: DurabilityClass) -> float:
        policy = self._policy
        return policy.slave_timeout_s if demands & REPLICATED else policy.sync_flush_timeout_s

    def _segments(self, claims: Sequence[Claim]) -> list[Segment]:
        segments: list[Segment] = []
        for index, claim in enumerate(claims):
            topic, queue_id, count, _, wait_store, half, _ = claim
            try:
                config = self._topics.for_send(topic, queue_id)
                self._keeper.check_open(topic)
                check_type(config, _type_of(claim))
                demands = topic_demands(self._topics, topic)
                if half is not None:
                    segments.append(self._half(claim, half, demands))
                elif claim.waits:
                    segments.append(self._delayed(claim, demands))
                else:
                    segments.append(
                        Segment(
                            topic,
                            queue_id,
                            count,
                            demands,
                            b"" if wait_store else delayed.NO_WAIT_PREFIX,
                            wait_store=wait_store,
                            needs_key=config.message_type is MessageType.FIFO,
                        )
                    )
            except CometError as error:
                error.segment = index
                raise
        return segments

    def _delayed(self, claim: Claim, demands: DurabilityClass) -> Segment:
        """A run of delayed messages: they lie in the queue of their level, or in that of all whose
        time is their own, until they are due.
        """
        topic, queue_id, count, level, wait_store, _, timer = claim
        if timer:
            return self._timed(claim, demands)
        delayed.check_level(level)
        if SCHEDULE_TOPIC not in self._topics:
            raise SystemTopicMissing({SCHEDULE_TOPIC: delayed.level_count()})
        prefix = delayed.stored_prefix(level, topic, queue_id, wait_store=wait_store)
        return Segment(
            SCHEDULE_TOPIC,
            delayed.queue_id_of(level),
            count,
            demands | topic_demands(self._topics, SCHEDULE_TOPIC),
            prefix,
            delayed.delay_ms(level),
            wait_store,
        )

    def _half(self, claim: Claim, form: HalfForm, demands: DurabilityClass) -> Segment:
        """A run of half messages: they lie in the half queue until their transactions end."""
        check_new_producer_group(form.group)
        halves.check_immunity(form.immunity_s)
        if claim.waits:
            raise InvalidRequest("a message of a transaction has no delay")
        if not claim.wait_store:
            raise InvalidRequest("a message of a transaction waits until it is stored")
        if HALF_TOPIC not in self._topics or OP_TOPIC not in self._topics:
            raise SystemTopicMissing({HALF_TOPIC: 1, OP_TOPIC: 1})
        return Segment(
            HALF_TOPIC,
            QUEUE_ID,
            claim.record_count,
            demands | topic_demands(self._topics, HALF_TOPIC),
            halves.prefix(form, claim.topic, claim.queue_id),
        )

    def _check_half_room(self, claims: Sequence[Claim]) -> bool:
        """Whether there are half messages among them. FlowControl: too many are open."""
        count = sum([claim.record_count for claim in claims if claim.half is not None])
        if count:
            self._keeper.state.halves.check_room(count)
        return count > 0

    def _open_halves(self, claims: Sequence[Claim], appended: Appended, now_s: float) -> None:
        """The halves of a batch that is in the log."""
        end_place = appended.log_offset  # segments lie end to end
        for claim, first, size_bytes in zip(
            claims, appended.queue_offsets, appended.segment_bytes, strict=True
        ):
            end_place += size_bytes
            if claim.half is None:
                continue
            places = log_offsets_of(self._storage.store, HALF_QUEUE, first, claim.record_count)
            group, stored_ms = claim.half.group, appended.store_time_ms
            due_s = now_s + (claim.half.immunity_s or self._policy.immunity_s)
            run = HalfRun(first, places, end_place, group, stored_ms)
            self._keeper.state.halves.add_run(run, due_s)

    def _timed(self, claim: Claim, demands: DurabilityClass) -> Segment:
        if TIMER_TOPIC not in self._topics:
            raise SystemTopicMissing({TIMER_TOPIC: 1})
        return Segment(
            *TIMER_QUEUE,
            claim.record_count,
            demands | topic_demands(self._topics, TIMER_TOPIC),
            timers.prefix(claim.topic, claim.queue_id, wait_store=claim.wait_store),
            wait_store=claim.wait_store,
            timer=claim.timer,
        )

    async def _create(self, topic: str, missing: TopicNotFound, born_host: bytes) -> None:
        assert missing.segment is not None
        new = self._policy.new_topic
        count = self._policy.auto_created_queues
        config = replace(new, name=topic, read_queue_count=count, write_queue_count=count)
        try:
            if topic in self._topics:  # being deleted
                raise missing
            self._creations.take(address_of_host(born_host), self._clock.monotonic_s())
            await self._keeper.create_topic(config)
        except CometError as error:
            error.segment = missing.segment
            raise

    def _check_in_flight(self, size_bytes: int, for_copies: bool) -> None:
        waiting = self._in_flight_bytes[for_copies]
        assert waiting >= 0, waiting
        # A single batch always gets in, else one above the limit could never be sent.
        if waiting and waiting + size_bytes > self._policy.in_flight_bytes_max:
            raise FlowControl(
                f"{waiting} bytes wait for {'copies' if for_copies else 'their acknowledgement'}, "
                f"{self._policy.in_flight_bytes_max} may (send_in_flight_bytes_max)"
            )

    def _track(
        self, acked: asyncio.Future[None] | None, size_bytes: int, for_copies: bool, came_s: float
    ) -> None:
        if acked is None:
            self._observer.acknowledged(self._clock.monotonic_s() - came_s)
            return
        self._in_flight_bytes[for_copies] += size_bytes

        def done(future: asyncio.Future[None]) -> None:
            self._in_flight_bytes[for_copies] -= size_bytes
            assert self._in_flight_bytes[for_copies] >= 0
            if not future.cancelled() and future.exception() is None:
                self._observer.acknowledged(self._clock.monotonic_s() - came_s)

        acked.add_done_callback(done)


def _timer_runs(
    claims: Sequence[Claim], queue_offsets: Sequence[int], record_count: int
) -> tuple[tuple[str, int, int], ...]:
    """As in ``Accepted``, of the first so many records."""
    runs: list[tuple[str, int, int]] = []
    left = record_count
    for claim, first in zip(claims, queue_offsets, strict=False):
        count = min(claim.record_count, left)
        left -= count
        if claim.timer:
            runs.append((claim.topic, first, count))
    return tuple(runs)


def _type_of(claim: Claim) -> MessageType:
    if claim.half is not None:
        return MessageType.TRANSACTION
    return MessageType.DELAY if claim.waits else MessageType.NORMAL
