"""The checkers find every kind of broken promise in a history that was made bad, and nothing in a
good one.
"""

from __future__ import annotations

from math import inf

import pytest

from tests.support.faults.checkers import (
    COMMIT_LOSABLE_S,
    HEALING_S,
    RETRIES_S,
    Held,
    Opening,
    differing_epochs,
    gone,
    judge,
    two_writers,
)
from tests.support.faults.extremes import lost_from_disk, reused_generations, revenants
from tests.support.faults.history import (
    Darkness,
    Disturbance,
    History,
    Outcome,
    Place,
    Queue,
    Rebirth,
    Seen,
    Send,
    Step,
)

FIRM, LOOSE = ("firm", 0), ("loose", 0)
COUNT = 6


class Case:
    """A good history of two queues, six messages each, read by *steady* and *pushed*; and what the
    queues hold in the end.
    """

    def __init__(self) -> None:
        self.history = History()
        self.final: dict[Queue, Held] = {}
        for queue in (FIRM, LOOSE):
            names = [f"{queue[0]}/{number}" for number in range(COUNT)]
            self.final[queue] = Held(1, names)
            for number, name in enumerate(names):
                self.send(name, queue, number)
            self.step(queue, Step.BEGAN, (1, 0), 10.0)
            for number, name in enumerate(names):
                self.see(queue, number, name)
                self.see(queue, number, name, reader="pushed", generation=0)
            self.step(queue, Step.COMMITTED, (1, COUNT), 30.0)
            self.step(queue, Step.ASKED, (1, COUNT), 31.0)

    def send(self, name: str, queue: Queue, offset: int, outcome: Outcome = Outcome.OK) -> Send:
        log_offset = 1000 * len(self.history.sends)
        began_s = 10.0 + offset
        send = Send(name, queue, began_s, began_s + 0.5, outcome, offset, log_offset)
        self.history.sends[name] = send
        return send

    def see(
        self,
        queue: Queue,
        offset: int,
        name: str,
        reader: str = "steady",
        generation: int = 1,
        at_s: float = 20.0,
    ) -> None:
        self.history.reads.append(Seen(at_s, reader, queue, generation, offset, name))

    def step(self, queue: Queue, step: Step, spot: tuple[int, int], at_s: float) -> None:
        self.history.reads.append(Place(at_s, "steady", queue, step, spot))

    def disturb(self, began_s: float, ended_s: float) -> None:
        self.history.disturbances.append(Disturbance("fault", began_s, ended_s))

    def hold(self, queue: Queue, *names: str, generation: int = 1) -> None:
        self.final[queue] = Held(generation, names)

    def broken(self) -> dict[str, int]:
        """How many promises of each kind are broken."""
        verdict = judge(self.history, self.final, frozenset({FIRM[0]}))
        kinds = [finding.partition(":")[0] for finding in verdict.broken]
        assert all(verdict.counts[kind] == kinds.count(kind) for kind in kinds)
        return {kind: kinds.count(kind) for kind in kinds}


def names(queue: Queue, *numbers: int) -> list[str]:
    return [f"{queue[0]}/{number}" for number in numbers]


def test_a_good_history_breaks_nothing() -> None:
    case = Case()
    verdict = judge(case.history, case.final, frozenset({FIRM[0]}))
    assert not verdict.broken
    assert verdict.counts["messages sent"] == verdict.counts["sends: ok"] == 2 * COUNT
    assert verdict.counts["deliveries"] == 4 * COUNT
    assert verdict.counts["deliveries repeated"] == verdict.counts["copies stored"] == 0


# --- acknowledged and seen ------------------------------------------------------------------------


