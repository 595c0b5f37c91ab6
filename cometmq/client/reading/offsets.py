"""Calls to brokers about a group's queues: committed positions, bounds. Many queues in one call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.pulled import Pulled
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import readable_queues
from cometmq.client.namespaces import Namespace
from cometmq.client.reading.sources import Sources
from cometmq.client.received import ReceivedMessage
from cometmq.errors import CometError, NotWriter, OffsetReset, PeerUnavailable, Retry
from cometmq.model import Position, QueueRef
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.streams import ask
from cometmq.v1 import broker_pb2, common_pb2

if TYPE_CHECKING:
    from cometmq.v1 import broker_pb2_grpc

QUEUES_PER_CALL_MAX = 4096
ITEMS_PER_CALL_MAX = 1_024  # messages sent back


Request = TypeVar("Request")
Response = TypeVar("Response")
Answer = TypeVar("Answer")
MessageFilter = Callable[[list[ReceivedMessage]], list[ReceivedMessage]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a queue that can be read now; ``max_offset`` is exclusive."""

    generation: int
    min_offset: int
    max_offset: int


def position_to_proto(position: Position) -> common_pb2.Position:
    return common_pb2.Position(generation=position.generation, offset=position.offset)


def position_from_proto(position: common_pb2.Position) -> Position:
    return Position(position.generation, position.offset)


