"""How far a consumer is in its queues: where that is kept, by the brokers for its group, or in a
store of the application's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias, cast

from cometmq.client.options import ConsumerOptions
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.start_positions import Beginnings, first_position
from cometmq.errors import CometError, ConfigInvalid, OffsetStoreFailed, Retry
from cometmq.model import Position, QueueRef
from cometmq.rpc.tasks import apart, is_cancelled

# What is kept of a queue now, or why a commit was refused.
Answers: TypeAlias = dict[QueueRef, Position | CometError | None]


class OffsetStore(Protocol):
    """A place of your own for how far a consumer is, in a database say, instead of the brokers.
    Positions of a queue come from one consumer at a time. What a method raises is logged, and the
    call is made again.
    """

    async def load(self, queues: Sequence[QueueRef]) -> Mapping[QueueRef, Position]:
        """The positions of those of the queues that have one."""

    async def store(self, positions: Mapping[QueueRef, Position]) -> None:
        """Keeps these; when it returns, they outlive the process."""


def check_store(store: object) -> OffsetStore | None:
    """The store itself; ConfigInvalid when it cannot be one."""
    if store is None or all(callable(getattr(store, name, None)) for name in ("load", "store")):
        return cast(OffsetStore | None, store)
    raise ConfigInvalid(f"offset_store has methods load and store, {store!r:.80} has not both.")


class Positions(Protocol):
    """Where reading begins, and where it is kept how far it came. ``may_come_late``: a position of
    a queue that another client reads now does no harm.
    """

    may_come_late: bool

    async def start(self, queue: QueueRef) -> Position:
        """Where to begin in a queue. Raises errors of the catalogue."""

    async def commit(self, positions: Mapping[QueueRef, Position]) -> Answers:
        """Keeps positions; answers what is kept now. An older one than that changes nothing."""


class GroupPositions:
    """Kept by the brokers for the group. ``is_shared`` False: for this client alone.
    ``decides`` False: it begins each queue as its options say, and decides nothing for the group.
    ``lock_number_of``: of queues that are consumed in order.
    """

    may_come_late = True  # the broker keeps what is newer

    def __init__(
        self,
        calls: BrokerCalls,
        options: ConsumerOptions,
        lock_number_of: Callable[[QueueRef], int] = lambda _: 0,
        *,
        is_shared: bool = True,
        decides: bool = True,
    ) -> None:
        self._calls = calls
        self._options = options
        self._lock_number_of = lock_number_of
        self._beginnings = (
            Beginnings(calls, options, self, is_shared=is_shared) if decides else None
        )

    async def start(self, queue: QueueRef) -> Position:
        committed = (await self._calls.went_on([queue]))[queue]
        if isinstance(committed, CometError):
            raise committed
        if committed is not None:
            return committed
        if self._beginnings is not None:
            return await self._beginnings.begin(queue)
        return await first_position(self._calls, queue, self._options)

    async def commit(self, positions: Mapping[QueueRef, Position]) -> Answers:
        return await self._calls.commit(positions, self._lock_number_of)

    async def begun_at(self, queues: Collection[QueueRef]) -> set[str]:
        """As ``Kept`` says."""
        return await self._calls.begun_at(queues)

    async def begin(self, positions: Mapping[QueueRef, Position]) -> Answers:
        """As ``Kept`` says."""
        return await self._calls.commit(positions, begins=True)


class OwnPositions:
    """Kept in a store of the application's own. A topic in which no queue has a position there
    begins as ``consume_from`` says. ``is_shared``: by the group's members, each in its queues.
    """

    may_come_late = False  # the store keeps what it gets last

    def __init__(
        self,
        store: OffsetStore,
        calls: BrokerCalls,
        options: ConsumerOptions,
        *,
        is_shared: bool = True,
        decides: bool = True,
    ) -> None:
        self._store = store
        self._calls = calls
        self._options = options
        self._beginnings = (
            Beginnings(calls, options, self, is_shared=is_shared) if decides else None
        )
        self._kept: dict[QueueRef, Position] = {}  # as loaded or stored last
        self._storing = asyncio.Lock()  # one call at a time, so that none overtakes another

    async def start(self, queue: QueueRef) -> Position:
        found = (await self._load([queue])).get(queue)
        if found is None and self._beginnings is not None:
            return await self._beginnings.begin(queue)
        position = found or await first_position(self._calls, queue, self._options)
        self._kept[queue] = position
        return position

    async def _load(self, queues: Sequence[QueueRef]) -> dict[QueueRef, Position]:
        try:
            found = dict(await apart(self._store.load(queues)))
            for position in found.values():
                if not isinstance(position, Position):
                    raise TypeError(f"not a Position: {position!r:.80}")
        except CometError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # whatever the application's raises
            if is_cancelled(error):
                raise
            raise OffsetStoreFailed(f"positions were not loaded: {error!r}") from error
        return found

    async def begun_at(self, queues: Collection[QueueRef]) -> set[str]:
        """As ``Kept`` says."""
        return {queue.broker_group for queue in await self._load(list(queues))}

    async def begin(self, positions: Mapping[QueueRef, Position]) -> Answers:
        """As ``Kept`` says."""
        async with self._storing:
            known = await self._load(list(positions))
            self._kept |= known
            new = {queue: at for queue, at in positions.items() if queue not in known}
            return {**known, **(await self._keep(new) if new else {})}

    async def commit(self, positions: Mapping[QueueRef, Position]) -> Answers:
        async with self._storing:
            return await self._commit(positions)

    async def _commit(self, positions: Mapping[QueueRef, Position]) -> Answers:
        newer = {q: at for q, at in positions.items() if not _is_older(at, self._kept.get(q))}
        answers: Answers = {queue: self._kept[queue] for queue in positions.keys() - newer.keys()}
        if newer:
            answers |= await self._keep(newer)
        return answers

    async def _keep(self, positions: dict[QueueRef, Position]) -> Answers:
        try:
            await apart(self._store.store(positions))
        except CometError as error:
            return dict.fromkeys(positions, error)
        except (Exception, asyncio.CancelledError) as error:  # whatever the application's raises
            if is_cancelled(error):
                raise
            failed = OffsetStoreFailed(f"positions were not stored: {error!r}")
            return dict.fromkeys(positions, failed)
        self._kept |= positions
        return dict(positions)


def _is_older(position: Position, kept: Position | None) -> bool:
    """Whether it lies before what is kept, in the same generation of the queue."""
    return (
        kept is not None
        and kept.generation == position.generation
        and position.offset < kept.offset
    )


def may_pass(answer: Position | CometError | None) -> bool:
    """Whether a commit was refused for a reason that passes."""
    return isinstance(answer, CometError) and answer.retry is not Retry.NEVER
