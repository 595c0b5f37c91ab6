"""What became of the half messages that ended last. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from cometmq.messaging.half_runs import EndedHalf, EndedRun

ENDED_MAX = 32_768  # halves
ENDED_MORE = 4_096  # that are forgotten at once: each look for the oldest would pass those before


class EndedHalves:
    """By the offsets of the halves."""

    def __init__(self) -> None:
        # The fields of an :class:`EndedHalf`, or a run that it is in, the oldest first. The
        # collector of garbage leaves such tuples alone.
        self._ended: dict[int, tuple[object, ...] | EndedRun] = {}

    def find(self, offset: int) -> EndedHalf | None:
        """None: it is not known any more, or it has not ended."""
        found = self._ended.get(offset)
        if found is None:
            return None
        return found.at(offset) if isinstance(found, EndedRun) else EndedHalf._make(found)

    def add_all(self, ended: Mapping[int, EndedHalf]) -> None:
        """Halves have ended."""
        plain = [tuple(one) for one in ended.values()]
        self._ended.update(zip(ended, plain, strict=True))
        self._forget()

    def add_run(self, ended: EndedRun) -> None:
        """The same, of halves that ended together."""
        self._ended.update(dict.fromkeys(ended.offsets, ended))
        self._forget()

    def _forget(self) -> None:
        if len(self._ended) > ENDED_MAX + ENDED_MORE:
            for offset in list(islice(self._ended, len(self._ended) - ENDED_MAX)):
                del self._ended[offset]