class BrokerCalls:
    """A client's unary calls to its queues' broker groups: pulls to a member that has the messages,
    all else to the writers.
    """

    def __init__(
        self,
        group: str,
        connections: Connections,
        routes: RouteWatcher,
        timeout_s: float,
        keep: MessageFilter | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        """``keep``: which of the messages that are pulled the application wants; None = all."""
        self.group = group
        self.namespace = namespace or Namespace()
        self.wire_group = self.namespace.wire(group)
        self.keep = keep
        self.timeout_s = timeout_s
        self.client_id = ""  # whose quota pulls count against
        self._connections = connections
        self._routes = routes
        self._sources = Sources(routes)
        # The newest reset of each queue that the client has gone on after.
        self._resets: dict[QueueRef, int] = {}
        self._at_end: dict[str, bool] = {}  # by broker group

    def to_proto(self, queue: QueueRef) -> common_pb2.QueueRef:
        """The queue as brokers know it."""
        return common_pb2.QueueRef(topic=self.namespace.wire(queue.topic), queue_id=queue.queue_id)

    async def _ask(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        try:
            return await ask(method, request, self.timeout_s)
        except CometError as error:
            raise self.namespace.strip(error) from None

    def _shown(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        return map(self.namespace.strip, answers)

    async def pull(
        self, broker_group: str, request: broker_pb2.PullRequest, suggested: int | None = None
    ) -> Pulled:
        """One pull, of the member that was suggested where it is there; None = the writer."""
        member = self._sources.choose(broker_group, suggested)
        try:
            pulled = await self._ask(self._connections.pull(member.address), request)
        except CometError as error:
            self._sources.failed(member, error)
            raise
        self._sources.answered(member)
        return pulled

    def queues_of(self, topic: str) -> list[QueueRef]:
        """The readable queues of a topic, as its route is known."""
        route = self._routes.get(topic)
        return readable_queues(route) if route is not None else []

    def was_absent(self, topic: str) -> bool:
        """Whether no broker had the topic at any time since this client asks for its route."""
        return self._routes.was_absent(topic)

    async def wait(self, seconds: float) -> None:
        """Waits that long before a call is made again, or until some route changes."""
        await self._routes.wait_change(seconds)

    def doubt(self, broker_group: str, error: CometError) -> None:
        """Its writer did not do what only a writer does, for this reason."""
        if error.retry is not Retry.NEVER:
            self._routes.doubt(broker_group)

    async def until_deposed(self, broker_group: str) -> None:
        """Waits until another member than the present writer writes; raises NotWriter."""
        member = self._routes.writing(broker_group)
        if member is not None:
            await self._routes.until_deposed(member)

    def broker(self, broker_group: str) -> broker_pb2_grpc.BrokerServiceAsyncStub:
        """The stub of the group's writer. PeerUnavailable when none is known."""
        return self._connections.broker(self._routes.require_writer(broker_group).address)

    async def committed(
        self, queues: Collection[QueueRef]
    ) -> dict[QueueRef, Position | CometError | None]:
        """The group's committed position of each queue; None = it never committed there."""
        return await self._query(queues, {})

    def begins_at_end(self, broker_group: str) -> bool:
        """Whether the group may not begin at first messages there, as the last answer had it."""
        return self._at_end.get(broker_group, False)

    async def _query(
        self, queues: Collection[QueueRef], numbers: dict[QueueRef, int]
    ) -> dict[QueueRef, Position | CometError | None]:
        """Also puts the number of each queue's newest reset into ``numbers``."""
        found: dict[QueueRef, Position | CometError | None] = {}
        for broker_group, part in _by_broker(queues):
            request = broker_pb2.QueryOffsetsRequest(
                group=self.wire_group, queues=map(self.to_proto, part)
            )
            stub = self.broker(broker_group)
            response = await self._ask(stub.QueryOffsets, request)
            found.update(zip(part, self._shown(map(_result, response.results)), strict=True))
            self._at_end[broker_group] = response.begin_at_end
            pairs = zip(part, response.results, strict=True)
            numbers.update({queue: item.reset_number for queue, item in pairs if item.reset_number})
        return found

    async def commit(
        self,
        positions: Mapping[QueueRef, Position],
        lock_number_of: Callable[[QueueRef], int] = lambda _: 0,
        *,
        begins: bool = False,
    ) -> dict[QueueRef, Position | CometError | None]:
        """Commits; the answer is what each queue's committed position is now, or why it was
        refused. The queues of a broker that does not answer get its error. ``lock_number_of``: of
        a queue that is consumed in order; 0 = it is not. ``begins``: a position that is there
        stays.
        """
        found: dict[QueueRef, Position | CometError | None] = {}
        for broker_group, part in _by_broker(positions):
            try:
                results = await self._commit_at(
                    broker_group, part, positions, lock_number_of, begins=begins
                )
                found.update(zip(part, results, strict=True))
            except CometError as error:
                self.doubt(broker_group, error)
                found.update(dict.fromkeys(part, error))
        return found

    async def _commit_at(
        self,
        broker_group: str,
        queues: list[QueueRef],
        positions: Mapping[QueueRef, Position],
        lock_number_of: Callable[[QueueRef], int],
        *,
        begins: bool,
    ) -> list[Position | CometError | None]:
        request = broker_pb2.CommitOffsetsRequest(group=self.wire_group)
        for queue in queues:
            request.commits.add(
                queue=self.to_proto(queue),
                position=position_to_proto(positions[queue]),
                lock_number=lock_number_of(queue),
                reset_number=self._resets.get(queue, 0),
                begins=begins,
            )
        response = await self._ask(self.broker(broker_group).CommitOffsets, request)
        answers = list(self._shown(map(_result, response.results)))
        for queue, item, answer in zip(queues, response.results, answers, strict=True):
            if isinstance(answer, OffsetReset):
                self._resets[queue] = item.reset_number
        return answers

    async def begun_at(self, queues: Collection[QueueRef]) -> set[str]:
        """The broker groups where the group has committed in any of these queues, of those that
        answer.
        """

        async def has_begun(broker_group: str, part: list[QueueRef]) -> str | None:
            with suppress(CometError):
                known = await self._query(part, {})
                if any(isinstance(one, Position) for one in known.values()):
                    return broker_group
            return None

        asked = (has_begun(broker_group, part) for broker_group, part in _by_broker(queues))
        return {found for found in await asyncio.gather(*asked) if found is not None}

    async def went_on(
        self, queues: Collection[QueueRef]
    ) -> dict[QueueRef, Position | CometError | None]:
        """As :meth:`committed`, for a client that goes on there: what it commits from now on counts
        after all resets so far.
        """
        return await self._query(queues, self._resets)

    async def reset_positions(self, queues: Collection[QueueRef]) -> dict[QueueRef, Position]:
        """Of these queues those that were reset since this client went on there, and where to go on
        now.
        """
        numbers = dict(self._resets)
        answers = await self._query(queues, numbers)
        reset = {
            queue: answer
            for queue, answer in answers.items()
            if isinstance(answer, Position) and numbers.get(queue, 0) > self._resets.get(queue, 0)
        }
        self._resets |= {queue: numbers[queue] for queue in reset}
        return reset

    async def lock(
        self, client_id: str, queues: Collection[QueueRef]
    ) -> tuple[dict[QueueRef, int | CometError], float]:
        """The lock number of each queue, or why the client does not get it; and how long the locks
        last, in seconds from now. The queues of a broker that does not answer get its error.
        """
        found: dict[QueueRef, int | CometError] = {}
        lease_s = math.inf
        for broker_group, part in _by_broker(queues):
            request = broker_pb2.LockQueuesRequest(
                group=self.wire_group, client_id=client_id, queues=map(self.to_proto, part)
            )
            try:
                response = await self._ask(self.broker(broker_group).LockQueues, request)
            except CometError as error:
                self.doubt(broker_group, error)
                found.update(dict.fromkeys(part, error))
                continue
            found.update(zip(part, self._shown(map(_lock_number, response.results)), strict=True))
            lease_s = min(lease_s, response.lease_ms / 1000)
        return found, lease_s

    async def unlock(self, client_id: str, queues: Collection[QueueRef]) -> None:
        """Releases locks of the client. What no broker takes ends by itself."""
        for broker_group, part in _by_broker(queues):
            request = broker_pb2.UnlockQueuesRequest(
                group=self.wire_group, client_id=client_id, queues=map(self.to_proto, part)
            )
            try:
                await self._ask(self.broker(broker_group).UnlockQueues, request)
            except CometError as error:
                self.doubt(broker_group, error)

    async def bounds(
        self, queues: Collection[QueueRef], *, end_wanted: bool = False
    ) -> dict[QueueRef, Bounds | CometError]:
        """Generation and readable offsets of each queue. ``end_wanted``: the maxima are for readers
        that begin there; OffsetNotAvailable where messages behind it were acknowledged before.
        """
        found: dict[QueueRef, Bounds | CometError] = {}
        for broker_group, part in _by_broker(queues):
            request = broker_pb2.QueryQueuesRequest(
                queues=map(self.to_proto, part), end_wanted=end_wanted
            )
            stub = self.broker(broker_group)
            response = await self._ask(stub.QueryQueues, request)
            answers = list(self._shown(map(_bounds, response.queues)))
            for answer in answers:
                if isinstance(answer, NotWriter):
                    self.doubt(broker_group, answer)
            found.update(zip(part, answers, strict=True))
        return found

    async def positions_at(
        self, queues: Collection[QueueRef], time_ms: int
    ) -> dict[QueueRef, Position | CometError]:
        """The first message of each queue that was stored at the time or later; behind the last
        one when there is none.
        """
        found: dict[QueueRef, Position | CometError] = {}
        for broker_group, part in _by_broker(queues):
            request = broker_pb2.QueryOffsetsByTimeRequest(
                queues=map(self.to_proto, part), time_ms=time_ms
            )
            stub = self.broker(broker_group)
            response = await self._ask(stub.QueryOffsetsByTime, request)
            found.update(zip(part, self._shown(map(_position_at, response.queues)), strict=True))
        return found

    async def send_back(
        self, broker_group: str, items: Sequence[broker_pb2.SendBackItem]
    ) -> list[CometError | None]:
        """Sends messages back that the group could not do; for each, None = it was taken back, or
        its error. All get the error of a call that failed.
        """
        for item in items:
            item.queue.topic = self.namespace.wire(item.queue.topic)
        request = broker_pb2.SendBackRequest(group=self.wire_group, items=items)
        try:
            response = await self._ask(self.broker(broker_group).SendBack, request)
            check_fits(len(response.results), len(items))
        except CometError as error:
            self.doubt(broker_group, error)
            return [error] * len(items)
        return [
            self.namespace.strip(from_proto(r.error)) if r.HasField("error") else None
            for r in response.results
        ]


def check_fits(answer_count: int, item_count: int) -> None:
    """Raises PeerUnavailable for an answer that is not of all items: they may be decided about."""
    if answer_count != item_count:
        raise PeerUnavailable("The broker's answer does not fit the request.")


def send_back_item(
    queue: QueueRef, position: Position, delay_level: int, delay_ms: int = 0
) -> broker_pb2.SendBackItem:
    return broker_pb2.SendBackItem(
        queue=common_pb2.QueueRef(topic=queue.topic, queue_id=queue.queue_id),
        position=position_to_proto(position),
        delay_level=delay_level,
        delay_ms=delay_ms,
    )


def _by_broker(queues: Collection[QueueRef]) -> Iterator[tuple[str, list[QueueRef]]]:
    """Calls to make: (broker group, at most QUEUES_PER_CALL_MAX of its queues)."""
    for broker_group in sorted({queue.broker_group for queue in queues}):
        mine = sorted(queue for queue in queues if queue.broker_group == broker_group)
        for start in range(0, len(mine), QUEUES_PER_CALL_MAX):
            yield broker_group, mine[start : start + QUEUES_PER_CALL_MAX]


def _result(item: broker_pb2.OffsetResult) -> Position | CometError | None:
    if item.HasField("error"):
        return from_proto(item.error)
    return position_from_proto(item.position) if item.HasField("position") else None


def _lock_number(item: broker_pb2.LockResult) -> int | CometError:
    return from_proto(item.error) if item.HasField("error") else item.lock_number


def _position_at(item: broker_pb2.OffsetByTime) -> Position | CometError:
    return from_proto(item.error) if item.HasField("error") else position_from_proto(item.position)


def _bounds(item: broker_pb2.QueueBounds) -> Bounds | CometError:
    if item.HasField("error"):
        return from_proto(item.error)
    return Bounds(item.generation, item.min_offset, item.max_offset)
