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
from dataclasses import dataclass
from enum import Enum

# The refusal ends this far below the ratio at which it begins.
RESUME_MARGIN = 0.01


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
