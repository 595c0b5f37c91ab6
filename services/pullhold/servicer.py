"""``cometmq.v1.HoldService`` on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import grpc

from cometmq.errors import CometError, GroupNameInvalid, InvalidRequest, OffsetInvalid
from cometmq.filters import tags
from cometmq.messaging import groups
from cometmq.messaging.pull import clamp
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, hold_pb2, hold_pb2_grpc
from services.pullhold.answers import Answer
from services.pullhold.hold_service import HoldService
from services.pullhold.model import ClusterQueue, HoldSpec, PullLimits, Session

HOLD_MS_DEFAULT = 15_000
HOLD_MS_MAX = 60_000
BROKER_GROUP_CHARACTERS_MAX = 127
_FORMS = frozenset(broker_pb2.MessageForm.values())

Context = Any  # grpc.aio.ServicerContext of the method's messages


class HoldServicer(hold_pb2_grpc.HoldServiceServicer):
    """See ``proto/cometmq/v1/hold.proto``. A connection is what limits call a client."""

    def __init__(self, service: HoldService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    async def HoldStream(  # type: ignore[override]  # answers with context.write
        self, request_iterator: object, context: Context
    ) -> None:
        with self._session(context) as session:
            await context.send_initial_metadata(())  # the client knows by it that we are there
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(session, context))
                while (answer := await session.inbox.take()) is not None:
                    self._service.taken(session, answer)  # from here on it counts as on its way
                    await context.write(_stream_response(answer))
                reading.cancel()
            self._gate.check()

    @contextmanager
    def _session(self, context: Context) -> Iterator[Session]:
        with closing(context.open_room()) as room:
            session = self._service.open(context.peer(), room)
            try:
                yield session
            finally:
                self._service.close(session)

    async def _read(self, session: Session, context: Context) -> None:
        """Who only half-closed gets the answers that are still to come."""
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.HasField("cancel"):
                self._service.cancel(session, request.hold_id)
            else:
                self._park(session, request)
            await session.inbox.room()
        self._service.finish(session)

    def _park(self, session: Session, request: hold_pb2.HoldStreamRequest) -> None:
        if request.hold_id in session.holds:  # an answer could not say which of the two it is for
            raise InvalidRequest(f"hold_id: {request.hold_id} is held already")
        try:
            self._gate.check()
            self._service.park(session, request.hold_id, _spec_of(request.hold))
        except CometError as error:
            self._service.refuse(session, request.hold_id, error)

    async def Hold(self, request: hold_pb2.HoldRequest, context: Context) -> hold_pb2.HoldResponse:
        spec = _spec_of(request)
        with self._session(context) as session:
            self._service.park(session, 0, spec)
            answer = await session.inbox.take()
        assert answer is not None, "every hold is answered before its inbox is closed"
        if answer.error is not None:
            raise answer.error
        return hold_pb2.HoldResponse(pull=answer.response)


def _spec_of(request: hold_pb2.HoldRequest) -> HoldSpec:
    """InvalidRequest, OffsetInvalid, FilterInvalid. What else a pull may have wrong, names that do
    not exist above all, the broker tells.
    """
    pull = request.pull
    if not 0 < len(request.broker_group) <= BROKER_GROUP_CHARACTERS_MAX:
        raise InvalidRequest(f"broker_group: 1 to {BROKER_GROUP_CHARACTERS_MAX} characters")
    if not pull.queue.topic:
        raise InvalidRequest("pull.queue: is missing")
    if pull.queue.queue_id < 0:
        raise InvalidRequest(f"pull.queue: {pull.queue.queue_id} is no queue's number")
    if pull.position.offset < 0:
        raise OffsetInvalid(f"queue offset {pull.position.offset} is negative")
    if pull.form not in _FORMS:
        raise InvalidRequest(f"pull.form: {pull.form} is not known here")
    if not 0 <= request.hold_ms <= HOLD_MS_MAX:
        raise InvalidRequest(f"hold_ms: {request.hold_ms} is not within 0 to {HOLD_MS_MAX}")
    return HoldSpec(
        key=ClusterQueue(request.broker_group, pull.queue.topic, pull.queue.queue_id),
        generation=pull.position.generation,
        offset=pull.position.offset,
        codes=tags.codes(tags.check(pull.filter.tags)),
        hold_s=(request.hold_ms or HOLD_MS_DEFAULT) / 1000,
        request=pull,
        limits=_limits(pull),
    )


def _limits(pull: broker_pb2.PullRequest) -> PullLimits | None:
    """How much an answer may hold; None: the broker has to answer, or to refuse. InvalidRequest."""
    limits = clamp(pull.max_count, pull.max_bytes)
    if pull.form == broker_pb2.MESSAGE_FORM_MESSAGES:
        return None
    with suppress(GroupNameInvalid):
        if pull.group:
            groups.check_name(pull.group)
        return limits
    return None


def _stream_response(answer: Answer) -> hold_pb2.HoldStreamResponse:
    if answer.error is not None:
        return hold_pb2.HoldStreamResponse(hold_id=answer.hold_id, error=to_proto(answer.error))
    response = hold_pb2.HoldResponse(pull=answer.response)
    return hold_pb2.HoldStreamResponse(hold_id=answer.hold_id, response=response)
