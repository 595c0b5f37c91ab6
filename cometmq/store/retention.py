"""What of a log may go, and when nothing may come: RocketMQ's rules of age and of a filling disk,
as arithmetic.

Files go from the front, whole, oldest first. A file is *expired* when its youngest record is older
than the time that messages are kept. Expired files go at certain hours; at any hour once the disk
is fuller than ``max_used_ratio``; above ``forcible_ratio`` the oldest go whatever their age, but
only as many as it takes; above ``full_ratio``, when nothing that goes helps, appends are refused
until there is room again.

Where we differ from RocketMQ: age is the store time of records, not the file's change time, which
a copy loses; the refusal ends one point below its mark, so that it does not flicker; a quota is a
disk of its own for the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

# The refusal ends this far below the ratio at which it begins.
RESUME_MARGIN = 0.01
OWN_COPIES = 4  # snapshots of the state that a quota has room for, however fast producers send


class Reason(Enum):
    """Why a file goes; the values label a metric."""

    AGE = "age"
    SPACE = "space"


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The options. Ratios are of the disk's, or the quota's, size. ``quota_bytes`` 0: none."""

    reserved_ms: int = 72 * 3_600_000
    delete_hours: frozenset[int] = frozenset({4})  # of the local day
    max_used_ratio: float = 0.75
    forcible_ratio: float = 0.85
    full_ratio: float = 0.90
    quota_bytes: int = 0
    files_max: int = 10  # that go in one pass
    forced_after_s: float = 120.0  # what is in use this long after its time goes all the same
    interval_s: float = 10.0  # between two looks

    def __post_init__(self) -> None:
        assert self.reserved_ms > 0, self
        assert 0 < self.max_used_ratio <= self.forcible_ratio <= self.full_ratio <= 1, self
        assert self.quota_bytes >= 0, self
        assert self.files_max > 0, self


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file of the log with a file of records behind it. No record in it is younger than
    ``newest_ms``.
    """

    start: int
    end: int
    newest_ms: int


@dataclass(frozen=True, slots=True)
class Space:
    """A disk, or a quota: what is taken of it, and what is left for us."""

    used_bytes: int
    free_bytes: int

    @property
    def ratio(self) -> float:
        """How much of what we could use is used; a disk of no size is full."""
        size = self.used_bytes + self.free_bytes
        return self.used_bytes / size if size else 1.0

    def less(self, freed_bytes: int) -> Space:
        """When ``freed_bytes`` of it have gone."""
        freed = min(freed_bytes, self.used_bytes)
        return Space(self.used_bytes - freed, self.free_bytes + freed)


def quota(used_bytes: int, quota_bytes: int) -> Space:
    """A quota as a disk."""
    return Space(used_bytes, max(0, quota_bytes - used_bytes))


@dataclass(frozen=True, slots=True)
class Look:
    """What there is at one moment."""

    files: Sequence[LogFile]  # oldest first, without the last one that has records
    now_ms: int
    hour: int  # of the local day
    spaces: Sequence[Space]  # the disk, and the quota if there is one; the fullest counts
    keep_from: int  # log offset: nothing from here on may go
    pinned_from: int | None = None  # lowest log offset from which a reader will read
    pinned_s: float = 0.0  # how long a file has been kept for that alone
    out_of_space: bool = False  # the disk took no more since the last look, whatever its ratio
    commanded: bool = False  # an operator asks to remove what is expired, now
    refusing: bool = False

    @property
    def ratio(self) -> float:
        return max(space.ratio for space in self.spaces)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done. ``remove`` is the front of the look's files."""

    remove: Sequence[tuple[LogFile, Reason]]
    refuse: bool  # appends, from now on
    waits_for_readers: bool  # a file stays because of a reader
    waits_for_state: bool  # a file stays because of ``keep_from``, or would soon
    next_look_s: float
    waits_for_messages: bool = False  # a file stays because of messages that wait


class MovePass:
    """Whether a full store may store again what waits in its oldest files. A pass goes once through
    the log as it was when the pass began. The next one begins when others have appended something:
    that may be removed, and messages that were delivered with it wait no more. Else a store full of
    waiting messages would write for ever.
    """

    def __init__(self) -> None:
        self._stop = 0  # the log's end when the pass began
        self._moved_bytes = 0  # since then

    def may_go_on(self, first: int, end: int, file_bytes: int) -> bool:
        """Whether the oldest file, which begins at ``first``, may be moved to the log's end."""
        if first < self._stop:
            return True
        others = end - self._stop - self._moved_bytes
        if self._stop and others < _pass_bytes(end - first, file_bytes):
            return False
        self._stop, self._moved_bytes = end, 0
        return True

    def moved(self, size_bytes: int) -> None:
        """The log has grown by so much while a file was moved."""
        self._moved_bytes += size_bytes


