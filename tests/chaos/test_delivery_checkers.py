"""The checkers of messages that come later find every kind of broken promise in a history that was
made bad, and nothing in a good one.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path

import pytest

from tests.support.faults.checkers import RETRIES_S, Held
from tests.support.faults.delivery_checkers import (
    LATE_S_MAX,
    LEASE_LOST_S,
    Ends,
    judge_deliveries,
)
from tests.support.faults.delivery_history import (
    DeliveryHistory,
    DeliveryRecorder,
    Given,
    Half,
    Place,
    Timed,
)
from tests.support.faults.history import Disturbance, Outcome, Queue, Seen, Send

DUE: Queue = ("due", 0)
SETTLED: Queue = ("settled", 0)
RECEIVED: Queue = ("received", 0)
DUE_MS = 1_000_000


class Case:
    """Four messages with a time of their own: the third was recalled in time, the recall of the
    fourth came too late. Three halves: the first was committed, the second rolled back, the third
    left, and committed by a check. Two messages received: the second twice.
    """

    def __init__(self) -> None:
        self.history = history = DeliveryHistory()
        for number in range(4):
            name = f"t/{number}"
            history.timed[name] = Timed(name, DUE_MS, 10.0, 1.0, 2.0, Outcome.OK)
        self.recall("t/2", in_time=True)
        self.recall("t/3", in_time=False)
        self.stored_ms = {f"t/{number}": [DUE_MS + 5] for number in (0, 1, 3)}
        for number in range(3):
            name = f"h/{number}"
            history.halves[name] = Half(name, number != 1, 1.0, 2.0, Outcome.OK, 3.0)
        history.halves["h/2"].ending_s = inf
        history.checks = {"h/2": [8.0]}
        self.shown = Counter({"h/0": 1, "h/2": 1})
        for number in range(2):
            name = f"r/{number}"
            history.sends[name] = Send(name, RECEIVED, 1.0, 2.0, Outcome.OK, number, number)
        self.give("a/0", 0, 20.0, acked_s=21.0)
        self.give("a/1", 1, 20.0)
        self.give("b/0", 1, 31.0, acked_s=32.0)
        self.queues = {
            DUE: Held(0, ["t/0", "t/1", "t/3"]),
            SETTLED: Held(0, ["h/0", "h/2"]),
            RECEIVED: Held(0, ["r/0", "r/1"]),
        }
        for queue in (DUE, SETTLED):
            for offset, name in enumerate(self.queues[queue].messages):
                self.see(queue, offset, name)

    def recall(self, name: str, *, in_time: bool | None) -> None:
        timed = self.history.timed[name]
        timed.is_recalled, timed.in_time = True, in_time

    def give(self, call: str, number: int, asked_s: float, acked_s: float = inf) -> None:
        place, client = Place(RECEIVED, number), call.partition("/")[0]
        self.history.given[call] = Given(
            client, place, f"r/{number}", asked_s, asked_s + 0.5, asked_s + 10.0, acked_s, acked_s
        )

    def see(self, queue: Queue, offset: int, name: str, at_s: float = 12.0) -> None:
        self.history.reads.append(Seen(at_s, "watching", queue, 0, offset, name))

    def disturb(self, began_s: float, ended_s: float) -> None:
        self.history.disturbances.append(Disturbance("kill", began_s, ended_s))

    def findings(self) -> list[str]:
        ends = Ends(self.queues, self.stored_ms, self.shown, frozenset({"received"}))
        verdict = judge_deliveries(self.history, ends)
        return sorted({finding.rpartition(": ")[0] for finding in verdict.broken})


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_good_history_is_good(case: Case) -> None:
    assert case.findings() == []


def test_an_early_one(case: Case) -> None:
    case.stored_ms["t/0"] = [DUE_MS - 1]
    assert case.findings() == ["timed: early"]


def test_a_lost_one(case: Case) -> None:
    del case.stored_ms["t/0"]
    assert case.findings() == ["timed: lost"]


def test_one_that_was_recalled_too_late_is_not_gone(case: Case) -> None:
    del case.stored_ms["t/3"]
    assert case.findings() == ["timed: lost"]


def test_one_that_comes_although_it_was_recalled(case: Case) -> None:
    case.stored_ms["t/2"] = [DUE_MS]
    assert case.findings() == ["timed: delivered although recalled in time"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_recall_without_an_answer_leaves_both_open(case: Case, is_there: bool) -> None:
    case.recall("t/2", in_time=None)
    if is_there:
        case.stored_ms["t/2"] = [DUE_MS]
    assert case.findings() == []


def test_doubles_need_a_cause(case: Case) -> None:
    case.stored_ms["t/1"] *= 2
    case.shown["h/0"] = 2
    assert case.findings() == [
        "halves: doubles without a cause",
        "timed: doubles without a cause",
    ]
    case.disturb(1.0 - RETRIES_S, 1.5 - RETRIES_S)
    assert case.findings() == []


def test_what_was_never_sent(case: Case) -> None:
    case.stored_ms["t/9"] = [DUE_MS]
    case.shown["h/9"] = 1
    assert case.findings() == ["halves: from nowhere", "timed: from nowhere"]


def test_a_late_one_needs_a_cause(case: Case) -> None:
    late_ms = int(1000 * LATE_S_MAX) + 1
    case.stored_ms["t/0"] = [DUE_MS + late_ms]
    assert case.findings() == ["timed: late without a cause"]
    case.disturb(9.0, 10.1)
    assert case.findings() == []


def test_a_half_that_is_seen(case: Case) -> None:
    case.shown["h/1"] = 1
    assert case.findings() == ["halves: seen though rolled back"]


@pytest.mark.parametrize(("name", "at_s"), [("h/0", 2.9), ("h/2", 7.9)])
def test_a_half_that_is_seen_too_soon(case: Case, name: str, at_s: float) -> None:
    offset = case.queues[SETTLED].messages.index(name)
    case.see(SETTLED, offset, name, at_s)
    assert case.findings() == ["halves: seen before they were committed"]


def test_a_commit_that_is_lost(case: Case) -> None:
    del case.shown["h/0"]
    assert case.findings() == ["halves: committed and lost"]


def test_an_orphan_that_nobody_is_asked_about(case: Case) -> None:
    case.history.halves["h/0"].ending_s = inf
    assert "halves: left and never asked about" in case.findings()


def test_what_comes_again_though_it_was_acknowledged(case: Case) -> None:
    case.give("b/1", 0, 40.0)
    assert case.findings() == ["received: again though acknowledged"]


def test_what_nobody_acknowledged(case: Case) -> None:
    del case.history.given["b/0"]
    assert case.findings() == ["received: never acknowledged"]
    case.history.given["a/1"].acking_s = 22.0  # and was not answered
    assert case.findings() == []
    case.history.given["a/1"].refusal = "HANDLE_INVALID"
    assert case.findings() == ["received: never acknowledged"]


def test_two_that_have_it_at_a_time(case: Case) -> None:
    case.history.given["a/1"].until_s = 31.6
    assert case.findings() == ["received: two had it at a time"]
    case.disturb(1.0, 20.0 - LEASE_LOST_S)
    assert case.findings() == []


def test_another_message_than_is_at_its_place(case: Case) -> None:
    case.history.given["a/0"].message = "r/1"
    assert case.findings() == ["received: from nowhere"]


def test_what_brokers_acknowledged_and_lost(case: Case) -> None:
    case.queues[RECEIVED] = Held(0, ["r/0", "r/0"])
    assert case.findings() == [
        "received: acknowledged by brokers and lost",
        "received: copies without a cause: r/0",
        "received: from nowhere",
    ]


def test_what_the_watcher_saw_and_is_not_there(case: Case) -> None:
    case.see(DUE, 3, "t/2")
    assert case.findings() == ["later: seen and taken back"]


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.deliveries"
    with DeliveryRecorder(path) as recorder:
        recorder.timed("t/0", DUE_MS, 10.0)
        recorder.timed_sent("t/0", Outcome.OK)
        recorder.recall("t/0")
        recorder.recalled("t/0", in_time=True)
        recorder.checked("h/0")  # by another process, in another file
        recorder.half("h/0", is_committed=True)
        recorder.half_sent("h/0", Outcome.STORED)
        recorder.ending("h/0")
        recorder.given("a/0", "a", Place(RECEIVED, 7), "r/0", 20.0, 30.0)
        recorder.renewed("a/0", 40.0)
        recorder.acking("a/0")
        recorder.acked("a/0", "HANDLE_INVALID")
        recorder.acked("a/0")
    history = DeliveryHistory.read([path])
    timed, half, given = history.timed["t/0"], history.halves["h/0"], history.given["a/0"]
    assert (timed.due_ms, timed.due_s, timed.outcome) == (DUE_MS, 10.0, Outcome.OK)
    assert (timed.is_recalled, timed.in_time) == (True, True)
    assert (half.is_committed, half.outcome) == (True, Outcome.STORED)
    assert half.began_s <= half.ended_s <= half.ending_s < inf
    assert list(history.checks) == ["h/0"]
    assert (given.client, given.place, given.message) == ("a", Place(RECEIVED, 7), "r/0")
    assert (given.asked_s, given.until_s, given.refusal) == (20.0, 40.0, "HANDLE_INVALID")
    assert given.acking_s <= given.acked_s < inf
