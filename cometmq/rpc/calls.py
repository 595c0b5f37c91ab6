"""Calls as servicers see them, bounded by what their peers have not read yet: gRPC's context with a
ledger beside it (:mod:`cometmq.rpc.unread`).

gRPC holds an answer until its peer takes it, twice. It neither reports nor bounds how much. So
every call has an account from its first byte to its last, and an answer is begun when there is
room. A peer that does not read loses its connection: gRPC cannot end a call whose answer waits for
its peer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from cometmq.clock import Clock
from cometmq.errors import AnswersUnread, InvalidRequest
from cometmq.flight_recorder import Stage, recorder
from cometmq.rpc.hangup import hang_up
from cometmq.rpc.memory import give_back_freed, resident_bytes
from cometmq.rpc.tasks import wait_at_most
from cometmq.rpc.ticks import tick
from cometmq.rpc.unread import Account, Ledger, Peer, UnreadLimits
from cometmq.telemetry import ThrottledLog

SWEEP_S = 0.5
# A process that has grown by so much, though little is held for peers, gives back what is free.
GROWTH_BYTES, CROWD_CALLS, CROWD_BYTES = 40 * 1024 * 1024, 256, 16 * 1024 * 1024
GIVE_BACK_S = 5.0  # at most so often
AGENT_LENGTH_MAX = 128
UNCOUNTED_BYTES = 1024  # of an answer: its call costs more
_USUAL_KEPT = 7 / 8  # of what a method's largest answer was, at each smaller one

_GrpcContext: TypeAlias = Any  # grpc.aio.ServicerContext, whose types differ from method to method
Serialize: TypeAlias = Callable[[Any], bytes]
# Waits until an answer may leave, or raises why none may.
BeforeAnswer: TypeAlias = Callable[[], Awaitable[None]]

_log = logging.getLogger(__name__)


class Room:
    """Room for answers that wait beside their call: to be closed with it."""

    def __init__(self, ledger: Ledger, account: Account) -> None:
        self._ledger = ledger
        self._account = account

    def has(self, size_bytes: int) -> bool:
        """Whether there is so much."""
        return self._ledger.has_room(self._account, size_bytes)

    def take(self, size_bytes: int) -> None:
        """Take ``size_bytes`` of room, whether there is enough or not."""
        self._ledger.charge(self._account, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Free ``size_bytes`` of room."""
        self._ledger.give_back(self._account, size_bytes)

    def close(self) -> None:
        """All of it is."""
        self._ledger.close(self._account)


class Call:
    """What methods get as their ``context``. ``serialize``: of the messages of a stream;
    ``before_answer``: of each of them.
    """

    __slots__ = (
        "_account",
        "_answered",
        "_before_answer",
        "_clock",
        "_context",
        "_ledger",
        "_serialize",
        "reserved",
    )

    def __init__(
        self,
        context: _GrpcContext,
        ledger: Ledger,
        clock: Clock,
        serialize: Serialize | None,
        before_answer: BeforeAnswer | None,
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._clock = clock
        self._serialize = serialize
        self._before_answer = before_answer
        self._account = ledger.open(context.peer())
        self._answered = False
        self.reserved = False  # by the method itself
        context.add_done_callback(self._done)

    def peer(self) -> str:
        """Address of the caller, in gRPC's form."""
        return self._account.peer.name

    def agent(self) -> str:
        """The program that calls, as it says itself: at most AGENT_LENGTH_MAX printable characters,
        perhaps none.
        """
        for key, value in self._context.invocation_metadata() or ():
            if key == "user-agent" and isinstance(value, str):
                return "".join(filter(str.isprintable, value[:AGENT_LENGTH_MAX]))
        return ""

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        await self._context.send_initial_metadata(metadata)

    # --- requests ---------------------------------------------------------------------------------

    async def request(self) -> bytes:
        """The request of a unary call. AnswersUnread, before anything is read."""
        ledger, account = self._ledger, self._account
        ledger.admit(account)
        ledger.owe(account, self._clock.monotonic_s())
        raw = await self._context.read()
        ledger.settle(account)
        if not isinstance(raw, bytes):
            raise InvalidRequest("the call ended without a request")
        return raw

    async def read(self) -> Any:
        """The next message of a stream."""
        return await self._context.read()

    # --- answers ----------------------------------------------------------------------------------

    async def room(self, size_bytes: int) -> None:
        """Wait until an answer of that size may be begun; a later one takes its place.
        AnswersUnread.
        """
        self.reserved = True
        self.leave_room()
        if not self._ledger.try_reserve(self._account, size_bytes):
            await self._wait(size_bytes)

    def leave_room(self) -> None:
        """There is nothing to answer after all."""
        self._ledger.give_back(self._account, self._account.held_bytes)

    async def _wait(self, size_bytes: int) -> None:
        ledger, account = self._ledger, self._account
        ledger.check_calls(account)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def notify(refusal: AnswersUnread | None) -> None:
            if not granted.done():  # else the call was cancelled
                granted.set_result(None) if refusal is None else granted.set_exception(refusal)

        ledger.owe(account, None)
        waiter = ledger.wait(account, size_bytes, self._clock.monotonic_s(), notify)
        try:
            await granted
        finally:
            ledger.settle(account)
            ledger.cancel(waiter)

    def open_room(self) -> Room:
        """For answers that wait beside the call."""
        self.reserved = True
        return Room(self._ledger, self._ledger.open(self._account.peer.name))

    def answered(self, size_bytes: int) -> None:
        """gRPC gets the answer of a unary call now; it is held until the call is done."""
        more_bytes = size_bytes - self._account.held_bytes
        if more_bytes > UNCOUNTED_BYTES:
            self._ledger.charge(self._account, more_bytes)
        elif more_bytes < 0:
            self._ledger.give_back(self._account, -more_bytes)
        self._ledger.owe(self._account, self._clock.monotonic_s())
        self._answered = True

    async def write(self, message: Any) -> None:
        """Send a message of a stream; returns when the peer's window has taken it."""
        ledger, account = self._ledger, self._account
        if self._before_answer is not None:
            await self._before_answer()
        if isinstance(message, bytes):
            raw = message
        else:
            assert self._serialize is not None
            raw = self._serialize(message)
        more_bytes = len(raw) - account.held_bytes
        if more_bytes > UNCOUNTED_BYTES:
            ledger.charge(account, more_bytes)
        elif more_bytes < 0:
            ledger.give_back(account, -more_bytes)
        ledger.owe(account, self._clock.monotonic_s())
        begun_ns = recorder.now_ns()
        try:
            await self._context.write(raw)
        finally:
            ledger.settle(account)
        recorder.note(Stage.GRPC_WRITE, begun_ns, len(raw))
        if account.held_bytes:
            ledger.read(account, self._clock.monotonic_s())

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]
    ) -> None:
        """End the call with an error; raises gRPC's AbortError."""
        self._ledger.settle(self._account)
        self._ledger.owe(self._account, self._clock.monotonic_s())
        await self._context.abort(code, details, metadata)

    def _done(self, _: object) -> None:
        if self._answered:
            self._ledger.read(self._account, self._clock.monotonic_s())
        self._ledger.close(self._account)