def _pass_bytes(log_bytes: int, file_bytes: int) -> int:
    """So much others append between two passes."""
    return max(file_bytes // 8, log_bytes // 32)


class QuotaRoom(NamedTuple):
    """What of a quota is left to that without which no log file goes. Bytes."""

    state: int = 0  # snapshots: two have to be in the log
    moves: int = 0  # what waits in one file
    passes: int = 0  # blanks, and state, that a pass through the log adds
    deliveries: int = 0  # of messages that wait no more then

    @property
    def behind_moves(self) -> int:
        """What is left when a file begins to be moved."""
        return self.state + self.moves

    @property
    def behind_deliveries(self) -> int:
        """What deliveries leave: they may be followed by a pass."""
        return self.behind_moves + self.passes

    @property
    def behind_sends(self) -> int:
        """What sends leave: they may be followed by passes that gain nothing, and by deliveries."""
        return self.behind_deliveries + 2 * self.passes + self.deliveries


def quota_room(state_bytes: int, waiting_bytes: int, log_bytes: int, file_bytes: int) -> QuotaRoom:
    """``waiting_bytes``: of the log, from the oldest message on that waits."""
    return QuotaRoom(
        min(OWN_COPIES * state_bytes, file_bytes // 2),
        min(waiting_bytes, file_bytes * 9 // 8),
        min(waiting_bytes, log_bytes) // 16,
        min(waiting_bytes, _pass_bytes(log_bytes, file_bytes) + file_bytes // 8),
    )


def decide(rules: RetentionRules, look: Look) -> Verdict:
    """The rules."""
    due = list(_due(rules, look))
    kept = [file for file, _ in due if file.end > look.keep_from]
    allowed = due[: len(due) - len(kept)]
    free = [entry for entry in allowed if _is_free(rules, look, entry[0])]
    remove = free[: rules.files_max]
    return Verdict(
        remove=remove,
        refuse=refuses(rules, _freed(look.spaces, remove), look.refusing),
        waits_for_readers=len(free) < len(allowed),
        waits_for_state=bool(kept) or _will_wait(rules, look),
        next_look_s=min(1.0, rules.interval_s) if remove else rules.interval_s,
    )


def kept_back(rules: RetentionRules, look: Look, verdict: Verdict, count: int) -> Verdict:
    """The verdict when only the first ``count`` files may go: messages wait in the next one."""
    if count == len(verdict.remove):
        return verdict
    remove = verdict.remove[:count]
    return replace(
        verdict,
        remove=remove,
        refuse=refuses(rules, _freed(look.spaces, remove), look.refusing),
        waits_for_messages=True,
        next_look_s=min(1.0, rules.interval_s),
    )


def _due(rules: RetentionRules, look: Look) -> Iterator[tuple[LogFile, Reason]]:
    """The files whose time has come, whether they are needed or not."""
    in_time = look.commanded or look.hour in rules.delete_hours or look.ratio > rules.max_used_ratio
    spaces = look.spaces
    for index, file in enumerate(look.files):
        pressed = _is_pressed(rules, spaces, look.refusing)
        if in_time and file.newest_ms <= look.now_ms - rules.reserved_ms:
            yield file, Reason.AGE
        elif pressed or (look.out_of_space and not index):
            yield file, Reason.SPACE
        else:
            return
        spaces = [space.less(file.end - file.start) for space in spaces]


def _is_free(rules: RetentionRules, look: Look, file: LogFile) -> bool:
    """No reader needs it, or it cannot wait any longer."""
    return (
        look.pinned_from is None
        or file.end <= look.pinned_from
        or look.pinned_s >= rules.forced_after_s
        or look.out_of_space
        or _is_pressed(rules, look.spaces, look.refusing)
    )


def _is_pressed(rules: RetentionRules, spaces: Sequence[Space], refusing: bool) -> bool:
    """Files go whatever their age; so they do as long as appends are refused."""
    ratio = max(space.ratio for space in spaces)
    return ratio > rules.forcible_ratio or (refusing and refuses(rules, spaces, refusing))


def _will_wait(rules: RetentionRules, look: Look) -> bool:
    """The disk fills, and when it is full nothing could go: to move ``keep_from`` needs room."""
    filling = look.ratio > rules.max_used_ratio
    return filling and any(file.end > look.keep_from for file in look.files[:1])


def _freed(spaces: Sequence[Space], going: Sequence[tuple[LogFile, Reason]]) -> list[Space]:
    """What there is when the files have gone."""
    bytes_freed = sum(file.end - file.start for file, _ in going)
    return [space.less(bytes_freed) for space in spaces]


def refuses(rules: RetentionRules, spaces: Sequence[Space], refusing: bool) -> bool:
    """Whether there is too little room for appends, which are ``refusing`` already or not."""
    ratio = max(space.ratio for space in spaces)
    return ratio > (rules.full_ratio - RESUME_MARGIN if refusing else rules.full_ratio)
