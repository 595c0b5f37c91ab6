"""The checkers of consumer groups find every kind of broken promise in a history that was made bad,
and nothing in a good one.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.support.faults.checkers import Held
from tests.support.faults.group_checkers import Group, judge_group
from tests.support.faults.history import (
    Answer,
    Call,
    Disturbance,
    History,
    Outcome,
    Queue,
    Recorder,
    Send,
)

QUEUE: Queue = ("T", 0)
RETRY: Queue = ("%RETRY%g", 0)
COUNT = 5
FIRM = frozenset({"T"})


class Case:
    """A good history of five messages. The second is sent back once, the third until it is dead."""

    def __init__(self, *, orderly: bool = False) -> None:
        names = [f"p/{number}" for number in range(COUNT)]
        self.history = History()
        self.final = {QUEUE: Held(1, names)}
        self.orderly = orderly
        self.dead = ["p/2"]
        for number, name in enumerate(names):
            send = Send(name, QUEUE, 1.0, 2.0, Outcome.OK, number, 100 * number)
            self.history.sends[name] = send
        later, at_s = Answer.LATER, 10.0
        for number in range(COUNT):
            tries = {1: 1, 2: 2}.get(number, 0)
            for nth in range(tries + (number != 2)):
                answer = later if nth < tries else Answer.DONE
                comes_again = nth > 0 and not orderly
                queue = RETRY if comes_again else QUEUE
                offset = 10 * number + nth if comes_again else number
                self.call(number, at_s, queue, offset, 0 if orderly else nth, answer)
                at_s += 1.0
            if number == 2 and not orderly:
                self.call(number, at_s, RETRY, 29, 2, later)
                at_s += 1.0

    def call(
        self,
        number: int,
        at_s: float,
        queue: Queue = QUEUE,
        offset: int | None = None,
        tries: int = 0,
        answer: Answer | None = Answer.DONE,
        client: str = "a",
    ) -> Call:
        ended_s = inf if answer is None else at_s + 0.5
        place = number if offset is None else offset
        call = Call("g", client, queue, place, f"p/{number}", tries, at_s, ended_s, answer)
        self.history.calls[f"{client}/{len(self.history.calls)}"] = call
        return call

    def calls(self, number: int) -> list[Call]:
        return [c for c in self.history.calls.values() if c.message == f"p/{number}"]

    def drop(self, number: int) -> None:
        """No listener gets this message."""
        self.history.calls = {
            name: call for name, call in self.history.calls.items() if call.message != f"p/{number}"
        }

    def disturb(self, began_s: float, ended_s: float) -> None:
        self.history.disturbances.append(Disturbance("fault", began_s, ended_s))

    def broken(self, firm: frozenset[str] = FIRM) -> dict[str, int]:
        calls = sorted(self.history.calls.items(), key=lambda item: item[1].began_s)
        self.history.calls = dict(calls)
        group = Group("g", FIRM, self.dead, 2, self.orderly)
        verdict = judge_group(self.history, self.final, firm, group)
        kinds = [finding.partition(": ")[2].partition(":")[0] for finding in verdict.broken]
        return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("orderly", [False, True])
def test_a_good_history_breaks_nothing(orderly: bool) -> None:
    assert Case(orderly=orderly).broken() == {}


def test_what_no_listener_has_done_is_lost() -> None:
    case = Case()
    case.drop(4)
    assert case.broken() == {"acknowledged and never done": 1}
    assert case.broken(firm=frozenset()) == {}  # the topic may have lost it, and the group with it
    case.history.sends["p/4"].outcome = Outcome.UNKNOWN
    assert case.broken() == {}


def test_what_was_to_come_again_and_never_came_is_lost() -> None:
    case = Case()
    case.calls(1)[-1].answer = Answer.LATER
    assert case.broken()["acknowledged and never done"] == 1
    case = Case()
    case.dead = []
    assert case.broken() == {"acknowledged and never done": 1}


def test_a_message_that_nobody_sent() -> None:
    case = Case()
    case.call(9, 30.0)
    assert case.broken()["from nowhere"] == 1
    case = Case()
    case.history.sends["p/4"].outcome = Outcome.REFUSED
    assert case.broken() == {"from nowhere": 1}


def test_a_dead_letter_that_nobody_gave_up() -> None:
    case = Case()
    case.dead = ["p/2", "p/1"]
    assert case.broken() == {"from nowhere": 1}


def test_one_place_and_two_messages() -> None:
    case = Case()
    case.call(3, 30.0, QUEUE, 4)
    case.disturb(29.0, 29.5)
    assert case.broken() == {"places with two messages": 1}


@pytest.mark.parametrize(("began_s", "broken"), [(20.0, {}), (-100.0, 1)])
def test_a_duplicate_needs_a_cause(began_s: float, broken: int | dict[str, int]) -> None:
    case = Case()
    case.call(3, 30.0, client="b")
    case.disturb(began_s, began_s + 1.0)
    expected = {"duplicates without a cause": broken} if isinstance(broken, int) else broken
    assert case.broken() == expected


def test_what_was_sent_back_comes_from_the_retry_topic_only() -> None:
    case = Case()
    case.call(1, 11.5, answer=Answer.LATER)
    assert case.broken() == {"duplicates without a cause": 1}


def test_a_dead_letter_is_there_once() -> None:
    case = Case()
    case.dead = ["p/2", "p/2"]
    assert case.broken() == {"dead letters twice": 1}


def test_a_message_is_not_seen_in_time() -> None:
    case = Case()
    [call] = case.calls(4)
    call.began_s, call.ended_s = 80.0, 81.0
    assert case.broken() == {"seen too late": 1}
    case.disturb(3.0, 40.0)
    assert case.broken() == {}


def test_order_of_a_queue() -> None:
    case = Case(orderly=True)
    [third], [last] = case.calls(3), case.calls(4)
    third.began_s, last.began_s = last.began_s, third.began_s
    third.ended_s, last.ended_s = last.ended_s, third.ended_s
    case.disturb(0.0, 50.0)  # no fault is an excuse
    assert case.broken() == {"out of order": 1}


def test_a_message_passes_one_that_is_to_come_again() -> None:
    case = Case(orderly=True)
    again = case.calls(1)[-1]
    again.began_s, again.ended_s = 60.0, 60.5
    assert case.broken()["out of order"] == 2  # so it passes that one, which was behind it


@pytest.mark.parametrize(("ended_s", "broken"), [(12.0, 2), (16.3, 0)])
def test_two_owners_of_a_queue(ended_s: float, broken: int) -> None:
    case = Case(orderly=True)
    first, second = case.calls(3)[0], case.calls(4)[0]
    first.ended_s = second.began_s + 0.2
    second.client = "b"
    case.call(3, second.began_s - 0.5, client="b")  # so that the order is kept
    case.disturb(0.0, ended_s)
    assert case.broken().get("two owners", 0) == broken


def test_calls_are_written_and_read(tmp_path: Path) -> None:
    with Recorder(tmp_path / "one") as recorder:
        recorder.call("a/0", "g", "a", QUEUE, 7, "p/1", 1)
        recorder.called("a/0", Answer.LATER)
        recorder.call("a/1", "g", "a", QUEUE, 8, "p/2", 0)
    first, second = History.read([tmp_path / "one"]).calls.values()
    assert (first.group, first.client, first.queue, first.offset) == ("g", "a", QUEUE, 7)
    assert (first.message, first.tries, first.answer) == ("p/1", 1, Answer.LATER)
    assert first.began_s <= first.ended_s < second.ended_s == inf
    assert second.answer is None
