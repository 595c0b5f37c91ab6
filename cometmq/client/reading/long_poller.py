"""Parking pulls that found nothing: all of a client's on one stream to one pullhold.

Which pullhold: the client's first choice (``rendezvous``) of those that name servers list and that
answer. When it fails, the next one; while none is reachable :meth:`LongPoller.park` says so at
once, and the caller polls. Every 30 s and after a failure the list is asked for again; a better
choice than the present one then gets the new holds, the old ones end where they are.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import grpc

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.rendezvous import ranked
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError, PeerUnavailable
from cometmq.rpc.failure_backoff import FailureBackoff
from cometmq.rpc.interceptors import error_from, from_proto
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.streams import Stream, ask, read, write
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, hold_pb2, namesrv_pb2

LIST_EVERY_S = 30.0
CALL_TIMEOUT_S = 3.0
OVERDUE_S = 5.0  # an answer this much later than its hold's end does not come any more
SET_ASIDE = BackoffPolicy(first_s=1.0, max_s=30.0)  # a pullhold that failed
NONE_THERE = BackoffPolicy(first_s=0.2, max_s=10.0)  # none could be reached
HOLD_SPREAD = 0.5  # holds last 50 to 100 % of the time: what was parked together ends apart

ANSWERS_MAX = 8  # that a hold may give before it has to be sent again
LEFT_S = 1.0  # after it a hold that goes on is taken back: its reader has left it
TEND_S = 1.0  # between two looks at what is overdue or left

HoldStream: TypeAlias = "Stream[hold_pb2.HoldStreamRequest, hold_pb2.HoldStreamResponse]"
QueueOfGroup: TypeAlias = tuple[str, str, int]  # broker group, topic, queue id
# What a hold got; None: the connection broke first.
Answer: TypeAlias = "broker_pb2.PullResponse | CometError | None"

_log = logger(__name__)


class OpenHold:
    """A hold, and its answers that nobody has taken yet."""

    __slots__ = ("_answers", "_waiter", "hold_id", "overdue_s", "pull", "return_number")

    def __init__(self, hold_id: int, pull: broker_pb2.PullRequest) -> None:
        self.hold_id = hold_id
        self.pull = pull  # at the position behind the answers that were taken
        self.return_number = 0  # of the newest answer
        self.overdue_s = 0.0  # when the answer should be there, or the reader have come back
        self._answers: deque[Answer] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Answers that nobody has taken."""
        return len(self._answers)

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> broker_pb2.PullResponse | None:
        """The next answer; raises what the hold was refused with."""
        if not self._answers:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        answer = self._answers.popleft()
        if isinstance(answer, CometError):
            raise answer
        return answer


