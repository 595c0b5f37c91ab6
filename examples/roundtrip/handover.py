"""One broker group changes its writer while everybody works, because an operator asks for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cometmq.admin import brokers
from cometmq.admin.connection import Connection
from cometmq.admin.views import HandoverView
from examples.roundtrip.tally import Tally


@dataclass(frozen=True, slots=True)
class HandOver:
    """A hand-over and the time around it, in milliseconds since 1970."""

    view: HandoverView
    asked_ms: int
    answered_ms: int  # the new writer was registered

    @property
    def text(self) -> str:
        """One line."""
        view, seconds = self.view, (self.answered_ms - self.asked_ms) / 1000
        return (
            f"member {view.from_member} handed over to member {view.to_member} at "
            f"{view.log_end_offset:,} bytes of log; epoch {view.epoch} after {seconds:.1f} s"
        )

    def pause_ms(self, tally: Tally) -> int | None:
        """How long the group stored no message, by the store times of all that came back; None: it
        stored none afterwards.
        """
        return tally.pause_ms(self.view.broker_group, self.asked_ms, self.answered_ms)


async def hand_over(connection: Connection, broker_group: str) -> HandOver:
    """What ``cometmq broker step-down`` does. Errors: those of the catalogue."""
    asked_ms = now_ms()
    view = await brokers.step_down(connection, broker_group)
    return HandOver(view, asked_ms, now_ms())


def now_ms() -> int:
    return time.time_ns() // 1_000_000
