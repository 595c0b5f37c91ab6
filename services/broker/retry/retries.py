"""Takes messages back from consumer groups: to come again later, or among the dead letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.errors import CometError, NoPermission
from cometmq.format import delayed
from cometmq.format.belonging import Place
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.ids import offset_id
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import find_spans, read_each, slices
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import retry
from cometmq.messaging.groups import GroupSettings, MemberTable
from cometmq.messaging.retry import NO_WAIT, Attempt, Wait
from cometmq.model import DLQ_PREFIX, PROPERTIES_BYTES_MAX, RETRY_PREFIX, Position
from cometmq.store.log.commitlog import Span
from cometmq.turns import Turns

ITEMS_MAX = 1_024
SLICE_MAX = 256  # appended at once, so that a producer hardly waits for it
SLICE_BYTES_MAX = 1024 * 1024  # unless one message is larger; the memory of a call, too


@dataclass(frozen=True, slots=True)
class SendBackItem:
    """One message that a group could not consume. ``retry_times_max`` None: the group's; members
    that say one come first. ``tries``: failures that its record does not tell. ``delay_ms``: how
    long it waits, instead of ``delay_level``.
    """

    topic: str
    queue_id: int
    position: Position
    delay_level: int
    retry_times_max: int | None = None
    tries: int = 0
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class SentBack:
    """The outcome for a message that was sent back. ``delay_ms`` 0: it is a dead letter;
    ``delay_level`` 0: it waits for no level. ``size_bytes``: of the record that was stored; 0: it
    was stored when it came before.
    """

    delay_level: int
    delay_ms: int
    size_bytes: int = 0


_Made = tuple[Relayed, Wait]  # a record, and how long it waits; not at all: a dead letter


class RetryService:
    """Belongs to the event loop."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        metrics: MemberMetrics,
        members: MemberTable,
        clock: Clock,
    ) -> None:
        self._members = members
        self._clock = clock
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._metrics = metrics
        self._slice_bytes_max = batch_bytes_max(storage.store.log_file_bytes, SLICE_BYTES_MAX)
        # What earlier writers stored lies below; it may not be as safe as it is to be.
        self._opened_end = storage.store.appended_offset

    async def send_back(
        self,
        group: str,
        items: Sequence[SendBackItem],
        taken: Callable[[Sequence[SentBack | CometError]], None] = lambda _answers: None,
    ) -> list[SentBack | CometError]:
        """Take messages back, each decided on its own; returns when all that was taken is as safe
        as its topic asks. ``taken`` gets the answers, in parts, when the log has what they tell: a
        caller may go away before it is safe. Raises GroupNameInvalid, GroupNotFound, FlowControl,
        and what appending raises.
        """
        settings = self._keeper.group(group)
        told = self._members.retry_times_max(group)
        answers: list[SentBack | CometError] = []
        end = 0  # of the log, behind all that was taken
        places = [self._place(group, item) for item in items]
        spans = await find_spans(self._storage, places)
        sizes = [None if isinstance(span, CometError) else span for span in spans]
        for part in slices(sizes, SLICE_MAX, self._slice_bytes_max):
            found = await self._originals(spans[part], places[part])
            made = [
                self._made(settings, item, original, told)
                for item, original in zip(items[part], found, strict=True)
            ]
            await self._make_topics(settings, made)
            some, end_of_slice = self._take(settings, made)
            taken(some)
            answers += some
            end = max(end, end_of_slice)
        if end:
            demands = topic_demands(self._keeper.state.topics, SCHEDULE_TOPIC)
            await self._storage.stored(end, demands)
        assert len(answers) == len(items)
        return answers

    def times_max(self, settings: GroupSettings) -> int:
        """Tries of a message that was sent back, before it is a dead letter."""
        told = self._members.retry_times_max(settings.name)
        return settings.retry_times_max if told is None else told

    def _take(
        self, settings: GroupSettings, planned: Sequence[_Made | CometError]
    ) -> tuple[list[SentBack | CometError], int]:
        """Append what is new, at once, so that nobody takes it twice."""
        answers: list[SentBack | CometError] = []
        fresh: dict[Attempt, _Made] = {}
        attempts = self._keeper.state.attempts
        end = 0
        for one in planned:
            if isinstance(one, CometError):
                answers.append(one)
                continue
            made, wait = one
            attempt = Attempt(settings.name, made.source.log_offset, made.reconsume_times)
            known = attempts.end_of(attempt)
            if known is None:
                fresh[attempt] = made, wait
            else:
                end = max(end, known or self._opened_end)
            answers.append(SentBack(*wait, 0 if known is not None else made.size_bytes))
        if fresh:
            now_s = self._clock.monotonic_s()
            attempts.check_room(len(fresh), now_s)
            end = self._relays.append([made for made, _ in fresh.values()]).appended.end_offset
            for attempt, (made, wait) in fresh.items():
                attempts.add(attempt, end, now_s)
                count = self._metrics.sent_back if wait.delay_ms else self._metrics.sent_to_dlq
                count(made.source.topic, settings.name)
        return answers, end

    async def _make_topics(
        self, settings: GroupSettings, planned: Sequence[_Made | CometError]
    ) -> None:
        """Those that are needed: a group without dead letters has no topic for them. They are there
        at the end, though the dead letters may be purged meanwhile. Raises GroupNotFound: the group
        is deleted meanwhile.
        """
        waits = {one[1] for one in planned if not isinstance(one, CometError)}
        delayed_ones = {bool(wait.level) for wait in waits if wait.delay_ms}
        name = settings.name
        retry_topic, dlq_topic = retry.retry_topic(name), retry.dlq_topic(name)
        wanted = [SCHEDULE_TOPIC if by_level else TIMER_TOPIC for by_level in delayed_ones]
        wanted += [retry_topic] if delayed_ones else []
        wanted += [dlq_topic] if NO_WAIT in waits else []
        create = self._keeper.create_system_topic
        turns = Turns("creation of topics for another try")
        while not all(map(self._keeper.has_topic, wanted)):
            turns.next()
            self._keeper.group(name)
            if True in delayed_ones:
                await create(SCHEDULE_TOPIC, delayed.level_count())
            if False in delayed_ones:
                await create(TIMER_TOPIC, 1)
            if delayed_ones:
                await create(retry_topic, retry.queue_count_of(settings))
            if NO_WAIT in waits:
                await create(dlq_topic, 1, reserve_time_ms=settings.policy.dlq_reserve_ms)
        self._keeper.group(name)

    async def _originals(
        self, spans: Sequence[Span | CometError], places: Sequence[Place | CometError]
    ) -> list[Record | CometError]:
        """The records at these places."""
        good = [
            (span, place)
            for span, place in zip(spans, places, strict=True)
            if not isinstance(span, CometError) and not isinstance(place, CometError)
        ]
        its_spans, its_places = [span for span, _ in good], [place for _, place in good]
        found = iter(await read_each(self._storage.store, its_spans, its_places))
        return [span if isinstance(span, CometError) else next(found) for span in spans]

    def _place(self, group: str, item: SendBackItem) -> Place | CometError:
        """The queue and offset of the message that an item names, or why it is refused."""
        topic, queue_id = item.topic, item.queue_id
        groups = self._keeper.state.groups
        is_own = retry.is_groups_retry_topic(topic, group, groups)
        is_foreign = topic.startswith(RETRY_PREFIX) and not is_own
        if is_foreign or topic.startswith(DLQ_PREFIX):
            return NoPermission(f"group {group} cannot send back messages of {topic}")
        state = self._keeper.state
        try:
            state.topics.for_read(topic, queue_id)
            offset = state.generations.of(topic, queue_id).validate(item.position).offset
        except CometError as error:
            return error
        return (topic, queue_id), offset

    def _made(
        self,
        settings: GroupSettings,
        item: SendBackItem,
        original: Record | CometError,
        told: int | None,
    ) -> _Made | CometError:
        """``told``: the number of tries that a member has told for all."""
        if isinstance(original, CometError):
            return original
        try:
            return self._relayed(settings, item, original, told)
        except CometError as error:
            return error

    def _relayed(
        self, settings: GroupSettings, item: SendBackItem, original: Record, told: int | None
    ) -> _Made:
        times = original.reconsume_times + item.tries
        asked = (told, item.retry_times_max, settings.retry_times_max)
        times_max = next(number for number in asked if number is not None)
        policy = settings.policy.retry
        wait = retry.wait_after(times, item.delay_level, times_max, policy, item.delay_ms)
        origin = offset_id(original.store_host, original.log_offset)
        host = self._relays.host
        if wait is not None:
            made = self._delayed(settings, original, times + 1, wait, origin)
            if made is not None:
                return made, wait
        # Also one that has no room for what a retry adds: else it comes to its listener for ever.
        topic = retry.dlq_topic(settings.name)
        properties = retry.dead_properties(original, origin)
        made = relay(original, topic, 0, host, properties=properties, reconsume_times=times + 1)
        return made, NO_WAIT

    def _delayed(
        self, settings: GroupSettings, original: Record, times: int, wait: Wait, origin: str
    ) -> Relayed | None:
        """The record that waits for its next try; None: its properties have no room."""
        target = retry.retry_topic(settings.name), retry.queue_id_of(settings, original)
        level, due_ms = wait.level, 0
        if level:
            queue, delay_ms = (SCHEDULE_TOPIC, delayed.queue_id_of(level)), wait.delay_ms
            properties = retry.retry_properties(original, level, *target, origin)
        else:
            queue, delay_ms = TIMER_QUEUE, 0
            due_ms = self._clock.wall_ms() + wait.delay_ms
            properties = retry.timed_properties(original, due_ms, *target, origin)
        if len(properties) > PROPERTIES_BYTES_MAX:
            return None
        return relay(
            original,
            *queue,
            self._relays.host,
            properties=properties,
            reconsume_times=times,
            delay_ms=delay_ms,
            due_ms=due_ms,
        )
