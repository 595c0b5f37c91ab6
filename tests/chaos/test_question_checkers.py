"""The checkers of questions find every kind of broken promise, and nothing in a good history."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.support.faults.delivery_history import DeliveryHistory, DeliveryRecorder, Question
from tests.support.faults.question_checkers import ENDED_S_MAX, judge_questions

VERDICTS = {"good": "success"}


@pytest.fixture
def history() -> DeliveryHistory:
    """A client described itself, consumed a message, and was cut off."""
    questions = {
        "o/0": Question("a", "", 1.0, 1.1, "a"),
        "o/1": Question("a", "good", 2.0, 2.1, "success"),
        "o/2": Question("a", "slow", 3.0, 6.0, refusal="QUESTION_TIMEOUT", is_allowed=True),
    }
    consumed = {("a", "good"): [2.05], ("a", "slow"): [3.05]}
    return DeliveryHistory(questions=questions, consumed=consumed)


def findings(history: DeliveryHistory) -> set[str]:
    return {found.split(": ")[1] for found in judge_questions(history, VERDICTS).broken}


def test_a_good_history_is_good(history: DeliveryHistory) -> None:
    assert findings(history) == set()


@pytest.mark.parametrize("ended_s", [1.1 + ENDED_S_MAX, inf])
def test_one_that_does_not_end(history: DeliveryHistory, ended_s: float) -> None:
    history.questions["o/0"].ended_s = ended_s
    assert findings(history) == {"not ended in time"}


def test_an_error_that_nobody_can_act_on(history: DeliveryHistory) -> None:
    history.questions["o/2"].is_allowed = False
    assert findings(history) == {"an error that names no fault"}


@pytest.mark.parametrize(
    ("question", "answer"), [("o/0", "b"), ("o/1", "exception"), ("o/1", ""), ("o/2", "success")]
)
def test_a_wrong_answer(history: DeliveryHistory, question: str, answer: str) -> None:
    history.questions[question].answer = answer
    assert findings(history) == {"wrong answers"}


@pytest.mark.parametrize("at_s", [1.9, 2.2])
def test_a_verdict_on_what_was_consumed_at_another_time(
    history: DeliveryHistory, at_s: float
) -> None:
    history.consumed["a", "good"] = [at_s]
    assert "wrong answers" in findings(history)


@pytest.mark.parametrize("at_s", [2.9, 3.1])
def test_a_message_that_is_consumed_without_a_question(
    history: DeliveryHistory, at_s: float
) -> None:
    history.consumed["a", "slow"].append(at_s)
    assert findings(history) == {"consumed without a question"}


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "o.deliveries"
    with DeliveryRecorder(path) as recorder:
        recorder.asked("o/0", "a", "good")
        recorder.consumed("a", "good")
        recorder.answered("o/0", "success")
        recorder.asked("o/1", "a", "")
        recorder.unanswered("o/1", "CLIENT_GONE", is_allowed=True)
    history = DeliveryHistory.read([path])
    first, second = history.questions.values()
    assert (first.client, first.message, first.answer) == ("a", "good", "success")
    assert first.asked_s <= history.consumed["a", "good"][0] <= first.ended_s < inf
    assert (second.answer, second.refusal, second.is_allowed) == (None, "CLIENT_GONE", True)