class HoldConnection:
    """One open stream to a pullhold, and the holds that wait on it."""

    def __init__(self, address: str, call: HoldStream, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self.failed = asyncio.Event()
        self.retiring = False  # takes no more holds; ends with its last one
        self._call = call
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenHold] = {}  # that the pullhold still answers
        # Those that may have more for their queue's reader, whether they are open or not.
        self._going_on: dict[QueueOfGroup, OpenHold] = {}
        self._unsent: deque[hold_pb2.HoldStreamRequest] = deque()
        self._wake = asyncio.Event()

    @property
    def usable(self) -> bool:
        return not self.retiring and not self.failed.is_set()

    async def hold(
        self, request: hold_pb2.HoldRequest, timeout_s: float
    ) -> broker_pb2.PullResponse | None:
        """The answer to a hold; None: the connection broke first. Raises what the hold was refused
        with. A caller that is cancelled takes its hold back. ``request`` is the connection's from
        now on, if there is an answer, whose return number it has.
        """
        queue = request.pull.queue
        key = request.broker_group, queue.topic, queue.queue_id
        hold = self._going_on.pop(key, None)
        if hold is not None and hold.pull != request.pull:  # its reader goes on elsewhere
            self._take_back(hold)
            hold = None
        if hold is None:
            hold = OpenHold(next(self._numbers), request.pull)
            self._open[hold.hold_id] = hold
            self._send(hold_pb2.HoldStreamRequest(hold_id=hold.hold_id, hold=request))
        hold.overdue_s = self._clock.monotonic_s() + timeout_s
        goes_on = False
        try:
            response = await hold.take()
            request.return_number = hold.return_number
            goes_on = response is not None and self._goes_on(key, hold, response)
            return response
        finally:
            if not goes_on:
                self._take_back(hold)
            self._end_if_retired()

    def _goes_on(
        self, key: QueueOfGroup, hold: OpenHold, response: broker_pb2.PullResponse
    ) -> bool:
        """Whether the hold has more for its reader, who comes back for it soon. Of a queue with two
        readers, one has it.
        """
        has_more = len(hold) or hold.hold_id in self._open
        if not self.usable or not has_more or key in self._going_on:
            return False
        hold.pull.position.CopyFrom(response.next_position)
        hold.overdue_s = self._clock.monotonic_s() + LEFT_S
        self._going_on[key] = hold
        return True

    async def _tend(self) -> None:
        """Takes back the holds that were left; ends when an answer is overdue."""
        while True:
            await asyncio.sleep(TEND_S)
            now_s = self._clock.monotonic_s()
            for key in [key for key, hold in self._going_on.items() if hold.overdue_s <= now_s]:
                self._take_back(self._going_on.pop(key))
            if any(hold.overdue_s <= now_s for hold in self._open.values()):
                _log.warning("a hold is not answered", extra=fields(address=self.address))
                return

    def _take_back(self, hold: OpenHold) -> None:
        if self._open.pop(hold.hold_id, None) is not None and self.usable:
            cancel = hold_pb2.CancelHold()
            self._send(hold_pb2.HoldStreamRequest(hold_id=hold.hold_id, cancel=cancel))

    def _send(self, request: hold_pb2.HoldStreamRequest) -> None:
        self._unsent.append(request)
        self._wake.set()

    def retire(self) -> None:
        """No more holds; end when those that wait are answered."""
        self.retiring = True
        self._forget_left()
        self._end_if_retired()

    def _forget_left(self) -> None:
        """Nobody comes back for the holds that go on."""
        for hold in self._going_on.values():
            self._open.pop(hold.hold_id, None)
        self._going_on.clear()

    def _end_if_retired(self) -> None:
        if self.retiring and not self._open:
            self.fail()

    def fail(self) -> None:
        """Nothing more comes on this connection."""
        self.failed.set()
        self._forget_left()
        waiting, self._open = self._open, {}
        for hold in waiting.values():
            hold.put(None)

    async def run(self) -> None:
        """Until the stream ends or the connection is given up."""
        parts = [self._read(), self._write(), self._tend(), self._given_up()]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._call.cancel()
            self.fail()
            await stop_all(tasks)

    async def _given_up(self) -> None:
        await self.failed.wait()

    async def _read(self) -> None:
        try:
            while (response := await read(self._call)) is not None:
                self._take(response)
        except CometError as error:
            _log.info("pullhold lost", extra=fields(address=self.address, error=error))

    def _take(self, response: hold_pb2.HoldStreamResponse) -> None:
        hold = self._open.get(response.hold_id)
        if hold is None:  # taken back meanwhile
            return
        if not response.goes_on:
            del self._open[response.hold_id]
        is_refused = response.HasField("error")
        hold.return_number = response.response.return_number
        hold.put(from_proto(response.error) if is_refused else response.response.pull)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent:
                    await write(self._call, self._unsent.popleft())
        except CometError:  # the reader gets the error
            await asyncio.Event().wait()


