"""``cometmq.v1.HoldService`` on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from typing import Any

import grpc

from cometmq.errors import CometError, GroupNameInvalid, InvalidRequest, OffsetInvalid
from cometmq.filters import sql, tags
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
ANSWERS_PER_HOLD_MAX = 64
BROKER_GROUP_CHARACTERS_MAX = 127
SPECS_MAX = 1_024  # a client sends the same for each of its holds
_FORMS = frozenset(broker_pb2.MessageForm.values())

Context = Any  # grpc.aio.ServicerContext of the method's messages


class HoldServicer(hold_pb2_grpc.HoldServiceServicer):
    """See ``proto/cometmq/v1/hold.proto``. Limits count a connection as one client."""

    def __init__(self, service: HoldService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    async def HoldStream(  # type: ignore[override]  # answers with context.write
        self, request_iterator: object, context: Context
    ) -> None:
        with self._session(context) as session:
            await context.send_initial_metadata(())  # shows the client that the pull-hold serves
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(session, context))
                while (answer := await session.inbox.take()) is not None:
                    # From here on the call itself counts the answer's bytes.
                    self._service.answers.release(session, answer.size_bytes)
                    await context.write(_wire(answer))
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
        """A client that half-closes the call still gets the answers to its holds."""
        while (request := await context.read()) is not grpc.aio.EOF:
            hold_id = request.hold_id
            if request.HasField("cancel"):
                self._service.cancel(session, hold_id)
            elif hold_id in session.holds:  # an answer could not say which of the two it is for
                raise InvalidRequest(f"hold_id: {hold_id} is held already")
            else:
                try:
                    self._gate.check()
                    self._service.park(session, hold_id, _spec_of(request.hold))
                except CometError as error:
                    self._service.refuse(session, hold_id, error)
            await session.inbox.room()
        self._service.finish(session)

    async def Hold(self, request: hold_pb2.HoldRequest, context: Context) -> hold_pb2.HoldResponse:
        spec = _spec_of(request)
        with self._session(context) as session:
            self._service.park(session, 0, spec)
            answer = await session.inbox.take()
        assert answer is not None, "every hold is answered before its inbox is closed"
        if answer.reply is None:
            assert answer.error is not None
            raise answer.error
        reply = answer.reply
        return hold_pb2.HoldResponse(pull=reply.response, return_number=reply.return_number)


def _wire(answer: Answer) -> bytes:
    """As a HoldStreamResponse: what is serialized apart is put together by appending."""
    head = hold_pb2.HoldStreamResponse(hold_id=answer.hold_id, goes_on=answer.goes_on)
    if answer.reply is not None:
        return head.SerializeToString() + answer.reply.wire
    assert answer.error is not None
    head.error.CopyFrom(to_proto(answer.error))
    return head.SerializeToString()


def _spec_of(request: hold_pb2.HoldRequest) -> HoldSpec:
    """InvalidRequest, OffsetInvalid, FilterInvalid, GroupNameInvalid. The broker reports all other
    errors of a pull, unknown names above all.
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
    if not 0 <= request.answers_max <= ANSWERS_PER_HOLD_MAX:
        raise InvalidRequest(
            f"answers_max: {request.answers_max} is not within 0 to {ANSWERS_PER_HOLD_MAX}"
        )
    if request.arrival_only:
        groups.check_name(pull.group)
    return HoldSpec(
        key=ClusterQueue(request.broker_group, pull.queue.topic, pull.queue.queue_id),
        generation=pull.position.generation,
        offset=pull.position.offset,
        codes=_codes(tuple(pull.filter.tags)),
        hold_s=(request.hold_ms or HOLD_MS_DEFAULT) / 1000,
        request=pull,
        limits=None
        if request.arrival_only
        else _limits(pull.group, pull.form, pull.max_count, pull.max_bytes),
        program=sql.program_of(pull.filter.sql, pull.filter.tags),
        answers_max=1 if request.arrival_only else request.answers_max or 1,
        arrival_group=pull.group if request.arrival_only else "",
        return_number=request.return_number,
    )


@lru_cache(SPECS_MAX)
def _codes(names: tuple[str, ...]) -> frozenset[int]:
    """FilterInvalid."""
    return tags.codes(tags.check(names))


@lru_cache(SPECS_MAX)
def _limits(group: str, form: int, max_count: int, max_bytes: int) -> PullLimits | None:
    """The limits of an answer; None: only the broker can answer the pull, or refuse it.
    InvalidRequest.
    """
    limits = clamp(max_count, max_bytes)
    if form == broker_pb2.MESSAGE_FORM_MESSAGES:
        return None
    with suppress(GroupNameInvalid):
        if group:
            groups.check_name(group)
        return limits
    return None