U, S, F = Outcome.UNKNOWN, Outcome.STORED, Outcome.FAILED
# What a queue holds in the end, in which generation, what became of the sends of some of its
# messages, whether all were seen, and which promises that breaks.
ENDS = {
    "a lost message": (FIRM, [0, 1, 2, 3, 4], 1, {}, False, {"acknowledged messages lost": 1}),
    "a message that moved": (
        *(FIRM, [0, 1, 3, 2, 4, 5], 1, {}, False),
        {"acknowledged messages lost": 2, "messages out of order": 1},
    ),
    "what is not known to be stored": (FIRM, [0, 1, 2], 1, {3: U, 4: S, 5: F}, False, {}),
    "seen and taken back": (FIRM, [0, 1, 2, 3, 4], 1, {5: U}, True, {"seen and taken back": 2}),
    "taken back in silence": (LOOSE, [0, 1, 2, 3, 4], 1, {}, True, {"seen and taken back": 1}),
    "taken back with a new generation": (LOOSE, [0, 1, 2, 3, 4], 2, {}, True, {}),
    "a refused message that is there": (
        *(FIRM, [*range(COUNT)], 1, {5: F}, True),
        {"messages from nowhere": 3},  # stored, and seen by two
    ),
    "out of order": (LOOSE, [0, 2, 1, 3, 4, 5], 1, {}, False, {"messages out of order": 1}),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_a_queue_holds_in_the_end(
    end: tuple[Queue, list[int], int, dict[int, Outcome], bool, dict[str, int]],
) -> None:
    queue, held, generation, outcomes, seen, found = end
    case = Case()
    if not seen:
        case.history.reads.clear()
    case.hold(queue, *names(queue, *held), generation=generation)
    for number, outcome in outcomes.items():
        case.history.sends[f"{queue[0]}/{number}"].outcome = outcome
    assert case.broken() == found


def test_what_a_loose_topic_loses_is_counted() -> None:
    case = Case()
    case.history.reads = [e for e in case.history.reads if e.queue != LOOSE]
    case.hold(LOOSE, *names(LOOSE, 0, 1, 2, 3))
    verdict = judge(case.history, case.final, frozenset({FIRM[0]}))
    assert verdict.counts["acknowledged messages lost where the mode allows it"] == 2
    assert {finding.partition(":")[0] for finding in verdict.broken} == {"messages never seen"}


# --- from nowhere, twice, out of order ------------------------------------------------------------


def test_a_message_that_nobody_sent() -> None:
    case = Case()
    case.see(FIRM, COUNT, "ghost/1")
    found = case.broken()
    assert found == {"messages from nowhere": 1, "seen and taken back": 1}


def test_a_message_in_another_queue() -> None:
    case = Case()
    case.history.sends["loose/2"].queue = ("loose", 1)
    assert case.broken()["messages from nowhere"] == 3


def test_two_messages_at_one_place_of_a_firm_topic() -> None:
    case = Case()
    case.see(FIRM, 4, "firm/3", reader="pushed", generation=0)
    assert case.broken() == {"places with two messages": 1, "seen and taken back": 1}


@pytest.mark.parametrize(("generation", "count"), [(1, 1), (2, 0)])
def test_two_messages_at_one_place_of_a_loose_topic(generation: int, count: int) -> None:
    case = Case()
    case.hold(LOOSE, *names(LOOSE, 0, 1, 2, 3, 5), generation=generation)
    assert case.broken().get("places with two messages", 0) == count


def test_two_acknowledgements_of_one_place_in_the_log() -> None:
    case = Case()
    sends = case.history.sends
    sends["firm/4"].log_offset = sends["firm/5"].log_offset
    assert case.broken() == {"places acknowledged twice": 1}


@pytest.mark.parametrize(
    ("hasty", "ended_s", "count"), [("loose", 11.0, 0), ("loose", -40.0, 1), ("firm", 11.0, 1)]
)
def test_a_hasty_producers_order_may_change_in_a_fault(
    hasty: str, ended_s: float, count: int
) -> None:
    case = Case()
    case.history.reads.clear()
    case.disturb(-50.0, ended_s)
    case.hold(LOOSE, *names(LOOSE, 0, 2, 1, 3, 4, 5))
    verdict = judge(case.history, case.final, frozenset({FIRM[0]}), frozenset({hasty}))
    assert verdict.counts["messages out of order"] == count


def test_a_late_copy_is_not_out_of_order() -> None:
    case = Case()
    case.disturb(10.0, 11.0)
    case.hold(LOOSE, *names(LOOSE, *range(COUNT), 2))
    assert not case.broken()


@pytest.mark.parametrize(("ended_s", "found"), [(10.0, {"copies without a cause": 1}), (10.1, {})])
def test_copies_need_a_cause(ended_s: float, found: dict[str, int]) -> None:
    case = Case()
    send = case.history.sends["loose/0"]
    send.began_s = 10.05 + RETRIES_S
    send.ended_s = send.began_s + 1
    case.disturb(9.0, ended_s)
    case.hold(LOOSE, *names(LOOSE, *range(COUNT), 0))
    assert case.broken() == found


def test_who_sends_once_has_no_excuse_for_a_copy() -> None:
    case = Case()
    case.disturb(-50.0, 11.0)
    case.hold(LOOSE, *names(LOOSE, *range(COUNT), 2))
    verdict = judge(case.history, case.final, frozenset({FIRM[0]}), single=frozenset({LOOSE[0]}))
    assert verdict.counts["copies without a cause"] == 1


def test_a_refusal_is_counted_and_its_message_must_be_nowhere() -> None:
    case = Case()
    send = case.history.sends["firm/5"]
    send.outcome, send.refusal = Outcome.REFUSED, "SLAVE_NOT_AVAILABLE"
    assert case.broken() == {"messages from nowhere": 3}
    case.history.reads = [e for e in case.history.reads if not _is_of(e, "firm/5")]
    case.hold(FIRM, *names(FIRM, 0, 1, 2, 3, 4))
    verdict = judge(case.history, case.final, frozenset({FIRM[0]}))
    assert verdict.counts["refused: SLAVE_NOT_AVAILABLE"] == 1
    assert not verdict.broken


def _is_of(event: Seen | Place, message: str) -> bool:
    return isinstance(event, Seen) and event.message == message


def test_what_a_full_disk_took_is_not_lost() -> None:
    case = Case()
    case.final[FIRM] = Held(1, names(FIRM, 2, 3, 4, 5), 2)
    assert not case.broken()
    assert list(gone(case.final)) == [f"2 of {FIRM}"]
    case.final[FIRM] = Held(1, names(FIRM, 3, 4, 5), 2)
    assert case.broken()["acknowledged messages lost"] == 4


# --- lives of a topic -----------------------------------------------------------------------------


def reborn(case: Case, at_s: float, generation: int = 2, *held: str) -> Case:
    """The firm topic was made anew, and holds this."""
    case.history.rebirths.append(Rebirth(FIRM[0], at_s, at_s + 1, {FIRM[1]: generation}))
    case.hold(FIRM, *held, generation=generation)
    return case


def in_new_life(case: Case, *offsets: int) -> list[str]:
    """Messages sent, acknowledged and seen after the topic was made anew."""
    found = [f"new/{offset}" for offset in offsets]
    for offset, name in zip(offsets, found, strict=True):
        send = case.send(name, FIRM, offset)
        send.began_s, send.ended_s = 42.0 + offset, 42.5 + offset
        case.see(FIRM, offset, name, reader="pushed", generation=0)
    return found


def test_a_topic_that_was_made_anew_has_lost_nothing() -> None:
    case = Case()
    new = in_new_life(case, 0, 1)
    case.step(FIRM, Step.FENCED, (2, 0), 41.0)
    for offset, name in enumerate(new):
        case.see(FIRM, offset, name, generation=2, at_s=45.0)
    reborn(case, 40.0, 2, *new)
    assert not case.broken()
    assert not list(revenants(case.history, case.final))
    assert not list(reused_generations(case.history))


def test_what_a_new_life_loses_is_lost() -> None:
    case = Case()
    new = in_new_life(case, 0, 1)
    reborn(case, 40.0, 2, *new[:1])
    assert case.broken()["acknowledged messages lost"] == 1


def test_a_message_of_the_former_life_in_the_new_one() -> None:
    case = reborn(Case(), 40.0, 2, "firm/3")
    case.see(FIRM, 0, "firm/4", generation=2)
    found = [finding.partition(" ")[0] for finding in revenants(case.history, case.final)]
    assert found == ["firm/3", "firm/4"]


def test_what_was_not_over_when_its_topic_was_deleted_may_come_later() -> None:
    case = reborn(Case(), 15.2, 2, "firm/5")
    assert not list(revenants(case.history, case.final))


def test_a_generation_that_was_used_before() -> None:
    case = reborn(Case(), 40.0, 1)
    assert (
        len(list(reused_generations(case.history))) == COUNT + 3
    )  # what steady got, and its steps


# --- all power lost -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topics", "on_disk", "at_s", "count"),
    [
        ({"firm"}, 5001, 20.0, 1),
        ({"firm"}, 5000, 20.0, 0),  # in memory alone
        ({"firm"}, 5001, 15.2, 0),  # not acknowledged before
        ({"loose"}, 5001, 20.0, 0),
    ],
)
def test_what_was_on_a_disk_outlives_all_power(
    topics: set[str], on_disk: int, at_s: float, count: int
) -> None:
    case = Case()
    case.hold(FIRM, *names(FIRM, 0, 1, 2, 3, 4))
    case.history.darknesses.append(Darkness(at_s, on_disk))
    assert len(list(lost_from_disk(case.history, case.final, frozenset(topics)))) == count


