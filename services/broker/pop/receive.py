"""Gives messages to members of groups that receive (POP)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cometmq.errors import CometError, NoPermission, OffsetInvalid, StoreDamaged, TopicNotFound
from cometmq.filters import sql
from cometmq.format import properties, record
from cometmq.member.read.reader import PullAnswer, PullQuery, Reader, Room
from cometmq.member.read.received import places, read_offsets
from cometmq.member.read.search import Finder, TimeAnswer
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import retry
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.pop import acking
from cometmq.messaging.pop.leases import OPEN_MAX, Done, Lease, QueueLeases
from cometmq.messaging.pop.masks import dense, mask_of_offsets, offsets_of
from cometmq.messaging.pop.ordering import ORDERED_OPEN_MAX
from cometmq.messaging.pull import PullStatus
from cometmq.model import RETRY_PREFIX, Position, QueueKey
from cometmq.store.queries import Boundary
from cometmq.telemetry import fields, logger
from services.broker.groups.resets import Bound, ResetTarget
from services.broker.pop.groups import PopGroups, Turn

_log = logger(__name__)

COUNT_MAX = 1_024
BYTES_MAX = 3 * 1024 * 1024  # with one message more an answer has less than 8 MiB
TOPICS_MAX = 64
ATTEMPT_ID_LENGTH_MAX = 64
QUEUES_PER_CALL_MAX = 1_024  # of a group with more, a call looks at the next ones
QUEUES_PER_TURN = 64  # of the loop
SCANS_MAX = 8  # pulls of a queue in one call that find nothing for the filter
REPEATS_MAX = 10_000  # answers that can be repeated
AGAIN_MS = 1_000  # for what no return announces: messages not to be seen yet, queues left out
BURY_AGAIN_MS = 10_000  # until dead letters are tried again that could not be stored
_ORDERED_BYTES = 256 * 1024  # that are looked at for messages of other message groups


@dataclass(frozen=True, slots=True)
class Wanted:
    """A topic that the group reads, and its filter."""

    topic: str
    codes: frozenset[int] = frozenset()
    program: sql.Program | None = None


@dataclass(frozen=True, slots=True)
class ReceiveAsk:
    """The request of a member. ``queue_id`` None: any queue."""

    group: str
    wanted: tuple[Wanted, ...]
    queue_id: int | None
    max_count: int
    max_bytes: int
    invisible_ms: int
    start: ResetTarget
    attempt_id: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Messages of one queue that were given together."""

    key: QueueKey
    handle: str
    records: bytes
    count: int
    attempt: int
    visible_ms: int


