"""Questions to clients: who may answer, how long is waited, how many there may be."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from cometmq.errors import (
    BrokerDraining,
    ClientGone,
    InvalidRequest,
    QuestionNotFound,
    QuestionTimeout,
    QuestionUnsupported,
    RemoteQuestionsOff,
    TooManyQuestions,
)
from cometmq.member.metrics import MemberMetrics
from cometmq.v1 import broker_pb2 as pb
from services.broker.groups import questions
from services.broker.groups.questions import Questioned, Questions
from tests.support.waiting import until

ALL = frozenset((pb.CLIENT_QUESTION_KIND_DESCRIBE, pb.CLIENT_QUESTION_KIND_CONSUME))
SAID = pb.ClientDescription(version="1")


class Client:
    """Keeps the questions that are put to it."""

    def __init__(self, client_id: str = "c", known: frozenset[int] = ALL) -> None:
        self.questioned = Questioned(self._look, client_id)
        self.questioned.known = known
        self.looks = True
        self.asked: list[pb.ClientQuestion] = []

    def _look(self) -> None:
        while self.looks and (question := self.questioned.take()) is not None:
            self.asked.append(question)


def opened() -> tuple[Questions, CollectorRegistry]:
    registry = CollectorRegistry()
    return Questions(MemberMetrics(registry, "c", "g")), registry


def asking(made: Questions, client: Client, timeout_ms: int = 0) -> asyncio.Task[object]:
    return asyncio.create_task(
        made.describe(client.questioned, timeout_ms, with_stacks=False), name="ask"
    )


async def begun(made: Questions, client: Client, timeout_ms: int = 0) -> asyncio.Task[object]:
    before = len(made)
    task = asking(made, client, timeout_ms)
    await until(lambda: len(made) > before or task.done())
    return task


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "cometmq_client_questions_total"
    }


async def test_only_the_client_that_was_asked_can_answer_and_once() -> None:
    made, registry = opened()
    client = Client()
    task = await begun(made, client)
    [question] = client.asked
    assert len(question.question_id) == questions.ID_BYTES
    assert question.timeout_ms == questions.TIMEOUT_MS
    with pytest.raises(QuestionNotFound):
        made.answered("another", question.question_id, SAID)
    with pytest.raises(QuestionNotFound):
        made.answered("c", bytes(questions.ID_BYTES), SAID)
    with pytest.raises(InvalidRequest):
        made.answered("c", question.question_id, pb.ListenerResult())
    made.answered("c", question.question_id, SAID)
    with pytest.raises(QuestionNotFound):
        made.answered("c", question.question_id, SAID)
    assert await task == SAID
    with pytest.raises(QuestionNotFound):
        made.answered("c", question.question_id, SAID)
    assert outcomes(registry) == {"answered": 1}


async def test_a_refusal_is_raised() -> None:
    made, registry = opened()
    client = Client()
    task = await begun(made, client)
    made.answered("c", client.asked[0].question_id, RemoteQuestionsOff("no"))
    with pytest.raises(RemoteQuestionsOff):
        await task
    assert outcomes(registry) == {"refused": 1}


async def test_a_silent_client_is_waited_for_until_the_deadline_and_its_answer_is_void() -> None:
    made, registry = opened()
    client = Client()
    client.looks = False  # its stream takes nothing
    with pytest.raises(QuestionTimeout):
        await made.describe(client.questioned, 1, with_stacks=False)
    assert len(made) == 0
    assert not client.questioned.has_questions  # nor is the question kept for later
    with pytest.raises(InvalidRequest):
        await made.describe(client.questioned, questions.TIMEOUT_MS_MAX + 1, with_stacks=False)
    assert outcomes(registry) == {"timed_out": 1, "refused": 1}


async def test_a_client_that_goes_fails_its_questions_and_nobody_elses() -> None:
    made, registry = opened()
    going, staying = Client("going"), Client("staying")
    failed, kept = await begun(made, going), await begun(made, staying)
    made.left(going.questioned)
    with pytest.raises(ClientGone):
        await failed
    made.answered("staying", staying.asked[0].question_id, SAID)
    assert await kept == SAID
    assert outcomes(registry) == {"gone": 1, "answered": 1}


async def test_a_client_is_asked_only_what_it_knows() -> None:
    made, _ = opened()
    with pytest.raises(QuestionUnsupported):
        await made.describe(Client(known=frozenset()).questioned, 0, with_stacks=False)
    only_describe = Client(known=frozenset((pb.CLIENT_QUESTION_KIND_DESCRIBE,)))
    with pytest.raises(QuestionUnsupported):
        await made.consume(only_describe.questioned, 0, pb.ConsumeQuestion())


async def test_questions_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "OUTSTANDING_MAX", 12)
    made, _ = opened()
    client = Client()
    tasks = [await begun(made, client) for _ in range(questions.PER_CLIENT_MAX)]
    with pytest.raises(TooManyQuestions):
        await made.describe(client.questioned, 0, with_stacks=False)
    others = [Client(f"c{n}") for n in range(12 - questions.PER_CLIENT_MAX)]
    tasks += [await begun(made, other) for other in others]
    with pytest.raises(TooManyQuestions):
        await made.describe(Client("one more").questioned, 0, with_stacks=False)
    monkeypatch.setattr(questions, "OUTSTANDING_MAX", 100)
    monkeypatch.setattr(questions, "BYTES_MAX", 1_000)
    with pytest.raises(TooManyQuestions):
        await made.consume(Client("d").questioned, 0, pb.ConsumeQuestion(record=bytes(1_000)))
    made.end()
    for task in tasks:
        with pytest.raises(BrokerDraining):
            await task
    with pytest.raises(BrokerDraining):
        await made.describe(client.questioned, 0, with_stacks=False)
