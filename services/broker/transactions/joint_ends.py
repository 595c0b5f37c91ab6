"""Ends many half messages at once, without a look at each: with one read and one append for all."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress, repeat
from typing import Generic, NamedTuple, TypeVar

from cometmq.format import halves
from cometmq.format.halves import HALF_QUEUE
from cometmq.format.relay_run import HalfTargets, RelayRun, half_run, half_targets
from cometmq.member.read.records import log_offsets_of, read_joined, read_run, slices
from cometmq.messaging.half_runs import EndedHalf, EndedRun, HalfRun
from cometmq.messaging.transactions import Resolution
from cometmq.model import QueueKey
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span
from services.broker.transactions.destinations import Destination, Destinations
from services.broker.transactions.half_closer import Closed, HalfCloser
from services.broker.transactions.names import End, EndRun

COUNT_MAX = 1_024  # appended at once, so that a producer hardly waits

# What an :class:`EndedHalf` has behind its first two fields when nothing was made of it.
_ROLLED_BACK = ("", 0, -1, 0)


class _Columns(NamedTuple):
    """The ends of a call, field by field."""

    offsets: list[int]
    log_offsets: list[int]
    ids: list[str]
    resolutions: list[Resolution]

    def part(self, part: slice) -> _Columns:
        offsets, log_offsets, ids, resolutions = self
        return _Columns(offsets[part], log_offsets[part], ids[part], resolutions[part])


class _Chosen(NamedTuple):
    """Halves that end together. ``destinations``: of the texts of the targets."""

    columns: _Columns
    are_commits: list[bool]
    targets: HalfTargets
    destinations: list[Destination]
    relays: RelayRun


E = TypeVar("E", EndedHalf, EndedRun)


class JointlyEnded(NamedTuple, Generic[E]):
    """What became of the first halves, the end of the log behind that, 0 when nothing was appended,
    and the topics that they are of.
    """

    became: Sequence[E] = ()
    end_offset: int = 0
    topics: frozenset[str] = frozenset()


class JointEnds:
    """Belongs to the event loop. ``bytes_max``: of records that are appended at once."""

    def __init__(
        self, store: BaseStore, closer: HalfCloser, destinations: Destinations, bytes_max: int
    ) -> None:
        self._store = store
        self._table = closer.table
        self._closer = closer
        self._destinations = destinations
        self._bytes_max = bytes_max

    # --- halves that were stored together ---------------------------------------------------------

    async def end_run(self, group: str, wanted: EndRun) -> JointlyEnded[EndedRun]:
        """End halves that are open, of our form, and have one target: all, or the first ones, or
        none, if others need a look at each. Raises what appending raises.
        """
        offsets = wanted.offsets
        run = self._table.find_run(offsets.start, len(offsets))
        if run is None or run.group != group or wanted.resolution is Resolution.UNKNOWN:
            return JointlyEnded()
        if _places(run, offsets) != wanted.log_offsets:
            return JointlyEnded()
        became: list[EndedRun] = []
        end_offset, topics = 0, set[str]()
        for piece in run.pieces(offsets, self._bytes_max):
            relays = await self._relays_of(run, piece, wanted)
            if relays is None:
                break
            ended, end_offset = self._append_run(run, piece, *relays)
            became.append(ended)
            topics.add(relays[1].topic)
        return JointlyEnded(became, end_offset, frozenset(topics))

    async def _relays_of(
        self, run: HalfRun, piece: range, wanted: EndRun
    ) -> tuple[RelayRun, Destination] | None:
        """What is to be made of halves; None: they need a look at each."""
        start = run.at(piece.start)[0]
        span = (start, run.end_of(piece[-1]) - start)
        sources = await read_run(self._store, [span], [(HALF_QUEUE, offset) for offset in piece])
        if sources is None:
            return None
        first = wanted.name_of(piece.start - wanted.first.half_offset)
        text, places = half_run(sources, first.transaction_id)
        if len(places) < len(piece) or not self._table.are_open(piece):
            return None  # others, or one has ended meanwhile
        destination = self._destinations.of_text(text)
        if wanted.resolution is Resolution.ROLLBACK:
            return RelayRun(b"", array("I"), array("I"), ()), destination
        if destination.queue is None or not destination.takes(piece.start):
            return None
        chosen = array("I", bytes(places.itemsize * len(places)))
        return RelayRun(
            sources, places, chosen, (destination.queue,), halves.SYS_FLAG_COMMITTED
        ), destination

    def _append_run(
        self, run: HalfRun, piece: range, relays: RelayRun, destination: Destination
    ) -> tuple[EndedRun, int]:
        appended = self._closer.append_run(relays, piece)
        ended = EndedRun(piece.start, _places(run, piece), run.group)
        if relays.queues:
            [queue], first = relays.queues, appended.queue_offsets[0]
            log_offsets = log_offsets_of(self._store, queue, first, len(piece))
            ended = replace(
                ended,
                topic=queue[0],
                queue_id=queue[1],
                queue_offset=first,
                log_offsets=log_offsets,
            )
        self._closer.close_run(ended)
        closed = Closed(destination.topic, bool(relays.queues), run.stored_ms)
        self._closer.count({closed: len(piece)})
        return ended, appended.end_offset

    # --- others -----------------------------------------------------------------------------------

    async def end(self, group: str, ends: Sequence[End]) -> JointlyEnded[EndedHalf]:
        """As :meth:`end_run`, of any halves."""
        names, resolutions = zip(*ends, strict=True)
        offsets, log_offsets, ids = map(list, zip(*names, strict=True))
        columns = _Columns(offsets, log_offsets, ids, list(resolutions))
        spans = self._spans(group, columns)
        became: list[EndedHalf] = []
        end_offset, topics = 0, set[str]()
        for part in slices(spans, COUNT_MAX, self._bytes_max):
            places = [(HALF_QUEUE, offset) for offset in offsets[part]]
            found = await read_joined(self._store, spans[part], places)
            if found is None:
                break
            chosen = self._chosen(columns.part(part), *found)
            if chosen is None:
                break
            some, end_offset = self._append(group, chosen)
            became += some
            topics.update([destination.topic for destination in chosen.destinations])
        return JointlyEnded(became, end_offset, frozenset(topics))

    def _spans(self, group: str, columns: _Columns) -> list[Span]:
        """Where the halves stand; nothing, unless all are open halves of the group, named once."""
        found = list(map(self._table.find, columns.offsets))
        if None in found or len({*columns.offsets}) < len(found):
            return []
        places, sizes, groups = zip(*(half for half in found if half is not None), strict=True)
        is_good = (
            list(places) == columns.log_offsets
            and {*groups} == {group}
            and Resolution.UNKNOWN not in columns.resolutions
        )
        return list(zip(places, sizes, strict=True)) if is_good else []

    def _chosen(self, columns: _Columns, sources: bytes, places: array[int]) -> _Chosen | None:
        """What is to be done, with halves that were read; None: some need a look at each."""
        targets = half_targets(sources, places)
        if targets.ids != columns.ids or None in map(self._table.find, columns.offsets):
            return None  # others, or one has ended meanwhile
        destinations = list(map(self._destinations.of_text, targets.texts))
        are_commits = [one is Resolution.COMMIT for one in columns.resolutions]
        chosen = array("I", compress(targets.chosen, are_commits))
        first = min(columns.offsets)
        if not all(destinations[index].takes(first) for index in {*chosen}):
            return None
        queues = dict.fromkeys([destinations[index].queue for index in dict.fromkeys(chosen)])
        numbers = {queue: number for number, queue in enumerate(queues)}
        number_of = [numbers.get(destination.queue, 0) for destination in destinations]
        relays = RelayRun(
            sources,
            array("I", compress(places, are_commits)),
            array("I", map(number_of.__getitem__, chosen)),
            tuple(queue for queue in queues if queue is not None),
            halves.SYS_FLAG_COMMITTED,
        )
        return _Chosen(columns, are_commits, targets, destinations, relays)

    def _append(self, group: str, run: _Chosen) -> tuple[list[EndedHalf], int]:
        offsets, relays = run.columns.offsets, run.relays
        appended = self._closer.append_run(relays, offsets)
        firsts = appended.queue_offsets[: len(relays.queues)]
        made = [
            self._made(queue, first, count)
            for queue, first, count in zip(relays.queues, firsts, relays.sized(), strict=True)
        ]
        committed = iter([next(made[index]) for index in relays.chosen])
        parts = [next(committed) if is_commit else _ROLLED_BACK for is_commit in run.are_commits]
        heads = zip(run.columns.log_offsets, repeat(group))
        # Many of them: no call of Python for each.
        became: list[EndedHalf] = list(
            map(tuple.__new__, repeat(EndedHalf), map(operator.add, heads, parts))
        )
        self._closer.close(group, dict(zip(offsets, became, strict=True)))
        topics = [destination.topic for destination in run.destinations]
        columns = zip(run.targets.chosen, run.are_commits, run.targets.store_times_ms, strict=True)
        closed = Counter[Closed]()
        for (index, is_commit, stored_ms), count in Counter(columns).items():
            closed[Closed(topics[index], is_commit, stored_ms)] += count
        self._closer.count(closed)
        return became, appended.end_offset

    def _made(self, queue: QueueKey, first: int, count: int) -> Iterator[tuple[str, int, int, int]]:
        """Topic, queue id, queue offset and log offset of the newest messages of a queue."""
        places = log_offsets_of(self._store, queue, first, count)
        topic, queue_id = queue
        return zip(repeat(topic), repeat(queue_id), itertools.count(first), places)


def _places(run: HalfRun, offsets: range) -> array[int]:
    """The log offsets of halves of a run."""
    return run.places[offsets.start - run.first : offsets.stop - run.first]
