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

from cometmq.client.connections import Connections
from cometmq.client.rendezvous import ranked
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

HoldStream: TypeAlias = "Stream[hold_pb2.HoldStreamRequest, hold_pb2.HoldStreamResponse]"
Answer: TypeAlias = "asyncio.Future[broker_pb2.PullResponse | None]"

_log = logger(__name__)


class HoldConnection:
    """One open stream to a pullhold, and the holds that wait on it."""

    def __init__(self, address: str, call: HoldStream) -> None:
        self.address = address
        self.failed = asyncio.Event()
        self.retiring = False  # takes no more holds; ends with its last one
        self._call = call
        self._numbers = itertools.count(1)
        self._open: dict[int, Answer] = {}
        self._unsent: deque[hold_pb2.HoldStreamRequest] = deque()
        self._wake = asyncio.Event()

    @property
    def usable(self) -> bool:
        return not self.retiring and not self.failed.is_set()

    async def hold(
        self, request: hold_pb2.HoldRequest, timeout_s: float
    ) -> broker_pb2.PullResponse | None:
        """The answer to a hold; None: the connection broke first. Raises what the hold was refused
        with. A caller that is cancelled takes its hold back.
        """
        hold_id = next(self._numbers)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._open[hold_id] = answer
        self._send(hold_pb2.HoldStreamRequest(hold_id=hold_id, hold=request))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            _log.warning(
                "a hold is not answered", extra=fields(address=self.address, after_s=timeout_s)
            )
            self.fail()
            return None
        finally:
            if self._open.pop(hold_id, None) is not None and self.usable:
                cancel = hold_pb2.CancelHold()
                self._send(hold_pb2.HoldStreamRequest(hold_id=hold_id, cancel=cancel))
            self._end_if_retired()

    def _send(self, request: hold_pb2.HoldStreamRequest) -> None:
        self._unsent.append(request)
        self._wake.set()

    def retire(self) -> None:
        """No more holds; end when those that wait are answered."""
        self.retiring = True
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self.retiring and not self._open:
            self.fail()

    def fail(self) -> None:
        """Nothing more comes on this connection."""
        self.failed.set()
        waiting, self._open = self._open, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_result(None)

    async def run(self) -> None:
        """Until the stream ends or the connection is given up."""
        parts = [self._read(), self._write(), self._given_up()]
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
        answer = self._open.pop(response.hold_id, None)
        if answer is None or answer.done():  # taken back meanwhile
            return
        if response.HasField("error"):
            answer.set_exception(from_proto(response.error))
        else:
            answer.set_result(response.response.pull)

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
        """What a held pull got, NOT_FOUND after ``hold_ms`` at most; None: no pullhold is reachable
        now. Raises what the pullhold or the broker refused it with.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            return None
        hold_ms = int(self._hold_ms * self._source.uniform(HOLD_SPREAD, 1.0)) or 1
        request = hold_pb2.HoldRequest(broker_group=broker_group, pull=pull, hold_ms=hold_ms)
        response = await connection.hold(request, hold_ms / 1000 + OVERDUE_S)
        if response is not None:
            self._backoff.answered(connection.address)
        return response

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
        return HoldConnection(address, call)
