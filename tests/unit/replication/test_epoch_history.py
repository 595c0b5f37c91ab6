"""Where logs part, as the lease tells, against the logs themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from cometmq.replication.epoch_history import (
    BRANCHES_MAX,
    EpochBranch,
    EpochBranches,
    common_end,
    merged_branches,
    with_branches,
)
from cometmq.replication.follower import EPOCHS_MAX


def test_a_writer_that_has_everybodys_bytes_is_fenced_at_its_end() -> None:
    recorded = with_branches(with_branches((), [(1, 0)]), [(1, 0), (2, 50)])
    assert recorded == (EpochBranch(1, 0, 0), EpochBranch(2, 50, 1))
    assert common_end([(1, 0), (2, 50), (3, 90)], recorded, settled=1) == 90


def test_a_writer_in_between_is_fenced_where_it_began() -> None:
    recorded = (EpochBranch(1, 0, 0), EpochBranch(2, 181, 1))
    assert common_end([(1, 0), (3, 188)], recorded, settled=1) == 181


def test_ours_may_have_left_the_common_log_before_the_other_did() -> None:
    recorded = (EpochBranch(1, 0, 0), EpochBranch(2, 188, 1), EpochBranch(3, 195, 1))
    assert common_end([(1, 0), (2, 188), (4, 230)], recorded, settled=2) == 188


def test_an_epoch_that_we_lack_may_come_from_another_that_we_lack() -> None:
    recorded = (
        EpochBranch(1, 0, 0),
        EpochBranch(2, 181, 1),
        EpochBranch(3, 188, 1),
        EpochBranch(4, 195, 2),
    )
    assert common_end([(1, 0), (3, 188), (5, 230)], recorded, settled=3) == 181


def test_what_an_earlier_epoch_of_ours_took_into_account_counts_no_more() -> None:
    recorded = (EpochBranch(1, 0, 0), EpochBranch(2, 181, 1), EpochBranch(3, 188, 1))
    assert common_end([(1, 0), (3, 188), (4, 230)], recorded, settled=3) == 230


def test_epochs_whose_bytes_retention_removed_are_no_strangers() -> None:
    recorded = (
        EpochBranch(1, 0, 0),
        EpochBranch(2, 50, 1),
        EpochBranch(3, 90, 2),
        EpochBranch(4, 120, 3),
    )
    assert common_end([(3, 90), (4, 120), (5, 130)], recorded, settled=3) == 130


def test_an_epoch_that_the_lease_never_heard_of_belongs_to_the_next() -> None:
    recorded = with_branches((EpochBranch(1, 0, 0),), [(1, 0), (2, 40), (3, 60)])
    assert recorded[-1] == EpochBranch(3, 40, 1)
    assert common_end([(1, 0), (4, 70)], recorded, settled=1) == 40


def test_nothing_is_certain_when_the_lease_has_dropped_what_we_know() -> None:
    recorded: EpochBranches = ()
    own = [(1, 0)]
    for epoch in range(2, BRANCHES_MAX + 4):
        recorded = with_branches(recorded, own)
        own.append((epoch, 10 * epoch))
    assert len(recorded) == BRANCHES_MAX
    assert common_end([(1, 0), (30, 15)], recorded, settled=1) == 0
    assert common_end([(1, 0), (30, 15)], recorded[1:], settled=1) == 0, "its parent is unknown"
    assert common_end([*own, (30, 900)], recorded, settled=1) == 900


def test_a_full_list_that_begins_after_our_log_may_have_dropped_who_left_it_first() -> None:
    """Epoch 2 left it at 5, say, and nobody recalls."""
    dropped: EpochBranches = (EpochBranch(2, 5, 1), EpochBranch(3, 10, 1))
    own = [(1, 0), (3, 10)]
    recorded = dropped
    for epoch in range(4, BRANCHES_MAX + 3):
        own.append((epoch, 10 * epoch))
        recorded = with_branches(recorded, own)
    assert recorded[0] == dropped[1]
    assert common_end([(1, 0), (30, 15)], recorded, settled=1) == 0


def test_without_a_record_our_own_end_counts() -> None:
    assert with_branches((), [(4, 10), (7, 90)]) == (EpochBranch(7, 90, 4),)
    assert common_end([(4, 10), (7, 90)], (), settled=0) == 90


def test_who_counted_by_the_time_of_day_has_taken_no_newer_epoch_into_account() -> None:
    recorded = (EpochBranch(1, 0, 0), EpochBranch(2, 181, 1))
    by_the_clock = 1_790_000_000_000 >> 32
    assert by_the_clock > 2
    assert common_end([(1, 0), (418, 188)], recorded, settled=by_the_clock) == 181
    assert common_end([(1, 0), (2, 181), (418, 190)], recorded, settled=by_the_clock) == 190


def test_a_list_that_was_lost_is_made_of_what_the_store_knows() -> None:
    own = [(3, 0), (5, 50), (7, 90)]
    found = merged_branches((), own)
    assert found == (EpochBranch(3, 0, 0), EpochBranch(5, 50, 3), EpochBranch(7, 90, 5))
    later = with_branches(found, [*own, (9, 120)])
    assert common_end([(3, 0), (4, 50), (10, 70)], later, settled=4) == 50
    assert merged_branches(found, own) == found


def test_what_was_seen_is_kept_and_what_the_store_has_since_is_added() -> None:
    seen = (EpochBranch(3, 0, 0), EpochBranch(4, 40, 3), EpochBranch(5, 50, 3))
    assert merged_branches(seen, [(3, 0), (5, 50), (7, 90)]) == (*seen, EpochBranch(7, 90, 5))
    assert merged_branches(seen, [(3, 0)]) == seen
    assert merged_branches((), []) == ()


def test_what_is_recalled_is_bounded() -> None:
    own = [(number, 10 * number) for number in range(1, BRANCHES_MAX + 5)]
    assert [branch.epoch for branch in merged_branches((), own)] == list(range(5, BRANCHES_MAX + 5))


def test_what_is_recalled_of_a_store_of_very_many_epochs() -> None:
    own = [(number, 10 * number) for number in range(1, EPOCHS_MAX + 1)]
    found = merged_branches((), own)
    assert found[-1] == EpochBranch(EPOCHS_MAX, 10 * EPOCHS_MAX, EPOCHS_MAX - 1)
    assert len(found) == BRANCHES_MAX


RISING = st.lists(st.integers(1, 60), unique=True, max_size=40).map(sorted)


@given(RISING, RISING)
def test_what_is_recalled_is_as_if_each_epoch_had_been_recorded_when_it_began(
    others: list[int], own: list[int]
) -> None:
    seen: EpochBranches = ()
    for number in others:
        seen = with_branches(seen, [(number, number)])
    epochs = [(number, 10 * number) for number in own]
    later = [count for count, number in enumerate(own, 1) if number > max(others, default=0)]
    expected = seen
    for count in later:
        expected = with_branches(expected, epochs[:count])
    assert merged_branches(seen, epochs) == expected


# --- against logs ---------------------------------------------------------------------------------


@dataclass
class Log:
    """Bytes as (epoch, place); the first of an epoch that raised says from where on."""

    content: list[tuple[int, int]] = field(default_factory=list)
    raises: dict[int, int] = field(default_factory=dict)  # by epoch; of those in the content

    def epochs(self) -> list[tuple[int, int]]:
        starts = groupby(enumerate(self.content), key=lambda entry: entry[1][0])
        return [(epoch, next(group)[0]) for epoch, group in starts]

    def cut(self, end: int) -> Log:
        content = self.content[:end]
        left = {epoch for epoch, _ in content}
        return Log(content, {e: start for e, start in self.raises.items() if e in left})

    def common(self, other: Log) -> int:
        pairs = zip(self.content, other.content, strict=False)
        return next(
            (place for place, (mine, its) in enumerate(pairs) if mine != its),
            min(len(self.content), len(other.content)),
        )


class Cluster:
    """Members that take over with whatever they have, worse than the election lets them."""

    def __init__(self, members: int) -> None:
        self.logs = [Log() for _ in range(members)]
        self.recorded: EpochBranches = ()
        self.given_out: list[tuple[int, Log]] = []  # an epoch, and all that it ever wrote
        self.epoch = 0

    def take_over(self, member: int, size: int, keeps_secret: bool) -> None:
        """``keeps_secret``: it dies before the lease knows of its epoch, or anybody else."""
        log, self.epoch = self.logs[member], self.epoch + 1
        own = [*log.epochs(), (self.epoch, len(log.content))]
        common = common_end(own, self.recorded, max(log.raises, default=0))
        log.raises[self.epoch] = common
        self.check(log)
        log.content += [(self.epoch, place) for place in range(size)]
        if not keeps_secret:
            self.recorded = with_branches(self.recorded, own)
            self.given_out.append((self.epoch, log.cut(len(log.content))))

    def check(self, log: Log) -> None:
        for epoch, other in self.given_out:
            fence = min(start for later, start in log.raises.items() if later > epoch)
            assert fence <= log.common(other), (epoch, fence)

    def copy(self, member: int, source: int, size: int) -> None:
        log, other = self.logs[member], self.logs[source]
        if member != source:
            self.logs[member] = other.cut(log.common(other) + size)


STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 3), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("copy"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 6)),
)


@given(st.lists(STEPS, max_size=40))
def test_whatever_was_given_out_is_fenced_where_the_logs_part(
    steps: list[tuple[str, int, int, int]],
) -> None:
    cluster = Cluster(4)
    for kind, member, other, last in steps:
        if kind == "take":
            cluster.take_over(member, other, bool(last))
        else:
            cluster.copy(member, other, last)
