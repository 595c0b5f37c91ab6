"""The members of the consumer group: one membership stream to every broker group whose topics are
read.

The members that count for a topic are those of the first broker group of its route (by name)
that answers; so all clients that reach the same brokers divide the queues by the same list.

A new writer, or one that has restarted, knows only the members that have joined it so far. The
members of the last stream count for a while more. Else the first member to join would
take the queues of all others, and get again what these have not committed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from cometmq.client.namespaces import Namespace
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.remote.answers import Answers
from cometmq.errors import ClientIdInUse, CometError, PeerUnavailable, Retry
from cometmq.model import Filter, QueueRef
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.streams import Stream, read, write
from cometmq.rpc.tasks import Tasks, stop_all
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, common_pb2

JoinStream: TypeAlias = "Stream[broker_pb2.JoinGroupRequest, broker_pb2.JoinGroupResponse]"

END_SESSION_S_MAX = 1.0
REJOIN_S_MAX = 3.0  # a member joins a new writer by then, or has gone

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class KnownMember:
    """A member of the group as it has described itself to the brokers, this one included."""

    filters: dict[str, Filter]  # by topic
    instance_id: str
    allocation: str
    held: frozenset[QueueRef]
    is_broadcasting: bool
    is_away: bool  # without a stream, for the time of its session


class _Joined:
    """The membership at one broker group, and the task that keeps it."""

    def __init__(self) -> None:
        # by client id; None = no stream is up
        self.members: dict[str, KnownMember] | None = None
        # known before this stream, which has not sent them yet
        self.absent: dict[str, KnownMember] = {}
        self.is_disabled = False  # the group may not read there
        self.reset_number = 0  # the newest reset that was announced
        self._bytes: dict[str, bytes] = {}  # of each member, as it came
        self.session_ms = 0  # as the broker knows it
        self.is_leaving = False  # for good: the session is to end with the stream
        self.heard = asyncio.Event()  # the broker has sent something
        self.resend = asyncio.Event()  # the subscriptions have changed
        self.task: asyncio.Task[None] | None = None

    def take(
        self, told: Iterable[broker_pb2.GroupMember], namespace: Namespace
    ) -> dict[str, KnownMember]:
        """Takes a broker's list of members. Most are as they were: the list of a large group comes
        often.
        """
        before, before_bytes = self.members or {}, self._bytes
        members: dict[str, KnownMember] = {}
        self._bytes = {one.client_id: one.SerializeToString() for one in told}
        for one in told:
            if one.mode == broker_pb2.CONSUME_MODE_POP:  # it divides no queues
                continue
            name = one.client_id
            is_same = name in before and before_bytes.get(name) == self._bytes[name]
            members[name] = before[name] if is_same else _known_member(one, namespace)
        self.members = members
        return members


class Membership:
    """``on_change`` is called whenever what the brokers tell changes, ``on_reset`` with the name of
    a broker group where the consumer group was reset. ``receives``: it divides no queues (POP).
    """

    def __init__(
        self,
        client_id: str,
        instance_id: str,
        allocation: str,
        is_broadcasting: bool,
        session_ms: int,
        calls: BrokerCalls,
        policy: BackoffPolicy,
        on_change: Callable[[], None],
        on_reset: Callable[[str], None],
        *,
        receives: bool = False,
    ) -> None:
        self._on_reset = on_reset
        self._mode = broker_pb2.CONSUME_MODE_POP if receives else broker_pb2.CONSUME_MODE_PULL
        self._client_id = client_id
        self.instance_id = instance_id
        self._session_ms = session_ms
        self._allocation = allocation
        self._is_broadcasting = is_broadcasting
        self._held: frozenset[QueueRef] = frozenset()
        self._calls = calls
        self._policy = policy
        self._on_change = on_change
        self.retry_times_max = -1  # sent to the brokers; below 0: nothing is
        # How often the group's messages are tried again, as brokers say; None: none has said it.
        self.known_retry_times_max: int | None = None
        self.answers: Answers | None = None  # to what brokers ask; None: they ask nothing
        self._instance_number = 0  # as the first broker said
        self._is_replaced = False  # another client has taken this one's name
        self._subscriptions: dict[str, Filter] = {}
        self._joined: dict[str, _Joined] = {}
        # The members that were known last. A broker group without a writer leaves the route.
        self._known: dict[str, KnownMember] = {}

    async def update(
        self,
        subscriptions: Mapping[str, Filter],
        broker_groups: Iterable[str],
        tasks: Tasks,
    ) -> None:
        """Says what this client reads, and at which broker groups it is a member."""
        wanted = set(broker_groups)
        if self._joined:
            self._known = {}
            for joined in self._joined.values():
                self._known |= joined.absent | (joined.members or {})
        left = [self._joined.pop(group) for group in list(self._joined) if group not in wanted]
        await self._end_sessions(left)
        await stop_all([joined.task for joined in left if joined.task is not None])
        if subscriptions != self._subscriptions:
            self._subscriptions = dict(subscriptions)
            for joined in self._joined.values():
                joined.resend.set()
        for group in wanted - self._joined.keys():
            joined = self._joined[group] = _Joined()
            joined.absent = dict(self._known)
            joined.task = tasks.start(self._stay(group, joined), f"join at {group}")

    def hold(self, queues: frozenset[QueueRef]) -> None:
        """Tells the other members which queues this client reads, or is about to."""
        if queues != self._held:
            self._held = queues
            for joined in self._joined.values():
                joined.resend.set()

    def members(self, topic: str, broker_groups: Iterable[str]) -> dict[str, KnownMember] | None:
        """The members that read the topic, by client id; None = none of the broker groups answers
        now.
        """
        for group in sorted(broker_groups):
            joined = self._joined.get(group)
            if joined is not None and joined.members is not None:
                members = {**joined.absent, **joined.members}
                return {c: member for c, member in members.items() if topic in member.filters}
        return None

    def is_disabled(self, broker_group: str) -> bool:
        """Whether the group may not read at a broker group."""
        joined = self._joined.get(broker_group)
        return joined is not None and joined.is_disabled

    async def end_session(self) -> None:
        """From now on the membership ends with the streams. Brokers that do not answer in time keep
        the session.
        """
        self._session_ms = 0
        await self._end_sessions(self._joined.values())

    async def _end_sessions(self, some: Iterable[_Joined]) -> None:
        """Else a broker would keep queues for a member that reads nothing there any more."""
        some = list(some)
        for joined in some:
            joined.is_leaving = True
            joined.resend.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SESSION_S_MAX):
                await asyncio.gather(*map(self._until_heard, some))

    async def _until_heard(self, joined: _Joined) -> None:
        while joined.session_ms and joined.members is not None:
            joined.heard.clear()
            await joined.heard.wait()

    async def leave(self) -> None:
        """Ends all streams. The brokers tell the other members at once, or when the session of this
        one ends.
        """
        await stop_all([joined.task for joined in self._joined.values() if joined.task is not None])
        self._joined.clear()

    async def _stay(self, broker_group: str, joined: _Joined) -> None:
        backoff = Backoff(self._policy, random.Random())
        if self._is_replaced:  # a writer that is new does not know that
            joined.absent, joined.members = {}, {}
            self._on_change()
            return
        while True:
            try:
                await self._join(broker_group, joined, backoff)
            except ClientIdInUse as error:
                _log.error(
                    "no member any more", extra=fields(**self._at(broker_group), error=error)
                )
                self._is_replaced = True
                return
            except CometError as error:
                level = logging.WARNING if error.retry is Retry.NEVER else logging.INFO
                _log.log(
                    level, "membership ended", extra=fields(**self._at(broker_group), error=error)
                )
                self._calls.doubt(broker_group, error)
            finally:
                if self._is_replaced:
                    joined.absent, joined.members = {}, {}
                elif joined.members is not None:
                    joined.absent, joined.members = {**joined.absent, **joined.members}, None
                self._on_change()
            await self._calls.wait(backoff.next_s())

    def _at(self, broker_group: str) -> dict[str, str]:
        return {"group": self._calls.group, "broker_group": broker_group}

    async def _join(self, broker_group: str, joined: _Joined, backoff: Backoff) -> None:
        call = self._calls.broker(broker_group).JoinGroup()
        joined.resend.set()
        answered = asyncio.Event()
        parts = [
            self._tell(call, joined),
            self._hear(broker_group, call, joined, backoff, answered),
            self._forget_absent(joined, answered),
            self._calls.until_deposed(broker_group),
        ]
        tasks = [asyncio.create_task(part, name=f"join at {broker_group}") for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            await stop_all(tasks)
        for task in done:
            task.result()

    async def _hear(
        self,
        broker_group: str,
        call: JoinStream,
        joined: _Joined,
        backoff: Backoff,
        answered: asyncio.Event,
    ) -> None:
        while (response := await read(call)) is not None:
            backoff.reset()
            if response.HasField("question"):
                if self.answers is not None:
                    self.answers.asked(broker_group, response.question)
                continue
            if response.HasField("retry_times_max"):
                self.known_retry_times_max = response.retry_times_max
            members = joined.take(response.members, self._calls.namespace)
            mine = next((m for m in response.members if m.instance_id == self.instance_id), None)
            joined.session_ms = 0 if mine is None else mine.session_ms
            if mine is not None and not self._instance_number:
                self._instance_number = mine.instance_number
            joined.heard.set()
            joined.absent = {c: t for c, t in joined.absent.items() if c not in members}
            if response.consume_disabled != joined.is_disabled:
                joined.is_disabled = response.consume_disabled
                event = "the group may not read" if joined.is_disabled else "the group may read"
                _log.warning(event, extra=fields(**self._at(broker_group)))
            answered.set()
            self._on_change()
            if response.reset_number > joined.reset_number:
                joined.reset_number = response.reset_number
                self._on_reset(broker_group)
        raise PeerUnavailable("The broker ended the stream.")

    async def _forget_absent(self, joined: _Joined, answered: asyncio.Event) -> None:
        """Drops the members that have not joined again in time."""
        await answered.wait()
        await asyncio.sleep(REJOIN_S_MAX)
        if joined.absent:
            joined.absent = {}
            self._on_change()
        await asyncio.Event().wait()

    async def _tell(self, call: JoinStream, joined: _Joined) -> None:
        try:
            while True:
                await joined.resend.wait()
                joined.resend.clear()
                await write(call, self._request(joined))
        except CometError:  # the reader gets the error
            await asyncio.Event().wait()

    def _request(self, joined: _Joined) -> broker_pb2.JoinGroupRequest:
        return broker_pb2.JoinGroupRequest(
            group=self._calls.wire_group,
            client_id=self._client_id,
            instance_id=self.instance_id,
            instance_number=self._instance_number,
            allocation=self._allocation,
            held=_held_proto(self._held, self._calls.namespace),
            retry_times_max=None if self.retry_times_max < 0 else self.retry_times_max,
            is_broadcasting=self._is_broadcasting,
            session_ms=0 if joined.is_leaving else self._session_ms,
            mode=self._mode,
            known_questions=self.answers.known if self.answers is not None else (),
            subscriptions=[
                broker_pb2.Subscription(
                    topic=self._calls.namespace.wire(topic),
                    filter=common_pb2.Filter(tags=sorted(wanted.tags), sql=wanted.sql),
                )
                for topic, wanted in sorted(self._subscriptions.items())
            ],
        )


def _known_member(proto: broker_pb2.GroupMember, namespace: Namespace) -> KnownMember:
    return KnownMember(
        {
            namespace.shown(s.topic): Filter(frozenset(s.filter.tags), s.filter.sql)
            for s in proto.subscriptions
        },
        proto.instance_id,
        proto.allocation,
        frozenset(
            QueueRef(namespace.shown(held.topic), queue_id, held.broker_group)
            for held in proto.held
            for queue_id in held.queue_ids
        ),
        proto.is_broadcasting,
        proto.is_away,
    )


def _held_proto(queues: frozenset[QueueRef], namespace: Namespace) -> list[broker_pb2.HeldQueues]:
    ordered = sorted(queues, key=lambda q: (q.topic, q.broker_group, q.queue_id))
    return [
        broker_pb2.HeldQueues(
            topic=namespace.wire(topic),
            broker_group=broker_group,
            queue_ids=[q.queue_id for q in some],
        )
        for (topic, broker_group), some in groupby(ordered, key=lambda q: (q.topic, q.broker_group))
    ]