# --- readers --------------------------------------------------------------------------------------


def only(case: Case, *events: Seen | Place) -> dict[str, int]:
    """What is broken when this is all that *steady* did in the loose queue."""
    case.history.reads = [
        e for e in case.history.reads if (e.reader, e.queue) != ("steady", LOOSE)
    ] + list(events)
    broken = case.broken()
    broken.pop("messages never seen", None)
    return broken


def began(offset: int, generation: int = 1) -> Place:
    return Place(10.0, "steady", LOOSE, Step.BEGAN, (generation, offset))


def fenced(offset: int, generation: int) -> Place:
    return Place(10.0, "steady", LOOSE, Step.FENCED, (generation, offset))


def seen(offset: int, generation: int = 1) -> Seen:
    return Seen(20.0, "steady", LOOSE, generation, offset, f"loose/{offset}")


GOOD_WAYS: dict[str, list[Seen | Place]] = {
    "in order": [began(0), seen(0), seen(1)],
    "from where it had committed": [began(0), seen(0), seen(1), began(1), seen(1), seen(2)],
    "back to a fence": [began(0), seen(0), seen(1), fenced(1, 2), seen(1, 2), seen(2, 2)],
    "a fence right at the end": [began(0), seen(0), fenced(1, 2), seen(1, 2)],
}
BAD_WAYS: dict[str, list[Seen | Place]] = {
    "a skip": [began(0), seen(0), seen(2)],
    "a rewind": [began(0), seen(0), seen(1), seen(1)],
    "a skip at the beginning": [began(1), seen(2)],
    "fenced forward": [began(0), seen(0), fenced(3, 2), seen(3, 2)],
    "fenced within a generation": [began(0), seen(0), seen(1), fenced(1, 1), seen(1)],
}