@dataclass(slots=True)
class Received:
    """An answer. ``again_ms`` 0: nobody has messages that may come back. ``is_blocked``: messages
    wait for others of their message group. ``positions``: of each queue, where the group goes on,
    and the number of its newest return.
    """

    runs: list[Run] = field(default_factory=list)
    has_more: bool = False
    again_ms: int = 0
    is_blocked: bool = False
    positions: list[tuple[QueueKey, Position, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def size_bytes(self) -> int:
        return sum(len(run.records) for run in self.runs)


class _Call:
    """One call: what is left of its limits."""

    def __init__(self, ask: ReceiveAsk, settings: GroupSettings, now_ms: int, room: Room) -> None:
        self.ask = ask
        self.settings = settings
        self.now_ms = now_ms
        self.visible_ms = now_ms + ask.invisible_ms
        self.room = room
        self.answer = Received()
        self.given: list[tuple[QueueKey, int]] = []  # the leases

    @property
    def left(self) -> int:
        return self.ask.max_count - self.answer.count

    @property
    def left_bytes(self) -> int:
        return self.ask.max_bytes - self.answer.size_bytes

    @property
    def is_full(self) -> bool:
        return self.left <= 0 or self.left_bytes <= 0


class ReceiveService:
    """Belongs to the event loop."""

    def __init__(self, groups: PopGroups, storage: MemberStorage, reader: Reader) -> None:
        self._groups = groups
        self._storage = storage
        self._reader = reader
        self._finder = Finder(reader)
        self._repeats: OrderedDict[tuple[str, str], list[tuple[QueueKey, int]]] = OrderedDict()
        self._rounds = 0  # says with which queue a call begins

    async def receive(self, ask: ReceiveAsk, room: Room) -> Received:
        """Give a member messages. Raises GroupNotFound, GroupModeMismatch, NoPermission,
        TopicNotFound, QueueNotFound, FlowControl, and what reading and
        appending raise.
        """
        settings = self._groups.check_receive(ask.group)
        self._groups.pops.check_room()
        call = _Call(ask, settings, self._groups.now_ms(), room)
        if ask.attempt_id and await self._repeated(call):
            await self._written()
            return call.answer
        keys = await self._keys(ask)
        try:
            await self._fill(call, keys)
        finally:  # a member that did not wait for the answer asks again
            if ask.attempt_id and call.given:
                self._keep(ask, call.given)
        await self._written()
        if len(keys) == QUEUES_PER_CALL_MAX:  # there may be something in others
            call.answer.again_ms = min(call.answer.again_ms or AGAIN_MS, AGAIN_MS)
        if call.answer.runs or call.answer.has_more:
            call.answer.positions = []
        return call.answer

    async def _written(self) -> None:
        if self._groups.pops.has_unwritten:
            await self._groups.keeper.pops_written()

    async def _fill(self, call: _Call, keys: list[tuple[Wanted, QueueKey]]) -> None:
        """From these queues, until the call's limits are reached. A queue that fails keeps nobody
        from the others; the member asks it again soon. Raises the first error when all have failed.
        """
        first_error: CometError | None = None
        has_read = False
        for number, (wanted, key) in enumerate(keys):
            if number % QUEUES_PER_TURN == QUEUES_PER_TURN - 1:
                await asyncio.sleep(0)  # others want the loop too
            if call.is_full:
                call.answer.has_more = True
                break
            try:
                async with self._groups.turn(call.ask.group, key).lock:
                    await self._from_queue(call, wanted, key)
                has_read = True
            except CometError as error:
                first_error = first_error or error
        if first_error is not None and not has_read:
            raise first_error
        if first_error is not None:
            call.answer.again_ms = min(call.answer.again_ms or AGAIN_MS, AGAIN_MS)

    # --- which queues ---

    async def _keys(self, ask: ReceiveAsk) -> list[tuple[Wanted, QueueKey]]:
        """Queues of the call, each time beginning behind those of the call before. Topics that are
        gone, or may not be read, are left out. Raises the first error when all are.
        """
        topics = self._groups.state.topics
        if ask.queue_id is not None:
            [wanted] = ask.wanted
            topics.for_read(wanted.topic, ask.queue_id)
            await self._begin(ask, wanted.topic)
            return [(wanted, (wanted.topic, ask.queue_id))]
        wanted_all = list(ask.wanted)
        retry_topic = RETRY_PREFIX + ask.group
        if retry_topic not in {one.topic for one in wanted_all} and topics.find(retry_topic):
            wanted_all.append(Wanted(retry_topic))
        # Where RocketMQ has put what came again before this store was ours.
        groups = self._groups.state.groups
        theirs = (f"{retry_topic}_{wanted.topic}" for wanted in ask.wanted)
        wanted_all += [
            Wanted(topic)
            for topic in theirs
            if topics.find(topic) and retry.is_groups_retry_topic(topic, ask.group, groups)
        ]
        keys: list[tuple[Wanted, QueueKey]] = []
        first_error: CometError | None = None
        for wanted in wanted_all:
            try:
                topics.for_read(wanted.topic, 0)
                self._groups.keeper.check_open(wanted.topic)
                found = await self._begin(ask, wanted.topic)
            except (TopicNotFound, NoPermission) as error:  # its members learn it from its route
                first_error = first_error or error
                continue
            keys += [(wanted, key) for key in found]
        if first_error is not None and all(key[0].startswith(retry_topic) for _, key in keys):
            raise first_error
        first = self._rounds % len(keys)
        self._rounds += 1 if len(keys) <= QUEUES_PER_CALL_MAX else QUEUES_PER_CALL_MAX
        return (keys[first:] + keys[:first])[:QUEUES_PER_CALL_MAX]

    async def _begin(self, ask: ReceiveAsk, topic: str) -> list[QueueKey]:
        """The queues of the topic, in each of which the group has a place. Its first call fixes
        them.
        """
        state, pops = self._groups.state, self._groups.pops
        config = state.topics.get(topic)
        begun = self._groups.begun(ask.group, config)
        if begun is not None:
            return begun
        keys = [(topic, queue_id) for queue_id in range(config.read_queue_count)]
        is_first = not state.offsets.reads(ask.group, topic) and not any(
            pops.find(ask.group, key) for key in keys
        )
        places = await self._places(ask, keys) if is_first else {}
        self._groups.check_receive(ask.group)  # it may have gone meanwhile
        for key in keys:
            view = self._reader.queue(*key)
            committed = state.offsets.get(ask.group, key)
            if committed is not None:
                place = state.generations.of(*key).settle(committed).offset
            else:
                place = places.get(key, view.min_offset)
            pops.open(ask.group, key, place)
        self._groups.note_begun(ask.group, config, keys)
        return keys

    async def _places(self, ask: ReceiveAsk, keys: list[QueueKey]) -> dict[QueueKey, int]:
        settings = self._groups.keeper.group(ask.group)
        if retry.is_groups_retry_topic(keys[0][0], ask.group, self._groups.state.groups):
            return {}
        if ask.start.time_ms is not None:
            found = await self._finder.by_time(keys, ask.start.time_ms, Boundary.LOWER)
            places: dict[QueueKey, int] = {}
            for key, one in zip(keys, found, strict=True):
                if not isinstance(one, TimeAnswer):
                    raise one
                places[key] = one.position.offset
            return places
        if ask.start.bound is Bound.FIRST and settings.consume_from_min_enable:
            return {}
        for error in (await self._reader.uncertain_ends(keys)).values():
            raise error
        return {key: self._reader.queue(*key).max_offset for key in keys}

    # --- one queue ---

    async def _from_queue(self, call: _Call, wanted: Wanted, key: QueueKey) -> None:
        group = call.ask.group
        self._groups.check_receive(group)  # its mode may be about to change
        # Before the queue is looked at: what comes back meanwhile may have been missed.
        return_number = self._groups.returns.number(group, key)
        queue = self._groups.pops.find(group, key)
        if queue is None:  # reset, or deleted
            self._groups.note_ended(group, key[0])
            call.answer.has_more = True
            return
        if call.settings.policy.is_orderly:
            await self._in_order(call, wanted, key, queue)
        else:
            await self._again(call, key, queue)
            if not call.is_full:
                await self._new(call, wanted, key, queue)
        self._note_wait(call, key, queue, return_number)

    def _note_wait(
        self, call: _Call, key: QueueKey, queue: QueueLeases, return_number: int
    ) -> None:
        """When the member asks this queue again."""
        now_ms = self._groups.now_ms()
        next_ms = queue.next_return_ms(call.now_ms)
        again_ms = None if next_ms is None else max(next_ms - now_ms, 1)
        if queue.oldest_visible(call.now_ms) is not None:
            if call.settings.policy.is_orderly and again_ms is not None:
                call.answer.is_blocked = True  # by messages that others have
            else:
                again_ms = AGAIN_MS
        if again_ms is not None:
            call.answer.again_ms = min(call.answer.again_ms or again_ms, again_ms)
        offset = queue.next_offset
        if self._groups.is_full(call.settings, queue):  # what arrives has to wait
            offset = max(offset, self._storage.bounds(key)[1])
        place = Position(self._groups.state.pop_generation(key), offset)
        call.answer.positions.append((key, place, return_number))

    async def _again(self, call: _Call, key: QueueKey, queue: QueueLeases) -> None:
        """Messages whose time was over."""
        while not call.is_full:
            part = acking.next_part(queue, call.now_ms, call.left)
            if part is None:
                return
            number, first, mask, _ = part
            offsets = list(offsets_of(mask, first))
            if not await self._deliver_again(call, key, queue, number, offsets):
                return

    async def _deliver_again(
        self, call: _Call, key: QueueKey, queue: QueueLeases, number: int, offsets: Sequence[int]
    ) -> bool:
        """These messages of a lease, as far as they have tries left and can be read. False: some of
        them wait until consumers may see them, after a change of the writer.
        """
        found = await read_offsets(self._storage, key, offsets, call.left_bytes)
        lease = queue.find(number)
        if self._groups.pops.find(call.ask.group, key) is not queue or lease is None:
            return True  # acknowledged, or reset, meanwhile
        is_shown = not any(isinstance(one, OffsetInvalid) for _, one in found)
        good, dead = self._sorted(call, key, lease, found)
        if dead:
            await self._bury(call, key, queue, lease, dead)
            good = [pair for pair in good if lease.part(pair[0], 1)]
        if not good or queue.find(number) is not lease:
            return is_shown
        await call.room(sum(len(one) for _, one in good))
        good = [pair for pair in good if lease.part(pair[0], 1)]
        if good and self._groups.pops.find(call.ask.group, key) is queue:
            first, mask = mask_of_offsets([offset for offset, _ in good])
            records = b"".join(one for _, one in good)
            self._give(call, key, number, first, mask, lease.attempt + 1, records)
        return is_shown

    async def _bury(
        self, call: _Call, key: QueueKey, queue: QueueLeases, lease: Lease, dead: Sequence[int]
    ) -> None:
        """Send messages that have no try left to the dead letters. While these take none, they wait
        a little longer: the queue's other messages go on.
        """
        group, (first, mask) = call.ask.group, mask_of_offsets(dead)
        try:
            await self._groups.send_away(group, key, lease, first, mask, retry.DEAD)
        except CometError as error:
            about = fields(group=group, topic=key[0], queue=key[1], reason=error.message)
            _log.warning("dead letters wait", extra=about)
            held = lease.part(first, mask)
            if held and self._groups.pops.find(group, key) is queue:
                first, mask = acking.trimmed(lease.first, held)
                again_ms = call.now_ms + BURY_AGAIN_MS
                self._groups.give(group, key, lease.number, first, mask, again_ms, lease.attempt)

    def _sorted(
        self,
        call: _Call,
        key: QueueKey,
        lease: Lease,
        found: Sequence[tuple[int, bytes | CometError]],
    ) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Messages of a lease to be delivered, and those that have no try left. Those that are gone
        are done.
        """
        good: list[tuple[int, bytes]] = []
        dead: list[int] = []
        for offset, one in found:
            if not lease.part(offset, 1) or isinstance(one, OffsetInvalid):
                continue
            if isinstance(one, CometError):
                self._groups.note_lost(call.ask.group, key, offset, one)
                self._groups.finish(call.ask.group, key, Done(lease.number, offset, 1))
            elif self._is_dead(call, lease, one):
                dead.append(offset)
            else:
                good.append((offset, one))
        return good, dead

    def _is_dead(self, call: _Call, lease: Lease, found: bytes) -> bool:
        if not lease.attempt:
            return False
        tries = record.decode(found).reconsume_times + lease.attempt
        return self._groups.is_dead(call.settings, tries)

    def _give(
        self,
        call: _Call,
        key: QueueKey,
        source: int,
        first: int,
        mask: int,
        attempt: int,
        records: bytes,
    ) -> None:
        visible_ms = call.visible_ms
        lease, handle = self._groups.give(
            call.ask.group, key, source, first, mask, visible_ms, attempt
        )
        call.given.append((key, lease.number))
        run = Run(key, handle, records, lease.count, attempt, visible_ms)
        call.answer.runs.append(run)
        self._groups.metrics.pop_delivered(key[0], call.ask.group, lease.count, attempt)

    async def _new(self, call: _Call, wanted: Wanted, key: QueueKey, queue: QueueLeases) -> None:
        """Messages that nobody of the group has received."""
        room_left = OPEN_MAX - queue.open_count
        for _ in range(SCANS_MAX):
            if room_left <= 0:
                return
            count = min(call.left, room_left)
            answer = await self._scan(call, wanted, key, queue, count, call.left_bytes)
            if answer is None:
                return
            if answer.count:
                is_all = not wanted.codes and wanted.program is None
                start = queue.next_offset
                first, mask = start, dense(answer.count)
                if not is_all:
                    first, mask = mask_of_offsets([at for at, _, _ in places(answer.records)])
                self._give(call, key, 0, first, mask, 1, answer.records)
            self._groups.pops.skip(call.ask.group, key, answer.next_position.offset)
            if answer.count:
                call.answer.has_more |= answer.next_position.offset < answer.max_offset
                return
        call.answer.has_more = True

    async def _scan(
        self,
        call: _Call,
        wanted: Wanted,
        key: QueueKey,
        queue: QueueLeases,
        count: int,
        bytes_max: int,
    ) -> PullAnswer | None:
        """Messages from the queue's next offset on; None: there are none."""
        start = queue.next_offset
        low, readable, _ = self._storage.bounds(key)
        if low <= start == readable:  # as nearly always, of members that wait
            self._reader.flush_promptly()
            return None
        query = PullQuery(*key, Position(0, start), wanted.codes, count, bytes_max, wanted.program)
        try:
            answer = await self._reader.pull(query, call.room)
        except StoreDamaged as error:
            self._pass_damage(call, key, queue, start, error)
            return None
        if self._groups.pops.find(call.ask.group, key) is not queue or queue.next_offset != start:
            call.answer.has_more = True  # reset meanwhile
            return None
        if answer.status is PullStatus.NOT_FOUND or answer.next_position.offset <= start:
            return None
        return answer

    def _pass_damage(
        self, call: _Call, key: QueueKey, queue: QueueLeases, start: int, error: StoreDamaged
    ) -> None:
        """Passes over a message whose record is damaged. Raises the error if its queue is."""
        if not self._storage.store.read_units(*key, start, 1):
            raise error
        if self._groups.pops.find(call.ask.group, key) is queue and queue.next_offset == start:
            self._groups.note_lost(call.ask.group, key, start, error)
            self._groups.pops.skip(call.ask.group, key, start + 1)
        call.answer.has_more = True

    # --- in order of message groups ---

    async def _in_order(
        self, call: _Call, wanted: Wanted, key: QueueKey, queue: QueueLeases
    ) -> None:
        turn = self._groups.turn(call.ask.group, key)
        await self._learn(turn, key, queue)
        blocked = turn.keys.blocked(queue, call.now_ms)
        for lease, offsets in turn.keys.take_visible(queue, call.now_ms, blocked, call.left):
            await self._deliver_again(call, key, queue, lease.number, offsets)
            if call.is_full:
                return
        for _ in range(SCANS_MAX):
            if call.is_full or self._groups.is_full(call.settings, queue):
                return
            count = min(ORDERED_OPEN_MAX - queue.open_count, 4 * call.left)
            answer = await self._scan(call, wanted, key, queue, count, _ORDERED_BYTES)
            if answer is None:
                return
            # Some may have been done while it was read.
            self._split(call, turn, key, queue, turn.keys.open(queue), answer)
        call.answer.has_more = True

    async def _learn(self, turn: Turn, key: QueueKey, queue: QueueLeases) -> None:
        """The keys of messages that an earlier writer delivered."""
        missing = turn.keys.missing(queue)
        while missing:
            found = await read_offsets(
                self._storage, key, missing, _ORDERED_BYTES, with_hidden=True
            )
            turn.keys.learn(
                (offset, _key(one) if isinstance(one, bytes) else b"") for offset, one in found
            )
            missing = missing[len(found) :]

    def _split(
        self,
        call: _Call,
        turn: Turn,
        key: QueueKey,
        queue: QueueLeases,
        blocked: set[bytes],
        answer: PullAnswer,
    ) -> None:
        """New messages are delivered, or wait for those of their message group."""
        start_of = {offset: (at, end) for offset, at, end in places(answer.records)}
        new = [(offset, _key(answer.records[at:end])) for offset, (at, end) in start_of.items()]
        split = turn.keys.split_new(new, blocked, call.left)
        looked_at = answer.next_position.offset
        if split is not None:
            last = split.first + (split.taken | split.waiting).bit_length()
            if last <= new[-1][0]:  # as many as are wanted came before the end
                looked_at = last
        if split is not None and split.waiting:
            first, mask = acking.trimmed(split.first, split.waiting)
            self._groups.give(call.ask.group, key, 0, first, mask, 0, 0)
        if split is not None and split.taken:
            first, mask = acking.trimmed(split.first, split.taken)
            spans = [start_of[offset] for offset in offsets_of(mask, first)]
            records = b"".join(answer.records[at:end] for at, end in spans)
            self._give(call, key, 0, first, mask, 1, records)
        self._groups.pops.skip(call.ask.group, key, looked_at)
        call.answer.has_more |= call.is_full and looked_at < answer.max_offset

    # --- answers that are asked for again ---

    def _keep(self, ask: ReceiveAsk, given: list[tuple[QueueKey, int]]) -> None:
        self._repeats[ask.group, ask.attempt_id] = given
        if len(self._repeats) > REPEATS_MAX:
            self._repeats.popitem(last=False)

    async def _repeated(self, call: _Call) -> bool:
        """Whether the call came before, and what it got is still its own: it gets it again."""
        group = call.ask.group
        for key, number in self._repeats.get((group, call.ask.attempt_id), ()):
            queue = self._groups.pops.find(group, key)
            lease = queue.find(number) if queue is not None else None
            if lease is None or lease.visible_ms <= call.now_ms:
                continue
            offsets = list(offsets_of(lease.mask, lease.first))
            # Its handle names all of them, also if it asks for less now.
            found = await read_offsets(self._storage, key, offsets, BYTES_MAX)
            records = [one for _, one in found if isinstance(one, bytes)]
            await call.room(sum(map(len, records)))
            handle = self._groups.handle(group, key, lease)
            run = Run(key, handle, b"".join(records), len(records), lease.attempt, lease.visible_ms)
            call.answer.runs.append(run)
        return bool(call.answer.runs)


def _key(found: bytes) -> bytes:
    """The sharding key of a record."""
    return properties.sharding_key_of(record.raw_properties(found, 0)[1])
