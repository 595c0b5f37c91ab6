"""Held pulls against a naive model: every hold is answered once, in time, and woken with cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cometmq.errors import InvalidRequest, LimitExceeded
from cometmq.messaging.inline_messages import WANTED_ARRIVALS
from services.pullhold.holds import EMPTY_PULLS_MAX, PASSED_S_MAX, STALE_MAX, TAKE_S, Holds
from services.pullhold.model import (
    ClusterQueue,
    Due,
    Hold,
    HoldLimits,
    HoldSpec,
    HoldState,
    Queue,
    Session,
)

A0, A1, B0 = ClusterQueue("a", "t", 0), ClusterQueue("a", "t", 1), ClusterQueue("b", "t", 0)
ANY: frozenset[int] = frozenset()
RED, BLUE = frozenset({1}), frozenset({2})
GRACE_S = 1.0


def want(
    key: ClusterQueue = A0,
    offset: int = 0,
    *,
    generation: int = 0,
    codes: frozenset[int] = ANY,
    hold_s: float = 15.0,
    answers_max: int = 1,
    arrival_group: str = "",
    return_number: int = 0,
) -> HoldSpec:
    return HoldSpec(
        key,
        generation,
        offset,
        codes,
        hold_s,
        answers_max=answers_max,
        arrival_group=arrival_group,
        return_number=return_number,
    )


def holds_with(*keys: ClusterQueue, maximum: int = 0, limits: HoldLimits | None = None) -> Holds:
    """Holds that know these queues, of generation 1."""
    holds = Holds(limits or HoldLimits(), grace_s=GRACE_S)
    session = holds.open("setup")
    for number, key in enumerate(keys):
        hold = holds.park(session, number, want(key), 0.0)
        holds.observe_arrival(key, 1, maximum, ANY, 0.0)
        holds.end(hold, 0.0)
    holds.close(session, 0.0)
    return holds


def park(holds: Holds, a_want: HoldSpec, now_s: float = 0.0, client: str = "c") -> Hold:
    return holds.park(holds.open(client), 1, a_want, now_s)


# --- waking ---------------------------------------------------------------------------------------


def test_parks_what_is_at_the_maximum_and_wakes_above_it() -> None:
    holds = holds_with(A0, maximum=5)
    waiting, ready = park(holds, want(offset=5)), park(holds, want(offset=4))
    assert (waiting.state, ready.state) == (HoldState.WAITING, HoldState.PULLING)
    assert holds.observe_arrival(A0, 1, 6, ANY, 0.0) == [waiting]
    assert waiting.state is HoldState.PULLING


def test_wakes_in_order_of_parking_and_only_the_queue_that_moved() -> None:
    holds = holds_with(A0, A1)
    first, other, second = (park(holds, want(key)) for key in (A0, A1, A0))
    assert holds.observe_arrival(A0, 1, 1, ANY, 0.0) == [first, second]
    assert other.state is HoldState.WAITING


def test_each_32_messages_wake_one_hold_of_a_group_that_receives() -> None:
    holds = holds_with(A0, maximum=5)
    of_g = [park(holds, want(offset=5, arrival_group="G")) for _ in range(4)]
    of_h = park(holds, want(offset=5, arrival_group="H"))
    red = park(holds, want(offset=5, codes=RED, arrival_group="R"))
    assert holds.observe_arrival(A0, 1, 6, BLUE, 0.0) == [of_g[0], of_h]
    assert red.deadline_s == 15.0, "nothing is committed for what it passes"
    holds.validate()
    assert holds.observe_arrival(A0, 1, 6 + 33, RED, 0.0) == [of_g[1], of_g[2], red]
    holds.validate()
    assert of_g[3].state is HoldState.IN_LINE
    assert holds.observe_arrival(A0, 2, 3, ANY, 0.0) == [of_g[3]]


def test_messages_that_come_back_wake_one_hold_of_their_group_for_each_32() -> None:
    holds = holds_with(A0, A1)
    of_g = [park(holds, want(arrival_group="G")) for _ in range(4)]
    others = [park(holds, want(arrival_group="H")), park(holds, want())]
    others.append(park(holds, want(A1, arrival_group="G")))
    assert holds.observe_return(A0, "G", 7, 33, 0.0) == of_g[:2]
    assert holds.observe_return(A0, "G", 7, 33, 0.0) == [], "told again"
    holds.validate()
    assert holds.observe_return(A0, "G", 8, 1 << 32, 0.0) == of_g[2:]
    assert {hold.state for hold in others} == {HoldState.WAITING}
    assert holds.observe_return(B0, "G", 9, 1, 0.0) == [], "nobody waits there"


def test_who_looked_before_the_newest_return_looks_again() -> None:
    holds = holds_with(A0)
    holds.observe_return(A0, "G", 7, 1, 0.0)
    early = park(holds, want(arrival_group="G", return_number=6))
    late = park(holds, want(arrival_group="G", return_number=7))
    other = park(holds, want(arrival_group="H"))
    assert (early.state, late.state) == (HoldState.PULLING, HoldState.WAITING)
    assert other.state is HoldState.WAITING


def test_a_return_while_the_watch_was_broken_is_told_by_the_next_one() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(arrival_group="G", return_number=7))
    holds.lose_watch("a", 0.0)
    assert holds.observe_arrival(A0, 1, 0, ANY, 0.0) == []
    assert holds.observe_return(A0, "G", 7, 1, 0.0) == [], "it knows"
    holds.lose_watch("a", 0.0)
    holds.observe_arrival(A0, 1, 0, ANY, 0.0)
    assert holds.observe_return(A0, "G", 8, 1, 0.0) == [hold]


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_next_member_wakes_when_the_one_before_has_not_taken_what_came(
    comes_back: bool,
) -> None:
    holds = holds_with(A0, maximum=5)
    of_g = [park(holds, want(offset=5, arrival_group="G")) for _ in range(4)]
    of_h = park(holds, want(offset=5, arrival_group="H"))
    if comes_back:
        woken = holds.observe_return(A0, "G", 7, 1, 1.0)
    else:
        woken = holds.observe_arrival(A0, 1, 6, ANY, 1.0)
        assert woken.pop() is of_h
    assert woken == [of_g[0]]
    holds.end(of_g[0], 1.0)  # it is answered, and its member dies
    holds.validate()
    assert list(holds.due(0.9 + TAKE_S)) == []
    assert list(holds.due(1.0 + TAKE_S)) == [(of_g[1], Due.UNTAKEN)]
    holds.validate()
    assert list(holds.due(1.0 + 2 * TAKE_S)) == [(of_g[2], Due.UNTAKEN)]
    # This one has found nothing more, and waits again.
    offset = holds.queues.known(A0)[1]
    again = park(holds, want(offset=offset, arrival_group="G", return_number=7), 1.0 + 2 * TAKE_S)
    assert (again.state, of_g[3].state) == (HoldState.WAITING, HoldState.WAITING)
    holds.validate()
    assert list(holds.due(14.0)) == []


def test_a_member_in_line_whose_time_is_over_looks_for_itself() -> None:
    """Its answer names the place up to which it has looked, and not where others were woken."""
    holds = holds_with(A0, maximum=5)
    first = park(holds, want(offset=5, arrival_group="G"))
    second = park(holds, want(offset=5, arrival_group="G", hold_s=0.5))
    assert holds.observe_arrival(A0, 1, 6, ANY, 0.0) == [first]
    assert list(holds.due(0.5)) == [(second, Due.DEADLINE)]
    assert (second.offset, second.return_number) == (5, 0)


def test_members_in_line_wait_for_the_next_watch_when_theirs_broke() -> None:
    holds = holds_with(A0)
    of_g = [park(holds, want(arrival_group="G")) for _ in range(3)]
    assert holds.observe_return(A0, "G", 7, 1, 0.0) == of_g[:1]
    holds.lose_watch("a", 0.0)
    holds.validate()
    assert list(holds.due(0.5)) == []
    assert holds.observe_arrival(A0, 1, 0, ANY, 0.5) == []
    assert holds.observe_return(A0, "G", 7, 1, 0.5) == of_g[1:2]
    holds.validate()
    assert list(holds.due(0.5 + TAKE_S)) == [(of_g[2], Due.UNTAKEN)]


def test_tags_that_nobody_wants_move_the_hold_on_without_a_pull() -> None:
    holds = holds_with(A0)
    red = park(holds, want(codes=RED))
    everything = park(holds, want())
    assert holds.observe_arrival(A0, 1, 3, BLUE, 0.0) == [everything]
    assert (red.state, red.offset) == (HoldState.WAITING, 3)
    assert holds.observe_arrival(A0, 1, 4, ANY, 0.0) == [red]


def test_a_hold_that_passed_messages_is_answered_soon_so_that_its_group_commits() -> None:
    holds = holds_with(A0, A1)
    by_tags, by_pull = park(holds, want(codes=RED)), park(holds, want(A1, codes=RED))
    holds.observe_arrival(A0, 1, 3, BLUE, 1.0)
    assert holds.observe_arrival(A1, 1, 3, ANY, 1.0) == [by_pull]
    holds.pulled(by_pull, 1, 3, 1.0)
    # The time counts from the first message passed.
    holds.observe_arrival(A0, 1, 4, frozenset({9}), 2.0)
    assert list(holds.due(1.0 + PASSED_S_MAX)) == [(by_tags, Due.DEADLINE), (by_pull, Due.DEADLINE)]
    assert (by_tags.offset, by_pull.offset) == (4, 3)


def test_an_unknown_queue_wakes_nobody_until_it_is_told() -> None:
    holds = Holds(HoldLimits(), grace_s=GRACE_S)
    hold = park(holds, want(offset=2))
    assert hold.state is HoldState.WAITING
    assert holds.observe_arrival(A0, 1, 3, RED, 0.0) == [hold]


def test_the_first_telling_does_not_speak_of_all_tags() -> None:
    holds = Holds(HoldLimits(), grace_s=GRACE_S)
    hold = park(holds, want(codes=RED))
    assert holds.observe_arrival(A0, 1, 3, BLUE, 0.0) == [hold]


def test_another_generation_wakes_all() -> None:
    holds = holds_with(A0, maximum=9)
    same, untracked = park(holds, want(offset=9, generation=1)), park(holds, want(offset=9))
    assert holds.observe_arrival(A0, 2, 0, ANY, 0.0) == [same, untracked]


def test_a_position_of_another_generation_is_for_the_broker_to_decide() -> None:
    holds = holds_with(A0, maximum=9)
    assert park(holds, want(offset=9, generation=7)).state is HoldState.PULLING


def test_an_old_status_changes_nothing() -> None:
    holds = holds_with(A0, maximum=5)
    park(holds, want(offset=5))
    assert holds.observe_arrival(A0, 1, 4, ANY, 0.0) == []
    assert holds.queues.known(A0)[1] == 5


def test_a_forgotten_queue_is_told_in_vain() -> None:
    holds = holds_with(A0)
    assert holds.queues.drop_idle("a", 10.0, 1.0) == [A0]
    assert holds.observe_arrival(A0, 1, 1, ANY, 0.0) == []
    assert holds.queues.find(A0) is None


# --- after a pull ---------------------------------------------------------------------------------


def test_a_pull_that_found_nothing_parks_again_at_its_position() -> None:
    holds = holds_with(A0, maximum=5)
    hold = park(holds, want(codes=RED))
    assert holds.pulled(hold, 1, 5, 0.0) is HoldState.WAITING
    assert (hold.generation, hold.offset) == (1, 5)
    assert holds.observe_arrival(A0, 1, 6, ANY, 0.0) == [hold]


def test_what_came_during_the_pull_is_pulled_at_once() -> None:
    holds = holds_with(A0, maximum=5)
    hold = park(holds, want())
    assert holds.observe_arrival(A0, 1, 7, ANY, 0.0) == []
    assert holds.pulled(hold, 1, 5, 0.0) is HoldState.PULLING


def test_a_newer_generation_than_the_watch_told_of_waits_for_the_watch() -> None:
    holds = holds_with(A0, maximum=5)
    hold = park(holds, want())
    assert holds.pulled(hold, 2, 0, 0.0) is HoldState.WAITING
    assert holds.observe_arrival(A0, 2, 0, ANY, 0.0) == [hold]


def test_a_broker_that_denies_what_it_told_is_not_asked_for_ever() -> None:
    holds = holds_with(A0, maximum=5)
    hold = park(holds, want())
    states = [holds.pulled(hold, 1, 0, 0.0) for _ in range(EMPTY_PULLS_MAX)]
    assert states == [*[HoldState.PULLING] * (EMPTY_PULLS_MAX - 1), HoldState.DONE]


# --- time -----------------------------------------------------------------------------------------


def test_the_deadline_ends_a_hold_whatever_it_does() -> None:
    holds = holds_with(A0, maximum=1)
    waiting, pulling = park(holds, want(offset=1)), park(holds, want(hold_s=1))
    assert holds.next_due_s() is not None
    assert list(holds.due(0.99)) == []
    assert list(holds.due(1.0)) == [(pulling, Due.DEADLINE)]
    assert list(holds.due(20.0)) == [(waiting, Due.DEADLINE)]
    assert (len(holds), holds.next_due_s()) == (0, None)


def test_a_hold_that_goes_on_has_its_whole_time_again() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(answers_max=3, hold_s=10))
    assert holds.observe_arrival(A0, 1, 1, ANY, 4.0) == [hold]
    holds.go_on(hold, 1, 1, 4.0)
    assert (hold.state, hold.offset) == (HoldState.WAITING, 1)
    assert list(holds.due(10.0)) == []
    holds.validate()
    assert list(holds.due(14.0)) == [(hold, Due.DEADLINE)]


def test_a_hold_that_goes_on_pulls_what_came_meanwhile() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(answers_max=2))
    assert holds.observe_arrival(A0, 1, 1, ANY, 0.0) == [hold]
    holds.observe_arrival(A0, 1, 2, ANY, 0.0)
    holds.go_on(hold, 1, 1, 0.0)
    assert hold.state is HoldState.PULLING
    with pytest.raises(AssertionError):
        holds.go_on(hold, 1, 2, 0.0)


def test_an_unreachable_broker_is_told_of_after_the_grace_time() -> None:
    holds = holds_with(A0, B0)
    lost, other = park(holds, want(A0)), park(holds, want(B0))
    holds.lose_watch("a", 3.0)
    assert list(holds.due(3.9)) == []
    assert list(holds.due(4.0)) == [(lost, Due.UNREACHABLE)]
    assert other.state is HoldState.WAITING
    late = park(holds, want(A0), 10.0)
    assert list(holds.due(10.0)) == [(late, Due.UNREACHABLE)]


def test_a_broker_that_is_back_in_time_keeps_its_holds() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(A0))
    holds.lose_watch("a", 3.0)
    assert holds.observe_arrival(A0, 1, 0, ANY, 0.0) == []
    assert list(holds.due(10.0)) == []
    assert hold.state is HoldState.WAITING


def test_each_loss_of_a_broker_has_its_own_grace_time() -> None:
    holds = holds_with(A0)
    hold = park(holds, want())
    holds.lose_watch("a", 0.0)
    holds.observe_arrival(A0, 1, 0, ANY, 0.5)
    holds.lose_watch("a", 0.9)
    assert list(holds.due(1.5)) == []
    holds.validate()
    assert list(holds.due(1.9)) == [(hold, Due.UNREACHABLE)]


def test_a_hold_taken_back_is_due_no_more() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(hold_s=1))
    assert holds.end(hold, 0.5)
    assert not holds.end(hold, 0.6)
    assert list(holds.due(2.0)) == []


def test_the_deadlines_of_ended_holds_do_not_pile_up() -> None:
    holds = holds_with(A0)
    for _ in range(10_000):
        holds.end(park(holds, want()), 0.0)
    assert len(holds._deadlines) < 2_000


# --- ends -----------------------------------------------------------------------------------------


def test_the_deadlines_of_holds_that_pass_messages_and_go_on_do_not_pile_up() -> None:
    holds = holds_with(A0)
    count = STALE_MAX
    for _ in range(count):
        park(holds, want(codes=RED, answers_max=64), 0.0, client="many")
    maximum = 0
    for turn in range(60):
        now_s = turn / 100
        maximum += 1
        assert not holds.observe_arrival(A0, 1, maximum, BLUE, now_s)
        maximum += 1
        for hold in holds.observe_arrival(A0, 1, maximum, RED, now_s):
            holds.go_on(hold, 1, maximum, now_s)
        assert len(holds._deadlines) <= 2 * count + STALE_MAX
    holds.validate()
    assert len(list(holds.due(15.5))) == 0
    assert len(list(holds.due(15.6))) == count


def test_a_queue_that_is_gone_ends_its_holds() -> None:
    holds = holds_with(A0, A1)
    hold, other = park(holds, want(A0)), park(holds, want(A1))
    assert holds.end_queue(A0, 0.0) == [hold]
    assert (hold.state, other.state) == (HoldState.DONE, HoldState.WAITING)
    assert holds.queues.find(A0) is None
    assert holds.end_queue(A0, 0.0) == []


def test_a_call_that_is_over_takes_its_holds_along() -> None:
    holds = holds_with(A0)
    session = holds.open("c")
    hold = holds.park(session, 1, want(), 0.0)
    holds.close(session, 0.0)
    assert (len(holds), len(holds.clients), hold.state) == (0, 0, HoldState.DONE)


def test_drain_ends_all() -> None:
    holds = holds_with(A0)
    every = [park(holds, want()), park(holds, want(B0))]
    assert holds.drain(0.0) == every
    assert len(holds) == 0


# --- limits ---------------------------------------------------------------------------------------


def refused(holds: Holds, session: Session, hold_id: int) -> bool:
    try:
        holds.park(session, hold_id, want(), 0.0)
    except LimitExceeded:
        return True
    return False


def test_limits_are_exact_and_free_what_ended() -> None:
    limits = HoldLimits(holds_max=4, holds_per_client_max=3, holds_per_stream_max=2, clients_max=2)
    holds = Holds(limits)
    one, same, other = holds.open("c"), holds.open("c"), holds.open("d")
    assert [refused(holds, one, n) for n in range(3)] == [False, False, True]
    assert [refused(holds, same, n) for n in range(2)] == [False, True]
    assert [refused(holds, other, n) for n in range(2)] == [False, True]
    holds.end(one.holds[0], 0.0)
    assert not refused(holds, one, 7)
    with pytest.raises(LimitExceeded):
        holds.open("e")
    holds.close(other, 0.0)
    holds.open("e")


def test_one_address_has_its_share_whatever_its_connections() -> None:
    holds = Holds(HoldLimits(holds_per_peer_max=2, streams_per_peer_max=2))
    one, same = holds.open("ipv4:10.0.0.1:1"), holds.open("ipv4:10.0.0.1:2")
    other = holds.open("ipv4:10.0.0.2:1")
    with pytest.raises(LimitExceeded, match="streams_per_peer_max"):
        holds.open("ipv4:10.0.0.1:3")
    assert [refused(holds, session, 1) for session in (one, same)] == [False, False]
    assert refused(holds, one, 2)
    assert not refused(holds, other, 1)
    holds.end(same.holds[1], 0.0)
    assert not refused(holds, one, 2)
    holds.close(same, 0.0)
    holds.open("ipv4:10.0.0.1:3")
    holds.validate()


def test_no_more_queues_are_waited_for_than_a_broker_tells_of() -> None:
    holds = holds_with(A0, limits=HoldLimits(queues_per_broker_max=1))
    park(holds, want(A0))
    park(holds, want(B0))
    with pytest.raises(LimitExceeded):
        park(holds, want(A1))


def test_a_number_is_held_once_at_a_time() -> None:
    holds = holds_with(A0)
    session = holds.open("c")
    hold = holds.park(session, 1, want(), 0.0)
    with pytest.raises(InvalidRequest):
        holds.park(session, 1, want(), 0.0)
    holds.end(hold, 0.0)
    holds.park(session, 1, want(), 0.0)


# --- queues ---------------------------------------------------------------------------------------


def test_queues_stay_watched_a_little_longer_than_they_are_waited_for() -> None:
    holds = holds_with(A0)
    hold = park(holds, want(), 5.0)
    assert holds.queues.drop_idle("a", 100.0, 1.0) == []
    holds.end(hold, 100.0)
    assert holds.queues.drop_idle("a", 100.9, 1.0) == []
    assert holds.queues.drop_idle("a", 101.0, 1.0) == [A0]
    assert holds.queues.of("a") == {}


def test_the_safety_check_asks_about_what_is_waited_for_and_known() -> None:
    holds = holds_with(A0, A1, maximum=3)
    park(holds, want(A0, 3))
    park(holds, want(B0))
    assert holds.queues.waited_for("a") == [A0]
    assert holds.queues.waited_for("b") == []
    assert holds.queues.behind(A0, 1, 4)
    assert holds.queues.behind(A0, 2, 0)
    assert not holds.queues.behind(A0, 1, 3)
    assert not holds.queues.behind(A1, 1, 9)


def test_a_broker_is_asked_for_messages_seldom_and_before_they_end() -> None:
    holds = holds_with(A0)
    queue = holds.queues[A0]
    coming, asked = 0, 0
    for maximum in range(1, 101):
        if queue.want_inline():
            asked, coming = asked + 1, WANTED_ARRIVALS
        assert coming > 0, "somebody waits, and the arrival comes without its messages"
        holds.observe_arrival(A0, 1, maximum, ANY, 0.0)
        coming -= 1
    assert asked == 1 + 99 // (WANTED_ARRIVALS // 2)


def test_after_its_watch_broke_a_queue_is_asked_for_again() -> None:
    holds = holds_with(A0)
    queue = holds.queues[A0]
    assert [queue.want_inline(), queue.want_inline()] == [True, False]
    holds.lose_watch("a", 1.0)
    assert queue.want_inline()


# --- against a model ------------------------------------------------------------------------------


@dataclass
class Truth:
    """A queue as it is at its broker: the tag of each message."""

    generation: int = 1
    tags: list[int] = field(default_factory=list)
    told: int | None = None  # how many the watch has told of; None: nothing

    def has(self, hold: Hold) -> bool:
        """Whether a pull finds something for the hold, read message by message."""
        return any(tag in hold.codes or not hold.codes for tag in self.tags[hold.offset :])


class HoldsMachine(RuleBasedStateMachine):
    """A broker with three queues, clients, a clock. The model keeps every message and asks it."""

    live = Bundle("live")
    keys = st.sampled_from([A0, A1, B0])

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds(HoldLimits(holds_max=30), grace_s=GRACE_S)
        self.session = self.holds.open("c")
        self.truth = {key: Truth() for key in (A0, A1, B0)}
        self.now_s = 0.0
        self.numbers = 0
        self.looks_s: float | None = None  # when the service looks by itself; None: never
        self.holds.at_sooner(self.look_sooner)
        self.parked: set[Hold] = set()  # not answered yet
        self.pulling: set[Hold] = set()

    def look_sooner(self) -> None:
        self.looks_s = 0.0

    def answered(self, hold: Hold) -> None:
        self.parked.remove(hold)  # KeyError: answered twice
        self.pulling.discard(hold)

    @rule(
        target=live,
        key=keys,
        back=st.integers(0, 3),
        codes=st.frozensets(st.integers(1, 3), max_size=2),
        hold_s=st.floats(0.1, 9.0),
        answers_max=st.integers(1, 3),
    )
    def park(
        self,
        key: ClusterQueue,
        back: int,
        codes: frozenset[int],
        hold_s: float,
        answers_max: int,
    ) -> Hold:
        truth = self.truth[key]
        offset = max(0, len(truth.tags) - back)
        self.numbers += 1
        a_want = want(
            key,
            offset,
            generation=truth.generation,
            codes=codes,
            hold_s=hold_s,
            answers_max=answers_max,
        )
        try:
            hold = self.holds.park(self.session, self.numbers, a_want, self.now_s)
        except LimitExceeded:
            assert len(self.parked) == 30
            return Hold(self.session, -1, a_want, Queue(self.now_s), self.now_s)
        self.parked.add(hold)
        if hold.state is HoldState.PULLING:
            self.woken(hold)
        return hold

    def woken(self, hold: Hold) -> None:
        assert hold not in self.pulling
        truth = self.truth[hold.key]
        assert truth.told is not None
        beyond = hold.is_above((truth.generation, truth.told))  # only the broker can tell
        there = truth.generation != hold.generation or truth.told > hold.offset
        assert there or beyond, "without a cause"
        self.pulling.add(hold)

    @rule(key=keys, tags=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def append(self, key: ClusterQueue, tags: list[int]) -> None:
        self.truth[key].tags += tags

    @rule(key=keys, exact=st.booleans())
    def tell(self, key: ClusterQueue, exact: bool) -> None:
        truth = self.truth[key]
        if not self.holds.queues.find(key) or truth.told == len(truth.tags):
            return
        known = exact and truth.told is not None
        codes = frozenset(truth.tags[truth.told or 0 :]) if known else ANY
        truth.told = len(truth.tags)
        waiting = {h for h in self.parked - self.pulling if h.key == key}
        woken = self.holds.observe_arrival(key, truth.generation, truth.told, codes, self.now_s)
        for hold in woken:
            self.woken(hold)
        if known:  # then exactly those whose tags came
            assert {h for h in waiting if h in woken} >= {h for h in waiting if truth.has(h)}
            assert all(truth.has(h) or truth.generation != h.generation for h in woken)

    @rule(key=keys)
    def create_again(self, key: ClusterQueue) -> None:
        self.truth[key] = Truth(self.truth[key].generation + 1)
        if self.holds.queues.find(key):
            self.truth[key].told = 0
            for hold in self.holds.observe_arrival(
                key, self.truth[key].generation, 0, ANY, self.now_s
            ):
                self.woken(hold)

    @rule(hold=live, scan=st.integers(1, 3))
    def pull(self, hold: Hold, scan: int) -> None:
        """The broker looks at most at ``scan`` messages."""
        if hold not in self.pulling:
            return
        truth = self.truth[hold.key]
        seen = truth.tags[hold.offset : hold.offset + scan]
        found = any(not hold.codes or tag in hold.codes for tag in seen)
        if found and hold.answers_left > 1:
            self.pulling.discard(hold)
            self.holds.go_on(hold, truth.generation, hold.offset + len(seen), self.now_s)
            if hold.state is HoldState.PULLING:
                self.woken(hold)
            return
        if found or hold.generation != truth.generation or hold.offset > len(truth.tags):
            assert self.holds.end(hold, self.now_s)
            self.answered(hold)
            return
        state = self.holds.pulled(hold, truth.generation, hold.offset + len(seen), self.now_s)
        if state is HoldState.DONE:
            raise AssertionError("this broker never denies what it told")
        if state is HoldState.WAITING:
            self.pulling.discard(hold)

    @rule(hold=consumes(live))
    def cancel(self, hold: Hold) -> None:
        if self.holds.end(hold, self.now_s) if hold in self.parked else False:
            self.answered(hold)

    @rule(group=st.sampled_from(["a", "b"]))
    def lose(self, group: str) -> None:
        self.holds.lose_watch(group, self.now_s)
        for key, truth in self.truth.items():
            if key.broker_group == group:
                truth.told = None

    @rule(seconds=st.floats(0.01, 2.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = dict(self.holds.due(self.now_s))
        late = {h for h in self.parked if h.deadline_s <= self.now_s}
        assert late <= due.keys()
        for hold, why in due.items():
            unreachable = hold not in self.pulling and self.truth[hold.key].told is None
            assert hold in late or (why is Due.UNREACHABLE and unreachable)
            self.answered(hold)

    @rule()
    def tend(self) -> None:
        for group in ("a", "b"):
            for key in self.holds.queues.drop_idle(group, self.now_s, 0.5):
                assert not any(h.key == key for h in self.parked)
                self.truth[key].told = None

    @invariant()
    def no_due_hold_is_slept_through(self) -> None:
        """The service sleeps until what was due first when it looked, unless it is woken."""
        due_s = self.holds.next_due_s()
        assert due_s is None or (self.looks_s is not None and self.looks_s <= due_s)
        self.looks_s = due_s

    @invariant()
    def nothing_is_missed(self) -> None:
        """Whatever waits at a queue whose watch has told everything has nothing to find there."""
        self.holds.validate()
        assert len(self.holds) == len(self.parked)
        for hold in self.parked - self.pulling:
            truth = self.truth[hold.key]
            assert hold.state is HoldState.WAITING
            if truth.told == len(truth.tags) and hold.generation == truth.generation:
                assert not truth.has(hold)


TestHolds = HoldsMachine.TestCase


class MembersMachine(RuleBasedStateMachine):
    """Members of a group that receives, in one queue. A member that is woken takes all that there
    is and waits again, or it dies. While one waits that lives, nothing stays there for long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds = holds_with(A0)
        self.session = self.holds.open("c")
        self.now_s = 0.0
        self.numbers = 0
        self.maximum = self.returned = 0
        self.taken = (0, 0)  # up to this offset and this return
        self.dying: set[Hold] = set()
        self.waiting: set[Hold] = set()

    @rule(dies=st.booleans())
    def park(self, dies: bool) -> None:
        """A member looks, takes what there is, and waits; ``dies``: when it wakes."""
        self.taken = self.maximum, self.returned
        self.numbers += 1
        offset, number = self.taken
        a_want = want(offset=offset, hold_s=1e6, arrival_group="G", return_number=number)
        hold = self.holds.park(self.session, self.numbers, a_want, self.now_s)
        assert hold.state is HoldState.WAITING
        self.waiting.add(hold)
        if dies:
            self.dying.add(hold)

    def woken(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            self.holds.end(hold, self.now_s)
            self.waiting.remove(hold)
            if hold not in self.dying:
                self.park(dies=False)

    @rule(count=st.integers(1, 70))
    def arrive(self, count: int) -> None:
        self.maximum += count
        self.woken(self.holds.observe_arrival(A0, 1, self.maximum, ANY, self.now_s))

    @rule(count=st.integers(1, 70))
    def come_back(self, count: int) -> None:
        self.returned += 1
        self.woken(self.holds.observe_return(A0, "G", self.returned, count, self.now_s))

    @rule()
    def cancel(self) -> None:
        if self.waiting:
            hold = min(self.waiting, key=lambda one: one.hold_id)
            self.waiting.remove(hold)
            self.holds.end(hold, self.now_s)

    @rule(seconds=st.floats(0.01, 2.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.woken([hold for hold, _ in self.holds.due(self.now_s)])

    @rule()
    def wait_until_all_had_their_turn(self) -> None:
        for _ in range(len(self.waiting) + 1):
            self.wait(TAKE_S)
        if self.waiting - self.dying:
            assert self.taken == (self.maximum, self.returned)

    @invariant()
    def is_valid(self) -> None:
        self.holds.validate()


TestMembers = MembersMachine.TestCase
