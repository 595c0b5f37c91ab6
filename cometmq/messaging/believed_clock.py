"""Which time it is for messages that wait, while the wall clock may be wrong. Pure: clocks are
parameters.
"""

from __future__ import annotations

JUMP_MS = 1_000  # of the wall clock within a minute; more is a jump
JUMP_BELIEVED_AFTER_MS = 60_000  # forward: only when the clock stays there
PROMISE_MS_MAX = 3_600_000  # so long after it was stored a delay holds the time back
PROMISES_MAX = 16


class BelievedClock:
    """The wall clock, but for a jump forward, which has to last for a minute before it is believed:
    messages that are delivered too early cannot be taken back. The sum of the steps forward that
    are believed at once is :data:`JUMP_MS` in a minute. A step back is believed at once: messages
    come late, but none comes twice.

    A clock that was behind, and is right again, must not shorten the delays that were counted from
    it. So :attr:`due_ms` does not go beyond the clock by which a delay was counted
    (:meth:`promise`) before this delay is over, or an hour. New delays count from :attr:`now_ms`,
    which goes on at once.

    ``stored_ms``: a time that has been, that of the newest record in the log; 0: none is known. The
    first clock after it is believed, unless the machine has just booted: then its clock may not be
    set yet, and counts as one that has jumped when the machine booted.

    Invariant: ``due_ms`` ≤ ``now_ms``.
    """

    def __init__(self, stored_ms: int = 0) -> None:
        self.forward_count = self.back_count = 0  # jumps that were met
        self.now_ms = self.due_ms = 0
        self._stored_ms = stored_ms
        # All offsets are of a clock to the time since the boot.
        self._offset_ms: int | None = None  # by which it is now
        self._trusted = (0, 0)  # an offset that was believed, and since when
        self._doubtful: tuple[int, int] | None = None  # another offset, and since when
        # Offsets from which delays were counted, lowest first, and until when these last.
        self._promises: list[tuple[int, int]] = []

    def look(self, wall_ms: int, boot_ms: int) -> None:
        """Set the times by one look at both clocks: the wall's, and the time since the boot, which
        counts while the machine is suspended.
        """
        offset_ms = wall_ms - boot_ms
        if self._offset_ms is None:
            self._offset_ms = self._first_offset_ms(wall_ms, boot_ms)
            self._trusted = self._offset_ms, boot_ms
        if self._is_believed(offset_ms, boot_ms):
            self._offset_ms = offset_ms
        elif offset_ms < self._offset_ms:
            self.back_count += offset_ms < self._offset_ms - JUMP_MS
            self._offset_ms = offset_ms
        self.now_ms = boot_ms + self._offset_ms
        self.due_ms = boot_ms + min(self._offset_ms, self._promised_offset_ms(boot_ms))
        assert self.due_ms <= self.now_ms

    def promise(self, delay_ms: int, boot_ms: int) -> None:
        """A message is stored that waits for so long, from :attr:`now_ms` of the last look on."""
        assert self._offset_ms is not None, "call look before"
        until_ms = boot_ms + min(delay_ms, PROMISE_MS_MAX)
        lowest_ms = self._offset_ms
        near = [p for p in self._promises if abs(p[0] - lowest_ms) <= JUMP_MS]
        if len(self._promises) - len(near) >= PROMISES_MAX:
            near = [*near, self._promises[0]]
        for offset_ms, other_until_ms in near:
            lowest_ms, until_ms = min(lowest_ms, offset_ms), max(until_ms, other_until_ms)
        rest = [p for p in self._promises if p not in near]
        self._promises = sorted([*rest, (lowest_ms, until_ms)])
        assert len(self._promises) <= PROMISES_MAX

    def _promised_offset_ms(self, boot_ms: int) -> int:
        """No delay is shortened by a clock up to this one."""
        assert self._offset_ms is not None
        if not self._promises:
            return self._offset_ms
        self._promises = [p for p in self._promises if p[1] > boot_ms]
        lowest_ms = self._promises[0][0] if self._promises else self._offset_ms
        # Steps that are no jumps are followed at once.
        return lowest_ms if self._offset_ms - lowest_ms > JUMP_MS else self._offset_ms

    def _first_offset_ms(self, wall_ms: int, boot_ms: int) -> int:
        has_just_booted = boot_ms < JUMP_BELIEVED_AFTER_MS
        if not (has_just_booted and self._stored_ms and wall_ms - self._stored_ms > JUMP_MS):
            return wall_ms - boot_ms
        self._doubtful = (wall_ms - boot_ms, 0)
        self.forward_count += 1
        return self._stored_ms - boot_ms

    def _is_believed(self, offset_ms: int, boot_ms: int) -> bool:
        """Whether the wall clock is where it was trusted, or has been elsewhere for a minute."""
        trusted_ms, since_ms = self._trusted
        if abs(offset_ms - trusted_ms) <= JUMP_MS:
            self._doubtful = None
            if boot_ms - since_ms >= JUMP_BELIEVED_AFTER_MS:
                self._trusted = offset_ms, boot_ms
            return True
        if self._doubtful is None or abs(offset_ms - self._doubtful[0]) > JUMP_MS:
            self._doubtful = offset_ms, boot_ms
            self.forward_count += offset_ms > trusted_ms
        if boot_ms - self._doubtful[1] < JUMP_BELIEVED_AFTER_MS:
            return False
        self._trusted, self._doubtful = (offset_ms, boot_ms), None
        return True
