"""Appends the records that are made of half messages at their end, and closes the halves.

Halves that end together are one append: the records made of them, then the op records that list
them. A crash between the two is mended when the log is opened again: a record names the half that
it was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.format.halves import op_records
from cometmq.format.relay import OwnRecord, Relayed
from cometmq.format.relay_run import RelayRun
from cometmq.member.metrics import MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.messaging.half_runs import EndedHalf, EndedRun
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import HalfTable
from cometmq.store.writer import Appended


class Made(NamedTuple):
    """A half that is about to end. ``topic`` empty: it is given up. ``relayed`` None: nothing is
    made of it.
    """

    offset: int
    log_offset: int
    group: str
    topic: str
    stored_ms: int
    relayed: Relayed | None


class Closed(NamedTuple):
    """Halves of a topic that have ended, for the metrics."""

    topic: str
    is_committed: bool
    stored_ms: int


class HalfCloser:
    """Belongs to the event loop. Each call is one turn of it, so that no half ends twice."""

    def __init__(
        self,
        table: HalfTable,
        board: CheckBoard,
        relays: RelayWriter,
        metrics: MemberMetrics,
        clock: Clock,
    ) -> None:
        self.table = table
        self.board = board
        self._relays = relays
        self._metrics = metrics
        self._clock = clock

    @property
    def host(self) -> bytes:
        """The broker's own."""
        return self._relays.host

    def append(self, made: Sequence[Made]) -> tuple[list[EndedHalf], int]:
        """What became of each, and the end of the log. Raises what appending raises."""
        offsets = [one.offset for one in made]
        relayed: list[OwnRecord] = [one.relayed for one in made if one.relayed is not None]
        ops = op_records(offsets, self.host)
        appended = self._relays.append([*relayed, *ops]).appended
        places: list[tuple[int, int]] = []
        at = appended.log_offset
        for queue_offset, size in zip(appended.queue_offsets, appended.segment_bytes, strict=True):
            places.append((queue_offset, at))
            at += size
        self.table.told(appended.queue_offsets[-1] + 1, offsets)
        became: list[EndedHalf] = []
        by_group: dict[str, dict[int, EndedHalf]] = {}
        left = iter(places)
        for one in made:
            ended = EndedHalf(one.log_offset, one.group)
            if one.relayed is not None:
                to = one.relayed
                ended = EndedHalf(one.log_offset, one.group, to.topic, to.queue_id, *next(left))
            became.append(ended)
            by_group.setdefault(one.group, {})[one.offset] = ended
        for group, of_group in by_group.items():
            self.close(group, of_group)
        self.count(
            Counter(Closed(m.topic, m.relayed is not None, m.stored_ms) for m in made if m.topic)
        )
        return became, appended.end_offset

    def append_run(self, run: RelayRun, offsets: Sequence[int]) -> Appended:
        """Appends the records of a run, and the op records of these halves. Raises what appending
        raises.
        """
        ops = op_records(offsets, self.host)
        if run.chosen:
            appended = self._relays.append_run(run, ops).appended
        else:
            appended = self._relays.append(ops).appended
        self.table.told(appended.queue_offsets[-1] + 1, offsets)
        return appended

    def close(self, group: str, ended: Mapping[int, EndedHalf]) -> None:
        """Halves of the group have ended, by their offsets."""
        self.table.close_all(ended)
        self.board.closed(ended.keys(), group)

    def close_run(self, ended: EndedRun) -> None:
        """The same, of halves that were stored together."""
        self.table.close_run(ended)
        self.board.closed(ended.offsets, ended.group)

    def count(self, closed: Mapping[Closed, int]) -> None:
        """How many halves have ended."""
        now_ms = self._clock.wall_ms()
        for (topic, is_committed, stored_ms), count in closed.items():
            age_s = max(0, now_ms - stored_ms) / 1000
            self._metrics.transactions_ended(topic, count, age_s, is_committed=is_committed)
