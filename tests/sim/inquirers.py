"""Operators who ask members of groups, and the members' answers, which are the product's."""

from __future__ import annotations

from typing import Any

from cometmq.client.remote.answers import Answers
from cometmq.errors import (
    ClientGone,
    ClientNotFound,
    CometError,
    NotWriter,
    PeerUnavailable,
    QuestionNotFound,
    QuestionTimeout,
    RemoteQuestionsOff,
    TooManyQuestions,
)
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2
from tests.sim.clients import Client
from tests.sim.topics import BROKER_GROUP
from tests.sim.world import Violation

ASK_S = (0.5, 2.0)
TIMEOUT_S = (0.4, 2.5)  # of a question
FETCH_S = 0.7
WORK_S_MAX = 1.0  # until a member answers
SILENT_SHARE = 0.1  # of questions, which a member never answers
STRANGE_SHARE = 0.2  # of answers, which somebody else has tried to give, or come twice
OFF_EACH = 5  # of so many members one answers no questions
KNOWN_MAX = 12  # members that an operator knows of, some of which have gone

FAULTS = (
    ClientGone,
    ClientNotFound,
    NotWriter,
    PeerUnavailable,
    QuestionTimeout,
    RemoteQuestionsOff,
    TooManyQuestions,
)


class MemberAnswers:
    """A member's part: it fetches questions and answers them, after a while."""

    def __init__(self, client: Client, *, is_off: bool) -> None:
        none: Any = None
        self._client = client
        self._answers = Answers(
            client.name, none, self._describe, self._consume, is_enabled=not is_off
        )

    def _describe(self, _with_stacks: bool) -> broker_pb2.ClientDescription:
        return broker_pb2.ClientDescription(options={"name": self._client.name})

    async def _consume(
        self, _broker_group: str, asked: broker_pb2.ConsumeQuestion
    ) -> broker_pb2.ListenerResult:
        await self._client.sleep(self._client.world.between(0.0, WORK_S_MAX))
        return broker_pb2.ListenerResult(text=_text(self._client.name, asked.record.decode()))

    async def run(self) -> None:
        """Until the member is over."""
        client = self._client
        while not client.over:
            await client.sleep(FETCH_S)
            try:
                questions = await client.at_writer(
                    lambda role: role.broker.asking.fetch(client.name)
                )
            except CometError:
                continue
            for question in questions:
                client.spawn(self._answer(question))

    async def _answer(self, question: broker_pb2.ClientQuestion) -> None:
        client, rng = self._client, self._client.world.rng
        if rng.random() < SILENT_SHARE:
            return
        answer = broker_pb2.AnswerQuestionRequest(
            client_id=client.name, question_id=question.question_id
        )
        try:
            await self._answers._fill(answer, BROKER_GROUP, question)
        except CometError as error:
            answer.refused.CopyFrom(to_proto(error))
        if rng.random() < STRANGE_SHARE:
            await self._send(_by_stranger(answer), "answers of strangers refused")
        if await self._send(answer, "answers that came too late"):
            client.world.counts["questions answered"] += 1
            if rng.random() < STRANGE_SHARE and await self._send(answer, "second answers refused"):
                raise Violation(f"{client.name} has answered twice, and both count")

    async def _send(self, answer: broker_pb2.AnswerQuestionRequest, refused: str) -> bool:
        try:
            await self._client.at_writer(lambda role: role.broker.asking.answered(answer))
        except QuestionNotFound:
            self._client.world.counts[refused] += 1
            return False
        except CometError:
            return False
        return True


class Inquirer(Client):
    """An operator who asks members what they do, or to consume a message."""

    def start(self) -> None:
        self.spawn(self._work())

    async def _work(self) -> None:
        counter = 0
        while not self.over:
            await self.sleep(self.world.between(*ASK_S))
            names = self.group.member_names[-KNOWN_MAX:]
            counter += 1
            is_describing = self.world.rng.random() < 0.5
            self.spawn(
                self._ask(self.world.rng.choice(names), "" if is_describing else str(counter))
            )

    async def _ask(self, client: str, nonce: str) -> None:
        timeout_s, counts = round(self.world.between(*TIMEOUT_S), 3), self.world.counts
        try:
            text = await self.at_writer(
                lambda role: role.broker.asking.ask(client, nonce, timeout_s)
            )
        except FAULTS as error:
            counts[f"questions that end with {error.name()}"] += 1
            if isinstance(error, RemoteQuestionsOff) and not is_off(client):
                raise Violation(f"a question to {client} ends with {error}") from error
            return
        wanted = _text(client, nonce) if nonce else client
        if text != wanted or is_off(client):
            raise Violation(f"a question to {client}, {nonce}, is answered {text}")
        counts["questions that end with an answer"] += 1


def is_off(client: str) -> bool:
    """Whether a member, by its name, answers no questions."""
    return int(client.lstrip("c").partition(".")[0]) % OFF_EACH == 0


def _text(client: str, nonce: str) -> str:
    return f"{client} has consumed {nonce}"


def _by_stranger(answer: broker_pb2.AnswerQuestionRequest) -> broker_pb2.AnswerQuestionRequest:
    strange = broker_pb2.AnswerQuestionRequest(client_id="c999.1")
    strange.question_id = answer.question_id
    strange.result.text = "a stranger's"
    return strange
