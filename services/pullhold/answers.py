"""Answers of holds on the way to their clients; bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

from cometmq.clock import Clock
from cometmq.errors import CometError
from cometmq.model import BUSY_COUNT
from cometmq.rpc.wire import field, tag
from cometmq.v1 import broker_pb2, common_pb2, hold_pb2
from services.pullhold.holds import Holds
from services.pullhold.metrics import ERROR, FOUND, NOT_FOUND, HoldMetrics
from services.pullhold.model import Hold, HoldLimits, HoldState, Session

ANSWERS_MAX = 1_024  # unsent in a call; above it no more requests of the call are read


_RESPONSE = tag(hold_pb2.HoldStreamResponse.RESPONSE_FIELD_NUMBER)
_PULL = tag(hold_pb2.HoldResponse.PULL_FIELD_NUMBER)


class Reply:
    """A pull's response, serialized once however many holds it answers. Not to be changed."""

    __slots__ = ("response", "return_number", "wire")

    def __init__(self, response: broker_pb2.PullResponse, return_number: int = 0) -> None:
        self.response = response
        self.return_number = return_number
        numbers = hold_pb2.HoldResponse(return_number=return_number).SerializeToString()
        # A HoldStreamResponse that lacks its hold_id.
        self.wire = field(_RESPONSE, field(_PULL, response.SerializeToString()), numbers)

    @property
    def size_bytes(self) -> int:
        return len(self.wire)

    @property
    def is_all(self) -> bool:
        """Few messages, and all that there were: the hold may go on behind them. A busy queue is
        pulled without a pull-hold instead.
        """
        response = self.response
        return (
            response.status == broker_pb2.PULL_STATUS_FOUND
            and response.count < BUSY_COUNT
            and response.next_position.offset >= response.max_offset
        )


class Answer(NamedTuple):
    """An answer to one hold: a reply or an error."""

    hold_id: int
    reply: Reply | None
    error: CometError | None
    goes_on: bool = False

    @property
    def size_bytes(self) -> int:
        return 0 if self.reply is None else self.reply.size_bytes


class Room(Protocol):
    """The bytes that a client may leave unread in all its calls."""

    def has(self, size_bytes: int) -> bool:
        """Whether ``size_bytes`` more fit."""

    def take(self, size_bytes: int) -> None:
        """The client has ``size_bytes`` more to read."""

    def give_back(self, size_bytes: int) -> None:
        """``size_bytes`` are free again."""


class Inbox:
    """The answers of one call, in their order."""

    def __init__(self, room: Room) -> None:
        self.client_room = room
        self.unsent_bytes = 0
        self.finishing = False  # the client sends no more holds
        self._answers: deque[Answer] = deque()
        self._woken = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    def put(self, answer: Answer) -> None:
        self.unsent_bytes += answer.size_bytes
        self._answers.append(answer)
        self._woken.set()

    async def take(self) -> Answer | None:
        """The next answer; None: the inbox is closed."""
        while not self._answers:
            if self._closed:
                return None
            self._woken.clear()
            await self._woken.wait()
        self._room.set()
        return self._answers.popleft()

    async def room(self) -> None:
        """Waits while the inbox is full: each request can be refused with an answer."""
        while len(self._answers) >= ANSWERS_MAX:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """No more answers come."""
        self._closed = True
        self._woken.set()


class Answers:
    """Ends holds and sends their answers."""

    def __init__(
        self, holds: Holds, limits: HoldLimits, clock: Clock, metrics: HoldMetrics
    ) -> None:
        self.unsent_bytes = 0
        self._holds = holds
        self._limits = limits
        self._clock = clock
        self._metrics = metrics

    def full(self, hold: Hold) -> bool:
        """Whether an answer of the usual size does not fit before the client reads others."""
        session, usual_bytes = hold.session, hold.queue.answer_bytes or 1
        return (
            session.inbox.unsent_bytes >= self._limits.unsent_bytes_per_stream_max
            or self.unsent_bytes >= self._limits.unsent_bytes_max
            or not session.inbox.client_room.has(usual_bytes)
        )

    def found(self, hold: Hold, reply: Reply) -> None:
        """Answers a hold with its pull's response; it ends, or goes on. Ends it with NOT_FOUND when
        the client has too much unread: the client pulls again later.
        """
        if hold.state is HoldState.DONE:
            return
        session, now_s = hold.session, self._clock.monotonic_s()
        hold.queue.answer_bytes = reply.size_bytes
        if not session.inbox.client_room.has(reply.size_bytes):
            self.nothing(hold)
        elif hold.answers_left > 1 and reply.is_all and not session.inbox.finishing:
            self._send(hold, FOUND, reply, goes_on=True)
            position = reply.response.next_position
            self._holds.go_on(hold, position.generation, position.offset, now_s)
        else:
            self._holds.end(hold, now_s)
            self._send(hold, FOUND, reply)

    def arrived(self, hold: Hold) -> None:
        """Ends a hold that waits for arrivals: there are messages."""
        if self._holds.end(hold, self._clock.monotonic_s()):
            self.send_arrived(hold)

    def failed(self, hold: Hold, error: CometError) -> None:
        """Ends a hold with an error."""
        if self._holds.end(hold, self._clock.monotonic_s()):
            self.send_error(hold, error)

    def nothing(self, hold: Hold) -> None:
        """Ends a hold with NOT_FOUND."""
        if self._holds.end(hold, self._clock.monotonic_s()):
            self.send_nothing(hold)

    def send_error(self, hold: Hold, error: CometError) -> None:
        """Answers a hold that has ended with an error."""
        self._send(hold, ERROR, None, error)

    def send_arrived(self, hold: Hold) -> None:
        """Answers a hold for arrivals that has ended: there are messages."""
        self._send(hold, FOUND, self._place(hold, broker_pb2.PULL_STATUS_FOUND))

    def send_nothing(self, hold: Hold) -> None:
        """Answers a hold that has ended with NOT_FOUND and the position to go on at."""
        self._send(hold, NOT_FOUND, self._place(hold, broker_pb2.PULL_STATUS_NOT_FOUND))

    def _place(self, hold: Hold, status: broker_pb2.PullStatus.ValueType) -> Reply:
        generation, maximum = self._holds.queues.known(hold.key)
        position = common_pb2.Position(generation=hold.generation or generation, offset=hold.offset)
        return Reply(
            broker_pb2.PullResponse(status=status, next_position=position, max_offset=maximum),
            hold.return_number,
        )

    def _send(
        self,
        hold: Hold,
        outcome: str,
        reply: Reply | None,
        error: CometError | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        assert goes_on == (hold.state is not HoldState.DONE)
        self._metrics.durations[outcome].observe(self._clock.monotonic_s() - hold.parked_s)
        answer = Answer(hold.hold_id, reply, error, goes_on)
        self.unsent_bytes += answer.size_bytes
        hold.session.inbox.client_room.take(answer.size_bytes)
        hold.session.inbox.put(answer)
        self.finish_if_done(hold.session)

    def finish_if_done(self, session: Session) -> None:
        """Closes the inbox of a call that sends no more holds and has none open."""
        if session.inbox.finishing and not session.holds:
            session.inbox.close()

    def release(self, session: Session, size_bytes: int) -> None:
        """Stops counting bytes that the call sends now, or that it ends with."""
        session.inbox.client_room.give_back(size_bytes)
        session.inbox.unsent_bytes -= size_bytes
        self.unsent_bytes -= size_bytes
        assert session.inbox.unsent_bytes >= 0
        assert self.unsent_bytes >= 0
