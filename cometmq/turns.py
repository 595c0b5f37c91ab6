"""Whether a loop that has to come to its end gets on. One that does not ends with an error."""

from __future__ import annotations

import traceback

from cometmq.errors import InternalError
from cometmq.telemetry import fields, logger

TURNS_MAX = 100  # in a row, at one place
FRAMES_MAX = 16

_log = logger(__name__)


class Turns:
    """Counts the turns of one run of ``loop`` since it last got on."""

    def __init__(self, loop: str) -> None:
        self._loop = loop
        self._place: object = None
        self._count = 0

    def next(self, place: object = None) -> None:
        """A turn begins. ``place``: how far the loop is; without it all turns count. Raises
        InternalError after TURNS_MAX turns at one place; the log has the stack then.
        """
        if place != self._place:
            self._place, self._count = place, 0
        self._count += 1
        if self._count > TURNS_MAX:
            stack = "".join(traceback.format_stack(limit=FRAMES_MAX)[:-1]).rstrip()
            _log.error("a loop does not get on", extra=fields(loop=self._loop, stack=stack))
            raise InternalError(f"{self._loop}: nothing got on in {TURNS_MAX} turns")
