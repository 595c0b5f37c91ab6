"""How the epochs of a group branch, by its lease: where another's log may differ from ours.

A new writer may not know of a writer in between whose log left ours *below* our end: our log has
more of what came before than that writer had. What that writer gave out is fenced where the two
logs part. Pure; numbers of epochs are unique in a group, so a number alone names an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

# An entry takes some 40 bytes in a lease. A member that has missed more is fenced from the start.
BRANCHES_MAX = 16


Epoch = tuple[int, int]  # epoch, start offset


class EpochBranch(NamedTuple):
    """An epoch that a writer has begun."""

    epoch: int
    start: int  # log offset from which on the writer's log has bytes that are none of its parents'
    parent: int  # the newest epoch that its log had before; 0 = none


EpochBranches = tuple[EpochBranch, ...]  # as they were begun, the last ``BRANCHES_MAX``


def is_in_order(recorded: EpochBranches) -> bool:
    """Whether epochs rise, and come from earlier ones."""
    rising = all(a.epoch < b.epoch for a, b in pairwise(recorded))
    return rising and all(0 <= b.parent < b.epoch and b.start >= 0 for b in recorded)


def with_branches(recorded: EpochBranches, own: Sequence[Epoch]) -> EpochBranches:
    """What to record when the last of ``own``, a store's epochs, has begun.

    Its parent is the newest that is recorded, so that others find their way back by it: an epoch
    may have been opened, and its writer have died before the lease knew of it.
    """
    before = [number for number, _ in own[:-1]]
    named = {branch.epoch for branch in recorded}
    parent = max((number for number in before if number in named), default=max(before, default=0))
    branch = EpochBranch(own[-1][0], _start_after(own, parent), parent)
    return (*recorded, branch)[-BRANCHES_MAX:]


def merged_branches(seen: EpochBranches, own: Sequence[Epoch]) -> EpochBranches:
    """What to record when a member takes the lease: what was ``seen`` there last, and what its
    store has since. The lease may have been lost, or written by a release that kept no list.
    """
    newest = seen[-1].epoch if seen else 0
    known = sum(number <= newest for number, _ in own)
    if known == len(own):
        return seen
    # The first finds its parent among what was seen; each of the others comes from the one before.
    later = [EpochBranch(*own[at], parent=own[at - 1][0]) for at in range(known + 1, len(own))]
    return (*with_branches(seen, own[: known + 1]), *later)[-BRANCHES_MAX:]


def common_end(own: Sequence[Epoch], recorded: EpochBranches, settled: int) -> int:
    """Log offset up to which every log that consumers may have seen, and that was not fenced, is
    the same as ours. ``own``: the store's epochs, the last of them just opened at the log's end.
    ``settled``: the newest epoch of our log that raised the generations; it has taken all that were
    before into account.

    0 when that is not known: the lease keeps some of the epochs only, and we know none of them.
    """
    known = {number for number, _ in own}
    # No epoch that is newer than our log: an early release began to count generations at the time
    # of day, which reads as an epoch that no writer has opened.
    settled = min(settled, max((number for number, _ in own[:-1]), default=0))
    if len(recorded) == BRANCHES_MAX and not any(branch.epoch in known for branch in recorded):
        return 0
    by_epoch = {branch.epoch: branch for branch in recorded}
    strangers = [b for b in recorded if b.epoch > settled and b.epoch not in known]
    return min([own[-1][1], *(_parts_at(own, known, by_epoch, branch) for branch in strangers)])


def _parts_at(
    own: Sequence[Epoch], known: set[int], by_epoch: Mapping[int, EpochBranch], branch: EpochBranch
) -> int:
    """Where the log of an epoch that is not ours left the one that we have in common."""
    lowest = branch.start
    while branch.parent and branch.parent not in known:
        if branch.parent not in by_epoch:
            return 0
        branch = by_epoch[branch.parent]
        lowest = min(lowest, branch.start)
    return min(lowest, _start_after(own, branch.parent))


def _start_after(own: Sequence[Epoch], parent: int) -> int:
    """Where the first of the epochs after ``parent`` began."""
    return next(start for number, start in own if number > parent)
