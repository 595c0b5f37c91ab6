"""In which form messages are stored that consumers do not read at once, or whose sender does not
wait for the disk: where their records lie until then, and what their properties begin with.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.format import delayed, halves, timers
from cometmq.format.halves import HalfForm
from cometmq.format.timers import NO_DIGITS, TIMER_QUEUE, TimerForm
from cometmq.model import Message


class StoredForm(NamedTuple):
    """``delay_level`` 0: they wait for no level. ``timer``: how each names its time.
    ``wait_store`` False: they are acknowledged when they are appended. ``half``: they belong to
    transactions, and have nothing of the others.
    """

    delay_level: int = 0
    timer: TimerForm = TimerForm.NONE
    wait_store: bool = True
    half: HalfForm | None = None

    @property
    def waits(self) -> bool:
        """Whether consumers get the messages later."""
        return bool(self.delay_level or self.timer or self.half)

    def place(self, topic: str, queue_id: int) -> tuple[str, int]:
        """The topic and queue of the records of messages for a queue."""
        if self.half:
            return halves.HALF_QUEUE
        if self.timer:
            return TIMER_QUEUE
        if self.delay_level:
            return delayed.SCHEDULE_TOPIC, delayed.queue_id_of(self.delay_level)
        return topic, queue_id

    def prefix(self, topic: str, queue_id: int, digits: bytes = NO_DIGITS) -> bytes:
        """The beginning of the properties of these records. ``digits``: of the time."""
        if self.half:
            return halves.prefix(self.half, topic, queue_id)
        if self.timer:
            found = timers.prefix(topic, queue_id, wait_store=self.wait_store)
            return found[: timers.DIGITS_AT] + digits + found[timers.DIGITS_END :]
        return delayed.stored_prefix(self.delay_level, topic, queue_id, wait_store=self.wait_store)


PLAIN = StoredForm()


def form_of(message: Message) -> StoredForm:
    """The form of a message that was checked."""
    timer = TimerForm.NONE
    if message.deliver_at_ms:
        timer = TimerForm.AT
    elif message.delay_ms:
        timer = TimerForm.AFTER
    return StoredForm(message.delay_level, timer, message.wait_store)
