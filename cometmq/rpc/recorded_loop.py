"""The event loop of a service: it notes in the flight recorder how long its turns take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import uvloop

from cometmq.flight_recorder import Stage, recorder

NOTED_NS = 1_000_000  # shorter turns would fill the ring


class RecordedLoop(uvloop.Loop):
    """A turn begins when a descriptor wakes the loop, above all gRPC's, through which all messages
    come. It ends when all that this made ready has run.
    """

    _begin_ns = 0  # of the turn that is under way

    def add_reader(  # type: ignore[override]  # mypy knows no subclass of a loop of Cython
        self, fd: Any, callback: Callable[..., object], *args: Any
    ) -> None:
        """As asyncio's."""

        def read() -> None:
            begins = not self._begin_ns
            if begins:
                self._begin_ns = recorder.now_ns()
            callback(*args)
            if begins:
                self.call_soon(self._end_turn)  # behind what was made ready just now

        super().add_reader(fd, read)

    def _end_turn(self) -> None:
        begin_ns, self._begin_ns = self._begin_ns, 0
        if recorder.now_ns() - begin_ns >= NOTED_NS:
            recorder.note_limited(Stage.LOOP_TURN, begin_ns)
