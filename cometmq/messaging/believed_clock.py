"""Which time it is for messages that wait, while the wall clock may be wrong. Pure: clocks are
parameters.
"""

from __future__ import annotations

JUMP_MS = 10_000  # forward: believed only when the clock stays there
JUMP_BELIEVED_AFTER_MS = 60_000
STEP_BACK_MS = 1_000  # what counts as a jump back


class BelievedClock:
    """The wall clock, but for a jump forward, which has to last for a while before it is believed:
    messages that are delivered too early cannot be taken back. A jump back is believed at once:
    messages come late, but none comes twice.

    ``stored_ms``: a time that has been, that of the newest record in the log; 0: none is known. The
    first clock after it is believed, unless the machine has just booted: then its clock may not be
    set yet, and counts as one that has jumped when the machine booted.
    """

    def __init__(self, stored_ms: int = 0) -> None:
        self.forward_count = self.back_count = 0  # jumps that were met
        self._stored_ms = stored_ms
        self._offset_ms: int | None = None  # of the wall clock to the time since the boot
        self._doubtful: tuple[int, int] | None = None  # another offset, and since when

    def now_ms(self, wall_ms: int, boot_ms: int) -> int:
        """The time, by one look at both clocks: the wall's, and the time since the boot, which
        counts while the machine is suspended.
        """
        offset_ms = wall_ms - boot_ms
        if self._offset_ms is None:
            self._offset_ms = self._first_offset_ms(wall_ms, boot_ms)
        jump_ms = offset_ms - self._offset_ms
        if jump_ms > JUMP_MS and not self._is_believed(offset_ms, boot_ms):
            return boot_ms + self._offset_ms
        self.back_count += jump_ms < -STEP_BACK_MS
        self._offset_ms, self._doubtful = offset_ms, None
        return wall_ms

    def _first_offset_ms(self, wall_ms: int, boot_ms: int) -> int:
        has_just_booted = boot_ms < JUMP_BELIEVED_AFTER_MS
        if not (has_just_booted and self._stored_ms and wall_ms - self._stored_ms > JUMP_MS):
            return wall_ms - boot_ms
        self._doubtful = (wall_ms - boot_ms, 0)
        self.forward_count += 1
        return self._stored_ms - boot_ms

    def _is_believed(self, offset_ms: int, boot_ms: int) -> bool:
        if self._doubtful is None or abs(offset_ms - self._doubtful[0]) > JUMP_MS:
            self._doubtful = (offset_ms, boot_ms)
            self.forward_count += 1
        return boot_ms - self._doubtful[1] >= JUMP_BELIEVED_AFTER_MS