class LongPoller:
    """A client's way to the pullholds. ``cluster()`` names the cluster, empty while not known."""

    def __init__(
        self,
        client_id: str,
        connections: Connections,
        cluster: Callable[[], str],
        hold_ms: int,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._client_id = client_id
        self._connections = connections
        self._cluster = cluster
        self._hold_ms = hold_ms
        self._clock = clock or SystemClock()
        self._source = random.Random()
        self._none_there = Backoff(NONE_THERE, self._source)
        self._backoff = FailureBackoff(SET_ASIDE, self._source)
        self._connection: HoldConnection | None = None

    @property
    def address(self) -> str | None:
        """The pullhold that gets new holds; None: none is reachable."""
        return (
            self._connection.address
            if self._connection is not None and self._connection.usable
            else None
        )

    def start(self, tasks: Tasks) -> None:
        tasks.start(self._run(tasks), "choose a pullhold")

    async def park(
        self, broker_group: str, pull: broker_pb2.PullRequest
    ) -> broker_pb2.PullResponse | None:
        """The answer to a held pull, NOT_FOUND after ``hold_ms`` at most; None: no pullhold is
        reachable now. Raises what the pullhold or the broker refused it with.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            return None
        hold_ms = int(self._hold_ms * self._source.uniform(HOLD_SPREAD, 1.0)) or 1
        request = hold_pb2.HoldRequest(
            broker_group=broker_group, pull=pull, hold_ms=hold_ms, answers_max=ANSWERS_MAX
        )
        response = await connection.hold(request, hold_ms / 1000 + OVERDUE_S)
        if response is not None:
            self._backoff.answered(connection.address)
        return response

    async def park_for_arrival(
        self,
        broker_group: str,
        pull: broker_pb2.PullRequest,
        return_number: int,
        timeout_s: float,
    ) -> tuple[broker_pb2.PullResponse, int] | None:
        """FOUND, without messages, when one has come at the pull's position or behind it, or has
        come back to its group since the return of this number; NOT_FOUND after the time, with the
        place and the number to go on at; None and errors as :meth:`park`.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            return None
        hold_ms = max(1, min(self._hold_ms, round(timeout_s * 1000)))
        request = hold_pb2.HoldRequest(
            broker_group=broker_group,
            pull=pull,
            hold_ms=hold_ms,
            arrival_only=True,
            return_number=return_number,
        )
        response = await connection.hold(request, hold_ms / 1000 + OVERDUE_S)
        if response is None:
            return None
        self._backoff.answered(connection.address)
        return response, request.return_number

    # --- choosing ---------------------------------------------------------------------------------

    async def _run(self, tasks: Tasks) -> None:
        while True:
            addresses = await self._list()
            await self._choose(addresses, tasks)
            if self._connection is None:
                await asyncio.sleep(self._none_there.next_s())
                continue
            self._none_there.reset()
            if await wait_at_most(self._connection.failed, LIST_EVERY_S):
                self._backoff.failed(self._connection.address, self._clock.monotonic_s())
                self._connection = None

    async def _list(self) -> list[str]:
        """As the first name server says that knows any."""
        request = namesrv_pb2.ListPullholdsRequest(cluster=self._cluster())
        for address in await self._connections.namesrv_addresses():
            stub = self._connections.name_server(address)
            try:
                response = await ask(stub.ListPullholds, request, CALL_TIMEOUT_S)
            except CometError as error:
                _log.info("no list of pullholds", extra=fields(address=address, error=error))
                continue
            if response.addresses:
                return list(response.addresses)
        return []

    async def _choose(self, addresses: list[str], tasks: Tasks) -> None:
        """The first choice that can be reached becomes the connection; the present one is kept when
        it is that, or when no better one can be reached.
        """
        present = self.address
        now_s = self._clock.monotonic_s()
        for address in ranked(self._client_id, addresses):
            if address == present:
                return
            if self._backoff.is_aside(address, now_s):
                continue
            try:
                connection = await self._open(address)
            except CometError as error:
                _log.info("pullhold not reached", extra=fields(address=address, error=error))
                self._backoff.failed(address, self._clock.monotonic_s())
                continue
            if self._connection is not None:
                self._connection.retire()
            self._connection = connection
            tasks.start(connection.run(), f"holds at {address}")
            return

    async def _open(self, address: str) -> HoldConnection:
        call: HoldStream = self._connections.pullhold(address).HoldStream()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call.wait_for_connection()
        except TimeoutError:
            call.cancel()
            raise PeerUnavailable("no answer in time") from None
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        return HoldConnection(address, call, self._clock)
