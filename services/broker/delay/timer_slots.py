"""Flow control of messages that wait for the same second."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from cometmq.errors import FlowControl
from cometmq.format.record import decode_all
from cometmq.format.timers import TimerForm, due_ms

SECONDS_KNOWN_MAX = 100_000
SECOND_MS = 1_000
ENTRIES_OF_RECALLED = 2  # the message, and the tombstone behind it


class TimerSlots:
    """``count_between`` counts the messages that lie in the timer queue and are due from the first
    time to before the second, in ms. ``recalled``: when those of them are due that were recalled.
    """

    def __init__(
        self,
        messages_max: int,
        count_between: Callable[[int, int], int],
        recalled: Iterable[int] = (),
    ) -> None:
        self._messages_max = messages_max
        self._count_between = count_between
        self._counts: OrderedDict[int, int] = OrderedDict()  # by second
        self._recalled: OrderedDict[int, int] = OrderedDict()  # by second
        for time_ms in recalled:
            self._note_recalled(time_ms // SECOND_MS)

    def check(
        self, records: bytes, runs: Sequence[tuple[TimerForm, int]], now_ms: int
    ) -> Counter[int]:
        """How many messages of a batch wait for each second, for :meth:`add`. ``runs``: how the
        records of each segment name their time, and how many there are. FlowControl: with them some
        second has too many. BatchMalformed.
        """
        wanted: Counter[int] = Counter()
        if not any(form for form, _ in runs):
            return wanted
        found = iter(decode_all(records))
        for form, count in runs:
            base_ms = now_ms if form is TimerForm.AFTER else 0
            for one in islice(found, max(0, count)):
                named_ms = due_ms(one.raw_properties) if form else None
                if named_ms is not None and base_ms + named_ms > now_ms:
                    wanted[(base_ms + named_ms) // SECOND_MS] += 1
        for second, count in wanted.items():
            waiting = self._count(second)
            if waiting + count > self._messages_max:
                raise FlowControl(
                    f"{waiting} messages wait for the second {second} since 1970, "
                    f"{self._messages_max} may (timer_messages_per_second_max)"
                )
        return wanted

    def add(self, counts: Counter[int]) -> None:
        """The batch is in the log."""
        for second, count in counts.items():
            self._counts[second] = self._count(second) + count

    def recalled(self, time_ms: int) -> None:
        """A message that waited for this time is recalled."""
        second = time_ms // SECOND_MS
        self._counts[second] = max(0, self._count(second) - 1)
        self._note_recalled(second)

    def _note_recalled(self, second: int) -> None:
        self._recalled[second] = self._recalled.get(second, 0) + 1
        if len(self._recalled) > SECONDS_KNOWN_MAX:  # those of the others count again
            self._recalled.popitem(last=False)

    def _count(self, second: int) -> int:
        if second not in self._counts:
            first_ms = second * SECOND_MS
            found = self._count_between(first_ms, first_ms + SECOND_MS)
            recalled = ENTRIES_OF_RECALLED * self._recalled.get(second, 0)
            self._counts[second] = max(0, found - recalled)
            if len(self._counts) > SECONDS_KNOWN_MAX:
                self._counts.popitem(last=False)
        return self._counts[second]
