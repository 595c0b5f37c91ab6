"""Ends transactions at the brokers: the ends of one turn of the event loop, and all that come while
a call is on its way, travel together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cometmq.client.cluster.accumulator import Accumulator
from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.messages import StoredRun
from cometmq.client.namespaces import Namespace
from cometmq.client.transactions.receipts import Ended, Halves
from cometmq.clock import Clock
from cometmq.errors import ClientClosed, CometError, PeerUnavailable, Retry, SendTimeout
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.streams import ask
from cometmq.rpc.tasks import Tasks
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

ENDS_PER_CALL_MAX = 1_024

Outcomes = list["Ended | CometError"]
Resolution = broker_pb2.TransactionResolution

_log = logger(__name__)


class _Wanted(NamedTuple):
    """One transaction's halves at a broker group, and who waits for what becomes of them."""

    halves: Sequence[Halves]
    size: int
    resolution: Resolution.ValueType
    decided: asyncio.Future[Outcomes]
    deadline_s: float


class TransactionEnds:
    """Of one producer. ``patience_s``: so long an end is tried."""

    def __init__(
        self,
        wire_group: str,
        connections: Connections,
        routes: RouteWatcher,
        tasks: Tasks,
        policy: BackoffPolicy,
        namespace: Namespace,
        clock: Clock,
        *,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self._wire_group = wire_group
        self._connections = connections
        self._routes = routes
        self._policy = policy
        self._namespace = namespace
        self._clock = clock
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._wanted: Accumulator[_Wanted] = Accumulator(
            tasks, self._decide, size_max=ENDS_PER_CALL_MAX, size_of=lambda wanted: wanted.size
        )

    def end(
        self, broker_group: str, halves: Sequence[Halves], resolution: Resolution.ValueType
    ) -> asyncio.Future[Outcomes]:
        """The outcomes of the halves of one transaction, in their order. The future raises
        SendTimeout: it is not known; ClientClosed; else what the whole call is refused with.
        """
        decided: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        deadline_s = self._clock.monotonic_s() + self._patience_s
        size = sum([one.size for one in halves])
        self._wanted.put(broker_group, _Wanted(halves, size, resolution, decided, deadline_s))
        return decided

    def close(self) -> None:
        """Tries no end any more that was not sent."""
        for wanted in self._wanted.close():
            _fail(wanted, ClientClosed("The producer was closed before the transaction had ended."))

    async def _decide(self, broker_group: str, some: list[_Wanted]) -> None:
        """Calls until the broker has answered: an end that comes twice changes nothing."""
        backoff = Backoff(self._policy, random.Random())
        try:
            while some:
                try:
                    outcomes = await self._call(broker_group, some)
                except CometError as error:
                    some = self._left(broker_group, some, self._namespace.strip(error))
                    if some:
                        self._routes.doubt(broker_group)
                        await self._routes.wait_change(backoff.next_s())
                    continue
                for wanted, mine in zip(some, outcomes, strict=True):
                    if not wanted.decided.done():
                        wanted.decided.set_result(mine)
                return
        except asyncio.CancelledError:
            for wanted in some:
                _fail(wanted, ClientClosed("The producer was closed before it was answered."))
            raise

    def _left(self, broker_group: str, some: list[_Wanted], error: CometError) -> list[_Wanted]:
        """Those that are tried again after a refusal of the whole call."""
        if error.retry is Retry.NEVER:
            for wanted in some:
                _fail(wanted, error)
            return []
        _log.info("ends refused for now", extra=fields(broker_group=broker_group, error=error))
        now_s = self._clock.monotonic_s()
        for wanted in some:
            if wanted.deadline_s <= now_s:
                _fail(
                    wanted,
                    SendTimeout(
                        f"Broker group {broker_group!r} has not said how the transaction ended."
                    ).after(error),
                )
        return [wanted for wanted in some if not wanted.decided.done()]

    async def _call(self, broker_group: str, some: Sequence[_Wanted]) -> list[Outcomes]:
        """The outcomes of the halves of each transaction."""
        writer = self._routes.require_writer(broker_group)
        numbers, pieces = _in_order(some)
        request = broker_pb2.EndTransactionsRequest(
            producer_group=self._wire_group, ends=_ends(pieces)
        )
        stub = self._connections.broker(writer.address)
        response = await ask(stub.EndTransactions, request, self._timeout_s)
        count = sum([halves.size for _, halves in pieces])
        if sum([max(1, result.count) for result in response.results]) != count:
            raise PeerUnavailable("The broker's answer does not fit the ends.")
        outcomes: list[Outcomes] = [[] for _ in some]
        cut = _cut(response.results, [halves.size for _, halves in pieces])
        for number, mine in zip(numbers, cut, strict=True):
            outcomes[number] += [
                self._namespace.strip(from_proto(one.result.error))
                if one.result.HasField("error")
                else one
                for one in mine
            ]
        return outcomes


_Piece = tuple["Resolution.ValueType", Halves]


def _in_order(some: Sequence[_Wanted]) -> tuple[list[int], list[_Piece]]:
    """All halves, those that are neighbours and end alike one behind the other; before that, the
    number of the transaction of each. Those of one transaction keep their order.
    """
    pieces = [
        (number, wanted.resolution, halves)
        for number, wanted in enumerate(some)
        for halves in wanted.halves
    ]
    if all(len(wanted.halves) == 1 for wanted in some):
        pieces.sort(key=_place)
    return [number for number, _, _ in pieces], [(how, halves) for _, how, halves in pieces]


def _place(piece: tuple[int, Resolution.ValueType, Halves]) -> tuple[int, int]:
    _, resolution, (run, first, _) = piece
    return resolution, run.queue_offset + first


def _ends(pieces: Sequence[_Piece]) -> Iterator[broker_pb2.TransactionEnd]:
    """As few as there are runs of halves that end alike."""
    run: StoredRun | None = None
    first = end = how = 0
    for resolution, halves in pieces:
        if halves.run is run and halves.first == end and resolution == how:
            end += halves.size
            continue
        if run is not None:
            yield _end(run, first, end, how)
        run, first, _ = halves
        end, how = first + halves.size, resolution
    if run is not None:
        yield _end(run, first, end, how)


def _end(run: StoredRun, first: int, end: int, resolution: int) -> broker_pb2.TransactionEnd:
    at, log_offset = run.first + first, run.log_offset
    following = run.starts[at + 1 : at + end - first]
    half = broker_pb2.HalfRef(
        half_offset=run.queue_offset + first,
        log_offset=log_offset + run.starts[at],
        transaction_id=f"{run.id_stream}{run.first_counter + first:08X}",
    )
    return broker_pb2.TransactionEnd(
        half=half,
        resolution=Resolution.ValueType(resolution),
        following_log_offsets=[log_offset + start for start in following],
    )


def _cut(
    results: Sequence[broker_pb2.TransactionResult], counts: Sequence[int]
) -> Iterator[list[Ended]]:
    """The results of the first so many halves, the next so many, and so on."""
    left = iter(results)
    result, used, has = broker_pb2.TransactionResult(), 0, 0
    for count in counts:
        mine: list[Ended] = []
        while count:
            if used == has:
                result, used = next(left), 0
                has = max(1, result.count)
            taken = min(count, has - used)
            mine.append(Ended(result, used, taken))
            used += taken
            count -= taken
        yield mine


def _fail(wanted: _Wanted, error: CometError) -> None:
    if not wanted.decided.done():
        wanted.decided.set_exception(error)
        wanted.decided.exception()  # its caller may have gone away