@pytest.mark.parametrize("way", GOOD_WAYS | BAD_WAYS)
def test_ways_of_a_reader(way: str) -> None:
    broken = {"silent skips and rewinds": 1} if way in BAD_WAYS else {}
    assert only(Case(), *(GOOD_WAYS | BAD_WAYS)[way]) == broken


@pytest.mark.parametrize(("message", "count"), [("firm/3", 1), ("firm/", COUNT)])
def test_messages_that_one_reader_never_saw(message: str, count: int) -> None:
    case = Case()
    case.history.reads = [
        e
        for e in case.history.reads
        if not (isinstance(e, Seen) and e.reader == "pushed" and e.message.startswith(message))
    ]
    assert case.broken() == {"messages never seen": count}


def test_a_committed_offset_that_went_back() -> None:
    case = Case()
    case.step(FIRM, Step.ASKED, (1, COUNT - 1), 32.0)
    assert case.broken() == {"committed offsets gone back": 1}


@pytest.mark.parametrize(
    ("fault", "asked_s", "found"),
    [
        ((0.0, 29.9 - COMMIT_LOSABLE_S), 31.0, 1),  # nothing was wrong in the seconds before
        ((30.1 + COMMIT_LOSABLE_S, inf), 30.2 + COMMIT_LOSABLE_S, 1),  # long after the commit
        ((30.2, 30.4), 31.0, 0),
        ((30.2, 50.0), 52.0, 0),
        ((30.2, 50.0), 50.1 + HEALING_S, 1),
    ],
)
def test_only_a_commit_just_before_a_fault_may_be_lost(
    fault: tuple[float, float], asked_s: float, found: int
) -> None:
    case = Case()
    case.disturb(*fault)
    case.step(FIRM, Step.ASKED, (1, 2), asked_s)
    assert case.broken().get("committed offsets gone back", 0) == found


def test_a_newer_generation_takes_a_commit_back_openly() -> None:
    case = Case()
    case.step(FIRM, Step.ASKED, (2, 1), 32.0)
    assert not case.broken()


# --- members --------------------------------------------------------------------------------------


def test_epochs_rise() -> None:
    assert not list(two_writers([Opening(1, 0), Opening(2, 1), Opening(4, 1)]))


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_was_opened_twice_or_late(epoch: int) -> None:
    assert len(list(two_writers([Opening(2, 0), Opening(epoch, 1)]))) == 1


def test_members_that_tell_different_stories() -> None:
    story = [(1, 0), (2, 500)]
    assert not list(differing_epochs({0: story, 1: list(story), 2: story}))
    assert len(list(differing_epochs({0: story, 1: story[:1], 2: [(1, 0), (2, 400)]}))) == 2