class SilentPeers:
    """The log of connections that were closed: a line a minute about an address, for all ports."""

    def __init__(self, clock: Clock) -> None:
        self._closed = ThrottledLog(_log, logging.WARNING, clock)

    def closed(self, peers: list[Peer]) -> None:
        by_address: dict[str, list[Peer]] = {}
        for peer in peers:
            by_address.setdefault(peer.address.host, []).append(peer)
        for address, some in by_address.items():
            self._closed.log(
                "connections closed: they do not read their answers",
                address,
                address=address,
                connections=len(some),
                calls=sum(peer.owed_count for peer in some),
                bytes=sum(peer.held_bytes for peer in some),
            )


class Calls:
    """All calls of one server. ``hang_up`` closes connections by gRPC's names of their peers."""

    def __init__(
        self,
        limits: UnreadLimits,
        clock: Clock,
        silent: SilentPeers,
        hang_up: Callable[[Iterable[str]], int] = hang_up,
    ) -> None:
        self.ledger = Ledger(limits)
        self._clock = clock
        self._silent = silent
        self._hang_up = hang_up
        self._usual_bytes: dict[str, float] = {}  # by method
        self._low_bytes = math.inf  # resident memory at its lowest since it was given back
        self._looked_s = -math.inf
        self._may_have_grown = True  # since it was looked

    def open(
        self,
        context: _GrpcContext,
        serialize: Serialize | None,
        before_answer: BeforeAnswer | None = None,
    ) -> Call:
        """A call that has just come."""
        return Call(context, self.ledger, self._clock, serialize, before_answer)

    def unary(
        self, method: str, behavior: Callable[[bytes, Any], Awaitable[bytes]]
    ) -> Callable[[object, Call], Awaitable[bytes]]:
        """``behavior``, bytes to bytes, with its request read and its answer bounded. A method that
        does not reserve room by itself gets as much as its answers took lately.
        """

        async def call(_: object, call: Call) -> bytes:
            raw = await call.request()
            usual_bytes = self._usual_bytes.get(method, 0.0)
            if usual_bytes:
                await call.room(int(usual_bytes))
                call.reserved = False
            answer = await behavior(raw, call)
            call.answered(len(answer))
            if not call.reserved:
                self._usual_bytes[method] = max(len(answer), usual_bytes * _USUAL_KEPT)
            return answer

        return call

    # --- peers that do not read -------------------------------------------------------------------

    async def run(self) -> None:
        """Refuse and close what is overdue; until cancelled. Sleeps while no peer owes anything."""
        while True:
            await tick(SWEEP_S)
            tired, silent = self.ledger.overdue(self._clock.monotonic_s())
            for waiter in tired:
                self.ledger.cancel(waiter)
                waiter.notify(
                    AnswersUnread(
                        "no room for the answer: too many are not read (unread_bytes_max)"
                    )
                )
            if silent:
                self._silent.closed(silent)
                # All sockets are looked at: not on the loop.
                names = [peer.name for peer in silent]
                await asyncio.to_thread(self._hang_up, names)
            await self._give_back_memory()
            if self.ledger.is_clear:
                await self._rest()

    async def _rest(self) -> None:
        """Waits until a call owes something, or memory is to be looked at once more."""
        owed = asyncio.Event()
        self.ledger.at_owed(owed.set)
        if self._may_have_grown:
            await wait_at_most(owed, GIVE_BACK_S)
        else:
            await owed.wait()
        self._may_have_grown |= owed.is_set()

    async def _give_back_memory(self) -> None:
        now_s, ledger = self._clock.monotonic_s(), self.ledger
        crowd = ledger.owed_count >= CROWD_CALLS or ledger.held_bytes >= CROWD_BYTES
        if crowd or now_s - self._looked_s < GIVE_BACK_S:
            return
        self._looked_s = now_s
        self._may_have_grown = not ledger.is_clear
        self._low_bytes = min(self._low_bytes, resident_bytes())
        if resident_bytes() - self._low_bytes >= GROWTH_BYTES:
            await asyncio.to_thread(give_back_freed)
            self._low_bytes = resident_bytes()
