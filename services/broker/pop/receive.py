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
from cometmq.messaging.pop.masks import dense, lowest, mask_of_offsets, offsets_of, trimmed
from cometmq.messaging.pop.ordering import ORDERED_OPEN_MAX
from cometmq.messaging.pull import PullStatus
from cometmq.model import RETRY_PREFIX, Position, QueueKey
from cometmq.store.queries import Boundary
from cometmq.telemetry import fields, logger
from cometmq.turns import Turns
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
LATE_MS = 20  # that an answer may have waited since its messages were taken
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
    begun_topics: frozenset[str] = frozenset()  # which begin at their first messages


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


@dataclass(slots=True)
class _Taken:
    """Messages in a lease of the call. ``records``, of ``count`` messages: None while the call
    waits for room, they are read again then.
    """

    key: QueueKey
    queue: QueueLeases
    lease: Lease
    records: bytes | None
    count: int


class _Call:
    """One call: what it has taken for its member, and what is left of its limits. ``now_ms``: when
    it came to the queue that it looks at.
    """

    def __init__(self, ask: ReceiveAsk, settings: GroupSettings, now_ms: int, room: Room) -> None:
        self.ask = ask
        self.settings = settings
        self.now_ms = now_ms
        self.room = room
        self.answer = Received()
        self.taken: list[_Taken] = []
        self.left = ask.max_count
        self.left_bytes = ask.max_bytes
        self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.left <= 0 or self.left_bytes <= 0

    def take(self, key: QueueKey, queue: QueueLeases, lease: Lease, records: bytes) -> None:
        """The messages of a lease are for the member of the call."""
        self.taken.append(_Taken(key, queue, lease, records, lease.count))
        self.left -= lease.count
        self.left_bytes -= len(records)
        self.size_bytes += len(records)

    def forget_records(self) -> None:
        """The call has to wait for room: what it waits with takes no memory."""
        for one in self.taken:
            one.records = None


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
        keys: list[tuple[Wanted, QueueKey]] = []
        try:
            if not await self._takes_again(call):
                keys = await self._keys(ask)
                await self._fill(call, keys)
            await self._hand_out(call)
            await self._written()
        except CometError:  # the member gets nothing: others may
            for one in call.taken:
                self._give_back(ask.group, one.key, one.queue, one.lease)
            call.taken.clear()
            raise
        finally:  # a member that did not wait for the answer asks again
            if ask.attempt_id and call.taken:
                self._keep(ask, [(one.key, one.lease.number) for one in call.taken])
        if len(keys) == QUEUES_PER_CALL_MAX:  # there may be something in others
            call.answer.again_ms = min(call.answer.again_ms or AGAIN_MS, AGAIN_MS)
        if call.answer.runs or call.answer.has_more:
            call.answer.positions = []
        return call.answer

    async def _hand_out(self, call: _Call) -> None:
        """Waits for room, and for the right to give messages away, while others receive from the
        same queues. The time of the messages counts from now, when nothing keeps the answer any
        more.
        """
        if call.taken:
            await self._room(call)
            if call.settings.policy.is_orderly:
                # A successor that does not know what freed a key would give an earlier message of
                # it to another member.
                topics = {one.key[0] for one in call.taken}
                await self._groups.keeper.pops_stored(topics)
        await self._storage.until_certain()
        if not call.taken:
            return
        found = [await self._records(call.ask.group, one) for one in call.taken]
        visible_ms = self._groups.now_ms() + call.ask.invisible_ms
        for one, records in zip(call.taken, found, strict=True):
            if self._is_held(call.ask.group, one.key, one.queue, one.lease):
                self._answer(call, one, records, visible_ms)
        call.answer.has_more |= not call.answer.runs

    async def _room(self, call: _Call) -> None:
        waits = asyncio.get_running_loop().call_soon(call.forget_records)
        try:
            await call.room(call.size_bytes)
        finally:
            waits.cancel()

    async def _records(self, group: str, one: _Taken) -> bytes:
        """Those that can be read, end to end."""
        if one.records is not None:
            return one.records
        offsets = list(offsets_of(one.lease.mask, one.lease.first))
        found = await read_offsets(self._storage, one.key, offsets, BYTES_MAX)
        return b"".join(record for _, record in found if isinstance(record, bytes))

    def _is_held(self, group: str, key: QueueKey, queue: QueueLeases, lease: Lease) -> bool:
        """Whether the messages are still in this lease: the group was not reset, and no other
        member has them.
        """
        return self._groups.pops.find(group, key) is queue and queue.find(lease.number) is lease

    def _answer(self, call: _Call, one: _Taken, records: bytes, visible_ms: int) -> None:
        """Puts messages into the answer, which names no message that it lacks."""
        group, lease = call.ask.group, one.lease
        first, mask = lease.first, lease.mask
        if one.records is None or lease.count != one.count:
            pieces = [place for place in places(records) if lease.part(place[0], 1)]
            if not pieces:
                return
            records = b"".join(records[at:end] for _, at, end in pieces)
            first, mask = mask_of_offsets([offset for offset, _, _ in pieces])
        if visible_ms - lease.visible_ms > LATE_MS or (first, mask) != (lease.first, lease.mask):
            lease = self._groups.give(
                group, one.key, lease.number, first, mask, visible_ms, lease.attempt
            )
            one.lease = lease
        handle = self._groups.handle(group, one.key, lease)
        run = Run(one.key, handle, records, lease.count, lease.attempt, lease.visible_ms)
        call.answer.runs.append(run)
        self._groups.metrics.pop_delivered(one.key[0], group, lease.count, lease.attempt)

    def _give_back(self, group: str, key: QueueKey, queue: QueueLeases, lease: Lease) -> None:
        """Messages that were taken for a member which did not get them: others may have them now,
        and the delivery does not count.
        """
        if self._is_held(group, key, queue, lease):
            count, attempt = lease.count, lease.attempt - 1
            again_ms = self._groups.now_ms() if attempt else 0
            self._groups.give(group, key, lease.number, lease.first, lease.mask, again_ms, attempt)
            self._groups.returns.came_back(group, key, count)

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
        is_new = is_first and topic not in ask.begun_topics
        places = await self._places(ask, keys) if is_new else {}
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
        call.now_ms = self._groups.now_ms()
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
        if self._groups.pops.find(group, key) is queue:
            self._note_wait(call, key, queue, return_number)
        else:  # reset, or deleted, meanwhile
            call.answer.has_more = True

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
        turns = Turns("delivery of messages that come again")
        # Nothing leaves the leases of a queue that the group was reset in.
        while not call.is_full and self._groups.pops.find(call.ask.group, key) is queue:
            part = acking.next_part(queue, call.now_ms, call.left)
            if part is None:
                return
            turns.next(part)
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
        if lease is None or not self._is_held(call.ask.group, key, queue, lease):
            return True  # acknowledged, or reset, meanwhile
        is_shown = not any(isinstance(one, OffsetInvalid) for _, one in found)
        good, dead = self._sorted(call, key, lease, found)
        if dead:
            await self._bury(call, key, queue, lease, dead)
            good = [pair for pair in good if lease.part(pair[0], 1)]
        if good and self._is_held(call.ask.group, key, queue, lease):
            first, mask = mask_of_offsets([offset for offset, _ in good])
            records = b"".join(one for _, one in good)
            self._take(call, key, queue, number, first, mask, lease.attempt + 1, records)
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
                first, mask = trimmed(lease.first, held)
                again_ms = self._groups.now_ms() + BURY_AGAIN_MS
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

    def _take(
        self,
        call: _Call,
        key: QueueKey,
        queue: QueueLeases,
        source: int,
        first: int,
        mask: int,
        attempt: int,
        records: bytes,
    ) -> None:
        """Messages leave the queue for the member of the call."""
        visible_ms = self._groups.now_ms() + call.ask.invisible_ms
        lease = self._groups.give(call.ask.group, key, source, first, mask, visible_ms, attempt)
        call.take(key, queue, lease, records)

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
                self._take(call, key, queue, 0, first, mask, 1, answer.records)
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
            answer = await self._reader.pull(query, _no_room)
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
        turns = Turns("reading the keys of received messages")
        while missing:
            turns.next(len(missing))
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
            first, mask = trimmed(split.first, split.waiting)
            self._groups.give(call.ask.group, key, 0, first, mask, 0, 0)
        if split is not None and split.taken:
            first, mask = trimmed(split.first, split.taken)
            spans = [start_of[offset] for offset in offsets_of(mask, first)]
            records = b"".join(answer.records[at:end] for at, end in spans)
            self._take(call, key, queue, 0, first, mask, 1, records)
        self._groups.pops.skip(call.ask.group, key, looked_at)
        call.answer.has_more |= call.is_full and looked_at < answer.max_offset

    # --- answers that are asked for again ---

    def _keep(self, ask: ReceiveAsk, given: list[tuple[QueueKey, int]]) -> None:
        self._repeats[ask.group, ask.attempt_id] = given
        if len(self._repeats) > REPEATS_MAX:
            self._repeats.popitem(last=False)

    async def _takes_again(self, call: _Call) -> bool:
        """Whether the call came before, and what it got is still its own: it gets it again, for as
        long as it asks now. What it does not want any more goes back.
        """
        group = call.ask.group
        known = self._repeats.get((group, call.ask.attempt_id), ()) if call.ask.attempt_id else ()
        for key, number in known:
            queue = self._groups.pops.find(group, key)
            lease = queue.find(number) if queue is not None else None
            if queue is None or lease is None or lease.visible_ms <= call.now_ms:
                continue
            if not call.is_full:
                offsets = list(offsets_of(lowest(lease.mask, call.left), lease.first))
                await self._take_again(call, key, queue, lease, offsets)
            self._give_back(group, key, queue, lease)
        return bool(call.taken)

    async def _take_again(
        self,
        call: _Call,
        key: QueueKey,
        queue: QueueLeases,
        lease: Lease,
        offsets: Sequence[int],
    ) -> None:
        found = await read_offsets(self._storage, key, offsets, call.left_bytes)
        if self._is_held(call.ask.group, key, queue, lease):
            good = [
                (offset, one)
                for offset, one in found
                if isinstance(one, bytes) and lease.part(offset, 1)
            ]
            if good:
                first, mask = mask_of_offsets([offset for offset, _ in good])
                records = b"".join(one for _, one in good)
                self._take(call, key, queue, lease.number, first, mask, lease.attempt, records)


async def _no_room(_size_bytes: int) -> None:
    """For reads of which the answer waits for room later."""


def _key(found: bytes) -> bytes:
    """The sharding key of a record."""
    return properties.sharding_key_of(record.raw_properties(found, 0)[1])
