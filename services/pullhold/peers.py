"""Calls to name servers and brokers. Errors are the catalogue's."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from cometmq.errors import CometError, PeerUnavailable, PeerUnproven, Unauthenticated
from cometmq.messaging.inline_messages import InlineMessages
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import from_proto, wire_errors
from cometmq.rpc.registrar import Registrar
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.streams import read, write
from cometmq.rpc.tasks import stop_all
from cometmq.telemetry import fields
from cometmq.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    member_pb2,
    member_pb2_grpc,
    namesrv_pb2,
    namesrv_pb2_grpc,
)
from services.pullhold.directory import Member
from services.pullhold.model import ClusterQueue

CALL_DEADLINE_S = 3.0
LANES_MAX = 4  # streams for pulls at one broker: one may wait for the disk

Stub: TypeAlias = "namesrv_pb2_grpc.NameServiceAsyncStub"

_log = logging.getLogger(__name__)


def new_registrar(
    namesrv: Iterable[str],
    cluster: str,
    address: str,
    period_s: float,
    secret: SharedSecret | None,
) -> Registrar:
    """Registers the pull-hold at ``address``."""

    async def register(stub: Stub) -> None:
        request = namesrv_pb2.RegisterPullholdRequest(cluster=cluster, address=address)
        await stub.RegisterPullhold(request, timeout=2 * CALL_DEADLINE_S)

    async def unregister(stub: Stub) -> None:
        request = namesrv_pb2.UnregisterPullholdRequest(cluster=cluster, address=address)
        await stub.UnregisterPullhold(request, timeout=CALL_DEADLINE_S)

    async def until_unregistered(stub: Stub) -> None:
        request = namesrv_pb2.WatchRegistrationRequest(cluster=cluster, address=address)
        async for now in stub.WatchRegistration(request):
            if not now.pullhold:
                return

    return Registrar(namesrv, register, unregister, until_unregistered, period_s, secret=secret)


class ArrivalUpdate(NamedTuple):
    """A queue as the broker reports it; with ``error`` its watch is over. ``inline_messages``: all
    messages since the last report; None = pull them. ``returns``: group, number and count of what
    came back to groups that receive.
    """

    key: ClusterQueue
    generation: int
    maximum: int
    codes: frozenset[int]
    inline_messages: InlineMessages | None
    error: CometError | None
    returns: Sequence[tuple[str, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A request on a watch: queues to watch and to stop watching, queues whose next arrivals should
    carry their messages, and what groups got out of arrivals.
    """

    add: Sequence[ClusterQueue] = ()
    remove: Sequence[ClusterQueue] = ()
    inline_wanted: Sequence[ClusterQueue] = ()
    delivered: Sequence[member_pb2.InlineDelivery] = ()


class BrokerPeer:
    """A member of a broker group: its client port and its internal port."""

    def __init__(
        self, broker_group: str, member: Member, secret: SharedSecret | None = None
    ) -> None:
        self._broker_group = broker_group
        self._channels = [
            open_channel(member.address),
            open_channel(member.internal_address, secret),
        ]
        self._broker = broker_pb2_grpc.BrokerServiceStub(self._channels[0])
        self._member = member_pb2_grpc.MemberServiceStub(self._channels[1])
        self._lanes: list[PullLane] = []

    async def pull(
        self, request: broker_pb2.PullRequest, client_address: str
    ) -> broker_pb2.PullResponse:
        """Pulls for a client on the lane that has the fewest pulls waiting."""
        self._lanes = [lane for lane in self._lanes if not lane.broken]
        lane = min(self._lanes, key=len, default=None)
        if lane is None or (len(lane) and len(self._lanes) < LANES_MAX):
            lane = PullLane(self._member.PullStream())
            self._lanes.append(lane)
        return await lane.pull(
            member_pb2.PullStreamRequest(pull=request, client_address=client_address)
        )

    async def maxima(self, keys: Iterable[ClusterQueue]) -> list[tuple[ClusterQueue, int, int]]:
        """(queue, generation, maximum) of each queue that the broker has."""
        keys = list(keys)
        request = broker_pb2.QueryQueuesRequest(queues=map(_queue_proto, keys))
        with wire_errors():
            response = await self._broker.QueryQueues(request, timeout=CALL_DEADLINE_S)
        return [
            (key, bounds.generation, bounds.max_offset)
            for key, bounds in zip(keys, response.queues, strict=True)
            if bounds.generation  # else the broker returned an error
        ]

    def watch(self) -> ArrivalStream:
        return ArrivalStream(self._broker_group, self._member.WatchArrivals())

    async def __aenter__(self) -> BrokerPeer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            await lane.close()
        for channel in self._channels:
            await channel.close()


