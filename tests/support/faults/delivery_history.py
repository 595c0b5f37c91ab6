"""What clients did with messages that come later: those with a time of their own, half messages of
transactions, and messages that a receiver has for a time (POP); and what operators ask clients. A
history with more kinds of lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from tests.support.faults.history import History, Outcome, Queue, Recorder


@dataclass(slots=True)
class Timed:
    """A message with a time of its own. ``due_s``: the same by CLOCK_MONOTONIC. ``in_time``: what
    its recall was told; None: it was not told, or was not asked.
    """

    message: str
    due_ms: int
    due_s: float
    began_s: float
    ended_s: float = inf
    outcome: Outcome = Outcome.UNKNOWN
    is_recalled: bool = False
    in_time: bool | None = None


@dataclass(slots=True)
class Half:
    """A message of a transaction. ``is_committed``: as its producer group decides. ``ending_s``:
    when its producer began to end it.
    """

    message: str
    is_committed: bool
    began_s: float
    ended_s: float = inf
    outcome: Outcome = Outcome.UNKNOWN
    ending_s: float = inf


class Place(NamedTuple):
    """Where a message is in its queue."""

    queue: Queue
    offset: int


@dataclass(slots=True)
class Given:
    """A receiver got a message. ``asked_s``: it asked then, ``until_s``: so long at least nobody
    else gets it. ``acking_s`` and ``acked_s``: it began to acknowledge it, and was told that it is
    done.
    """

    client: str
    place: Place
    message: str
    asked_s: float
    began_s: float
    until_s: float
    acking_s: float = inf
    acked_s: float = inf
    refusal: str = ""


@dataclass(slots=True)
class Question:
    """An operator asked a client what it does, or to consume a message. ``answer``: the name of the
    client that described itself, or the verdict of its listener. ``refusal``: the error's name;
    ``is_allowed``: a fault may have caused it.
    """

    client: str
    message: str  # empty: none
    asked_s: float
    ended_s: float = inf
    answer: str | None = None
    refusal: str = ""
    is_allowed: bool = False


@dataclass
class DeliveryHistory(History):
    """``checks``: when members of the group answered about a half, by its message. ``consumed``:
    when listeners were called because of a question, by client and message.
    """

    timed: dict[str, Timed] = field(default_factory=dict)
    halves: dict[str, Half] = field(default_factory=dict)
    checks: dict[str, list[float]] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    questions: dict[str, Question] = field(default_factory=dict)
    consumed: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def _add_timed(self, at_s: float, message: str, due_ms: int, due_s: float) -> None:
        assert message not in self.timed, f"{message} was sent twice"
        self.timed[message] = Timed(message, due_ms, due_s, at_s)

    def _add_timed_sent(self, at_s: float, message: str, outcome: str) -> None:
        timed = self.timed[message]
        timed.ended_s, timed.outcome = at_s, Outcome(outcome)

    def _add_recall(self, _at_s: float, message: str) -> None:
        self.timed[message].is_recalled = True

    def _add_recalled(self, _at_s: float, message: str, in_time: bool) -> None:
        self.timed[message].in_time = in_time

    def _add_half(self, at_s: float, message: str, is_committed: bool) -> None:
        assert message not in self.halves, f"{message} was sent twice"
        self.halves[message] = Half(message, is_committed, at_s)

    def _add_half_sent(self, at_s: float, message: str, outcome: str) -> None:
        half = self.halves[message]
        half.ended_s, half.outcome = at_s, Outcome(outcome)

    def _add_ending(self, at_s: float, message: str) -> None:
        self.halves[message].ending_s = at_s

    def _add_checked(self, at_s: float, message: str) -> None:
        self.checks.setdefault(message, []).append(at_s)

    def _add_given(self, at_s: float, call: str, client: str, *rest: Any) -> None:
        topic, queue_id, offset, message, asked_s, until_s = rest
        place = Place((topic, queue_id), offset)
        self.given[call] = Given(client, place, message, asked_s, at_s, until_s)

    def _add_renewed(self, _at_s: float, call: str, until_s: float) -> None:
        self.given[call].until_s = until_s

    def _add_acking(self, at_s: float, call: str) -> None:
        self.given[call].acking_s = at_s

    def _add_acked(self, at_s: float, call: str, refusal: str) -> None:
        if refusal:
            self.given[call].refusal = refusal
        else:
            self.given[call].acked_s = at_s

    def _add_asked(self, at_s: float, question: str, client: str, message: str) -> None:
        self.questions[question] = Question(client, message, at_s)

    def _add_answered(self, at_s: float, question: str, answer: str) -> None:
        self.questions[question].ended_s, self.questions[question].answer = at_s, answer

    def _add_unanswered(self, at_s: float, question: str, refusal: str, is_allowed: bool) -> None:
        one = self.questions[question]
        one.ended_s, one.refusal, one.is_allowed = at_s, refusal, is_allowed

    def _add_consumed(self, at_s: float, client: str, message: str) -> None:
        self.consumed.setdefault((client, message), []).append(at_s)


class DeliveryRecorder(Recorder):
    def timed(self, message: str, due_ms: int, due_s: float) -> None:
        self._write("timed", message, due_ms, due_s)

    def timed_sent(self, message: str, outcome: Outcome) -> None:
        self._write("timed_sent", message, outcome.value)

    def recall(self, message: str) -> None:
        self._write("recall", message)

    def recalled(self, message: str, *, in_time: bool) -> None:
        self._write("recalled", message, in_time)

    def half(self, message: str, *, is_committed: bool) -> None:
        self._write("half", message, is_committed)

    def half_sent(self, message: str, outcome: Outcome) -> None:
        self._write("half_sent", message, outcome.value)

    def ending(self, message: str) -> None:
        """Its producer is about to commit it, or to roll it back."""
        self._write("ending", message)

    def checked(self, message: str) -> None:
        """A member of its group is about to say what it became."""
        self._write("checked", message)

    def given(
        self, call: str, client: str, place: Place, message: str, asked_s: float, until_s: float
    ) -> None:
        """``call``: its name, which no other has."""
        self._write("given", call, client, *place.queue, place.offset, message, asked_s, until_s)

    def renewed(self, call: str, until_s: float) -> None:
        self._write("renewed", call, until_s)

    def acking(self, call: str) -> None:
        self._write("acking", call)

    def acked(self, call: str, refusal: str = "") -> None:
        """``refusal``: the error's name; empty: it is done."""
        self._write("acked", call, refusal)

    def asked(self, question: str, client: str, message: str) -> None:
        """``question``: its name, which no other has. ``message``: to be consumed; empty: none."""
        self._write("asked", question, client, message)

    def answered(self, question: str, answer: str) -> None:
        self._write("answered", question, answer)

    def unanswered(self, question: str, refusal: str, *, is_allowed: bool) -> None:
        """``refusal``: the error's name."""
        self._write("unanswered", question, refusal, is_allowed)

    def consumed(self, client: str, message: str) -> None:
        """The listener was called, which only a question can cause."""
        self._write("consumed", client, message)
