"""When a writer begins to refuse sends, and takes them again: an event for operators."""

from __future__ import annotations

from typing import Protocol

from cometmq.member.pod.events import EventReason, EventRecorder
from cometmq.rpc.ticks import tick

LOOK_S = 1.0


class _Room(Protocol):
    @property
    def send_refusal(self) -> str:
        """Why sends are refused for want of room; empty: they are not."""


class _Copies(Protocol):
    @property
    def shortage(self) -> str:
        """Why sends are refused for want of members in sync; empty: they are not."""


class SendRefusals:
    """Looks once a second. What ends sooner is an error to its sender alone."""

    def __init__(self, room: _Room, copies: _Copies, events: EventRecorder) -> None:
        self._room = room
        self._copies = copies
        self._events = events
        self._is_full = self._is_short = False

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await tick(LOOK_S)

    def look(self) -> None:
        """Compare with the last look."""
        refusal, shortage = self._room.send_refusal, self._copies.shortage
        if bool(refusal) != self._is_full:
            self._is_full = bool(refusal)
            self._record(refusal, "all sends are refused", "there is room again")
        if bool(shortage) != self._is_short:
            self._is_short = bool(shortage)
            refused = "sends to topics that wait for copies are refused"
            self._record(shortage, refused, "enough members are in sync again")

    def _record(self, why: str, refused: str, again: str) -> None:
        if why:
            self._events.record(EventReason.SENDS_REFUSED, f"{refused}: {why}")
        else:
            self._events.record(EventReason.SENDS_TAKEN, f"sends are taken: {again}")