class PullLane:
    """Pulls on one stream, answered in order."""

    def __init__(self, call: Any) -> None:
        self.broken = False
        self._call = call
        self._waiting: deque[asyncio.Future[broker_pb2.PullResponse]] = deque()
        self._writing = asyncio.Lock()  # a call takes one message at a time
        self._reading = asyncio.create_task(self._read())

    def __len__(self) -> int:
        """Pulls without an answer so far."""
        return len(self._waiting)

    async def pull(self, request: member_pb2.PullStreamRequest) -> broker_pb2.PullResponse:
        """Raises the pull's error, PeerUnavailable when the stream breaks or no answer comes."""
        answer: asyncio.Future[broker_pb2.PullResponse] = asyncio.Future()
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                async with self._writing:
                    self._waiting.append(answer)
                    with _internal_errors():
                        await write(self._call, request)
                return await answer
        except TimeoutError:
            self._break(PeerUnavailable("the broker does not answer pulls"))
            raise PeerUnavailable("no answer to the pull in time") from None

    async def _read(self) -> None:
        try:
            while True:
                with _internal_errors():
                    response = await read(self._call)
                if response is None:
                    raise PeerUnavailable("the broker ended the stream")
                if not self._waiting:
                    raise PeerUnavailable("the broker sent an answer without a pull")
                answer = self._waiting.popleft()
                if answer.done():  # its caller has gone
                    continue
                if response.HasField("error"):
                    answer.set_exception(from_proto(response.error))
                else:
                    answer.set_result(response.response)
        except CometError as error:
            self._break(error)

    def _break(self, error: CometError) -> None:
        self.broken = True
        self._call.cancel()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # no warning when the caller has gone

    async def close(self) -> None:
        self._break(PeerUnavailable("the link is closed"))
        await stop_all([self._reading])


class _internal_errors:
    """Errors of an internal port. A wrong secret becomes PeerUnavailable: consumers see the error,
    and they have no secret to mend.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, PeerUnproven):  # logged already
            raise PeerUnavailable("the broker did not prove itself to this pullhold") from None
        if isinstance(error, Unauthenticated):
            _log.warning("a broker refuses calls of this pull-hold", extra=fields(error=error))
            raise PeerUnavailable("the broker refuses this pullhold: see its log") from None


class ArrivalStream:
    """An open watch of a broker's queues."""

    def __init__(self, broker_group: str, call: Any) -> None:
        self._broker_group = broker_group
        self._call = call

    async def change(self, change: Change) -> None:
        request = member_pb2.WatchArrivalsRequest(
            add=map(_queue_proto, change.add),
            remove=map(_queue_proto, change.remove),
            inline_wanted=map(_queue_proto, change.inline_wanted),
            inline_deliveries=change.delivered,
        )
        with _internal_errors():
            await write(self._call, request)

    async def read(self) -> list[ArrivalUpdate]:
        """The next reports. Raises the error that ends the stream."""
        with _internal_errors():
            response = await read(self._call)
        if response is None:
            raise PeerUnavailable("the broker ended the stream")
        return [
            ArrivalUpdate(
                ClusterQueue(self._broker_group, arrival.queue.topic, arrival.queue.queue_id),
                arrival.generation,
                arrival.max_offset,
                frozenset(arrival.tag_codes),
                _inline_messages(arrival) if arrival.HasField("messages") else None,
                from_proto(arrival.error) if arrival.HasField("error") else None,
                [(one.group, one.number, one.count) for one in arrival.returns],
            )
            for arrival in response.arrivals
        ]

    def cancel(self) -> None:
        self._call.cancel()


def _inline_messages(arrival: member_pb2.Arrival) -> InlineMessages | None:
    """None: the parts do not fit together, so the messages have to be pulled."""
    proto = arrival.messages
    found = InlineMessages(
        proto.first_offset,
        proto.min_offset,
        proto.records,
        list(proto.sizes),
        list(proto.tag_codes),
    )
    return found if found.whole and found.end_offset == arrival.max_offset else None


def _queue_proto(key: ClusterQueue) -> common_pb2.QueueRef:
    return common_pb2.QueueRef(topic=key.topic, queue_id=key.queue_id)
