"""Sends stored messages again: to their topic, or to one group; and marks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cometmq.errors import AlreadyResent, CometError, NoPermission
from cometmq.format.ids import offset_id
from cometmq.format.record import Record
from cometmq.format.relay import OwnRecord, Relayed, relay
from cometmq.member.read.records import find_spans, read_each, slices
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import resends, retry
from cometmq.messaging.changes import MessagesResent
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.resends import INTERVALS_IN_ALL_MAX, ResentKey
from cometmq.messaging.topics import is_system
from cometmq.model import Position
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger

_log = logger(__name__)

ITEMS_MAX = 256  # of a call
SLICE_BYTES_MAX = 1024 * 1024  # appended at once, unless one message is larger

Place = tuple[int, int]  # queue id, queue offset
# Where a message goes: topic, queue, properties.
Target = Callable[[Record], tuple[str, int, bytes]]


@dataclass(frozen=True, slots=True)
class ResendItem:
    """A message of a topic."""

    queue_id: int
    position: Position


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a call: resend what was resent before, too; the caller; a dry run."""

    again: bool
    by: str
    dry: bool = False


class Resender:
    """Belongs to the event loop. What is sent again comes as if it had never been tried, with its
    id, body, keys and properties.
    """

    def __init__(self, storage: MemberStorage, keeper: StateKeeper, relays: RelayWriter) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._slice_bytes_max = batch_bytes_max(storage.store.log_file_bytes, SLICE_BYTES_MAX)

    async def resend(
        self, topic: str, group: str, items: Sequence[ResendItem], asked: Asked
    ) -> list[CometError | None]:
        """Send messages of a user's topic again, in the order of their queues and offsets: to one
        group, or, without one, to the topic. None for each that was sent, or would be. Returns when
        all is safe. Raises TopicNameInvalid, TopicNotFound, NoPermission, GroupNameInvalid,
        GroupNotFound, LimitExceeded, and what appending raises.
        """
        if is_system(topic):
            raise NoPermission(f"{topic} is a system topic: its messages are not sent again")
        config = self._keeper.state.topics.get(topic)
        if group:
            settings = self._keeper.group(group)
            to, target = retry.retry_topic(group), self._to_group(settings)
            if not asked.dry:
                await self._keeper.create_system_topic(to, retry.queue_count_of(settings))
        else:
            if not config.writable:
                raise NoPermission(f"topic {topic} is not open for writing")
            to, target = topic, self._to_topic(topic)
        history = self._keeper.state.generations.of
        places: list[Place | CometError] = []
        for item in items:
            try:
                self._keeper.state.topics.for_read(topic, item.queue_id)
                position = history(topic, item.queue_id).validate(item.position)
                places.append((item.queue_id, position.offset))
            except CometError as error:
                places.append(error)
        good = [place for place in places if not isinstance(place, CometError)]
        answers = await self.send(topic, group, to, target, good, asked)
        return [place if isinstance(place, CometError) else answers[place] for place in places]

    async def send(
        self,
        topic: str,
        group: str,
        to: str,
        target: Target,
        places: Sequence[Place],
        asked: Asked,
    ) -> dict[Place, CometError | None]:
        """Send messages of any topic again to the topic ``to``, and mark them for ``group``."""
        answers: dict[Place, CometError | None] = {}
        found: list[tuple[Place, Span]] = []
        wanted = sorted(set(places))
        named = [((topic, queue_id), offset) for queue_id, offset in wanted]
        for place, span in zip(wanted, await find_spans(self._storage, named), strict=True):
            if refusal := self._refusal(topic, group, place, asked):
                answers[place] = refusal
            elif isinstance(span, CometError):
                answers[place] = span
            else:
                found.append((place, span))
        end, sent = 0, 0
        spans = [span for _, span in found]
        for part in slices(spans, ITEMS_MAX, self._slice_bytes_max):
            some = [place for place, _ in found[part]]
            its_places = [((topic, queue_id), offset) for queue_id, offset in some]
            records = await read_each(self._storage.store, spans[part], its_places)
            self._check_there(topic, group, to)  # still, after we read
            made: dict[Place, Relayed] = {}
            for place, one in zip(some, records, strict=True):
                try:
                    answers[place] = None
                    made[place] = self._made(topic, one, target, again=asked.again)
                    # Another call may have sent it while this one read.
                    if refusal := self._refusal(topic, group, place, asked):
                        raise refusal
                except CometError as error:
                    answers[place] = error
                    made.pop(place, None)
            if made and not asked.dry:
                end = self._append(topic, group, made)
                sent += len(made)
        if sent:
            _log.warning(
                "messages were sent again",
                extra=fields(topic=topic, group=group or None, count=sent, asked_by=asked.by),
            )
            demands = topic_demands(self._keeper.state.topics, to)
            await self._storage.stored(end, demands)
        return answers

    def _refusal(self, topic: str, group: str, place: Place, asked: Asked) -> CometError | None:
        """Why a message is not sent again: it was before."""
        queue_id, offset = place
        key = ResentKey(topic, queue_id, group)
        if asked.again or not self._keeper.state.resent.holds(key, offset):
            return None
        return AlreadyResent(f"message {offset} of queue {queue_id} of {topic}")

    def _check_there(self, topic: str, group: str, to: str) -> None:
        """Raises TopicNotFound, GroupNotFound."""
        for name in (topic, to):
            self._keeper.state.topics.get(name)
            self._keeper.check_open(name)
        if group:
            self._keeper.group(group)

    def _append(self, topic: str, group: str, made: dict[Place, Relayed]) -> int:
        """Append messages and their marks at once; the end of the log."""
        table, marks = self._keeper.state.resent, []
        if table.interval_count + len(made) > INTERVALS_IN_ALL_MAX:
            self._forget_gone()
        for queue_id in sorted({place[0] for place in made}):
            key = ResentKey(topic, queue_id, group)
            low = self._storage.bounds((topic, queue_id))[0]
            offsets = [place[1] for place in made if place[0] == queue_id]
            marks.append(MessagesResent(key, table.plan(key, offsets, low)))
        batch: list[OwnRecord] = [*made.values(), *self._keeper.records_of(marks)]
        end = self._relays.append(batch).appended.end_offset
        for mark in marks:
            self._keeper.state.apply(mark)
        return end

    def _forget_gone(self) -> None:
        """Marks of messages that retention has removed go."""
        table = self._keeper.state.resent
        for key, known in table:
            low = self._storage.bounds((key.topic, key.queue_id))[0]
            if (left := table.plan(key, (), low)) != known:
                self._keeper.write(MessagesResent(key, left))

    def _made(
        self, topic: str, found: Record | CometError, target: Target, *, again: bool
    ) -> Relayed:
        if isinstance(found, CometError):
            raise found
        if not again and not is_system(topic) and resends.is_copy(found):
            raise AlreadyResent(
                f"message {found.queue_offset} of queue {found.queue_id} of {topic} is a copy that "
                "was sent again"
            )
        to, queue_id, properties = target(found)
        queue_count = self._keeper.state.topics.get(to).write_queue_count
        if not queue_count:
            raise NoPermission(f"topic {to} has no queue that is open for writing")
        return relay(
            found,
            to,
            queue_id % queue_count,  # its group may ask for more queues than the topic has
            self._relays.host,
            properties=properties,
            reconsume_times=0,
        )

    def _to_group(self, settings: GroupSettings) -> Target:
        def target(found: Record) -> tuple[str, int, bytes]:
            origin = offset_id(found.store_host, found.log_offset)
            queue_id = retry.queue_id_of(settings, found)
            properties = retry.with_origin(found, origin)
            return retry.retry_topic(settings.name), queue_id, properties

        return target

    def _to_topic(self, topic: str) -> Target:
        def target(found: Record) -> tuple[str, int, bytes]:
            origin = offset_id(found.store_host, found.log_offset)
            return topic, found.queue_id, resends.copy_properties(found, origin)

        return target
