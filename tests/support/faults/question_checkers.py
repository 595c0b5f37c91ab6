"""Decides whether questions to clients ended as they are promised to: each with an answer of the
client that was asked, or with an error that names a fault, in time; and a client consumes a message
once for each question at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf

from tests.support.faults.checkers import Verdict
from tests.support.faults.delivery_history import DeliveryHistory, Question

# The client's time and the broker's, two name servers that do not answer, and a message that is not
# on disk yet, on a machine that is busy with several clusters.
ENDED_S_MAX = 30.0


def judge_questions(history: DeliveryHistory, verdicts: Mapping[str, str]) -> Verdict:
    """``verdicts``: what a listener answers, by message; one without never answers in time."""
    verdict = Verdict()
    every = history.questions.values()
    answered = [one for one in every if one.answer is not None]
    refusals = Counter(one.refusal for one in every if one.refusal)
    verdict.counts["questions: asked"] = len(every)
    verdict.counts["questions: answered"] = len(answered)
    verdict.counts["questions: messages consumed"] = sum(bool(one.message) for one in answered)
    for refusal, count in sorted(refusals.items()):
        verdict.counts[f"questions: {refusal}"] = count
    late = (one for one in every if one.ended_s - one.asked_s > ENDED_S_MAX)
    verdict.add("questions: not ended in time", map(str, late))
    strange = (one for one in every if one.refusal and not one.is_allowed)
    verdict.add("questions: an error that names no fault", map(str, strange))
    verdict.add("questions: wrong answers", map(str, _wrong(history, verdicts)))
    verdict.add("questions: consumed without a question", _unasked(history))
    return verdict


def _wrong(history: DeliveryHistory, verdicts: Mapping[str, str]) -> Iterator[Question]:
    for one in history.questions.values():
        wanted = verdicts.get(one.message) if one.message else one.client
        is_invented = one.message and not _is_consumed(history, one)
        if one.answer is not None and (one.answer != wanted or is_invented):
            yield one


def _is_consumed(history: DeliveryHistory, one: Question) -> bool:
    times_s = history.consumed.get((one.client, one.message), ())
    return any(one.asked_s <= at_s <= one.ended_s for at_s in times_s)


def _unasked(history: DeliveryHistory) -> Iterator[str]:
    for (client, message), times_s in history.consumed.items():
        asked_s = sorted(
            one.asked_s
            for one in history.questions.values()
            if (one.client, one.message) == (client, message)
        )
        for number, at_s in enumerate(sorted(times_s)):
            if (asked_s[number] if number < len(asked_s) else inf) > at_s:
                yield f"{message} at {client}"
