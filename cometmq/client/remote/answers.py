"""Answers the questions that brokers pass on from operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cometmq.client.remote.rates import MARK_S, Rates
from cometmq.errors import (
    CometError,
    QuestionUnsupported,
    RemoteQuestionsOff,
    TooManyQuestions,
)
from cometmq.rpc.interceptors import to_proto
from cometmq.rpc.streams import ask
from cometmq.rpc.tasks import Tasks
from cometmq.rpc.ticks import tick
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

if TYPE_CHECKING:
    from cometmq.v1 import broker_pb2_grpc

ANSWER_TIMEOUT_S = 3.0
CONSUMING_MAX = 8  # listener calls that were asked for, until they have ended

_KNOWN = (
    broker_pb2.CLIENT_QUESTION_KIND_DESCRIBE,
    broker_pb2.CLIENT_QUESTION_KIND_CONSUME,
)

_log = logger(__name__)

Broker = Callable[[str], "broker_pb2_grpc.BrokerServiceAsyncStub"]
Describe = Callable[[bool], broker_pb2.ClientDescription]
Consume = Callable[[str, broker_pb2.ConsumeQuestion], Awaitable[broker_pb2.ListenerResult]]


class Answers:
    """Of one client. ``broker``: the stub of a broker group's writer. ``describe`` returns what the
    client does, with stacks if that is asked for. ``consume`` lets its listener have a message of a
    broker group; None: it has no listener.
    """

    def __init__(
        self,
        client_id: str,
        broker: Broker,
        describe: Describe,
        consume: Consume | None = None,
        *,
        is_enabled: bool,
        may_consume: bool = True,
    ) -> None:
        self.rates = Rates()
        self.is_asked = True  # False: it is a part of another client, which answers
        self._client_id = client_id
        self._broker = broker
        self._describe = describe
        self._consume = consume
        self._is_enabled = is_enabled
        self._may_consume = may_consume
        self._consuming = 0
        self._tasks: Tasks | None = None  # None: the client is not open

    @property
    def known(self) -> tuple[broker_pb2.ClientQuestionKind.ValueType, ...]:
        """The kinds of questions that this client answers, be it with a refusal."""
        if not self.is_asked:
            return ()
        return _KNOWN if self._consume is not None else _KNOWN[:1]

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        if self._is_enabled and self.is_asked:
            tasks.start(self._mark(), "rates")

    async def _mark(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.rates.mark(loop.time())
            await tick(MARK_S)

    def asked(self, broker_group: str, question: broker_pb2.ClientQuestion) -> None:
        """A broker passes a question on."""
        if self._tasks is not None:
            self._tasks.start(self._answer(broker_group, question), "answer a question")

    async def _answer(self, broker_group: str, question: broker_pb2.ClientQuestion) -> None:
        answer = broker_pb2.AnswerQuestionRequest(
            client_id=self._client_id, question_id=question.question_id
        )
        try:
            await self._fill(answer, broker_group, question)
        except CometError as error:
            answer.refused.CopyFrom(to_proto(error))
        try:
            await ask(self._broker(broker_group).AnswerQuestion, answer, ANSWER_TIMEOUT_S)
        except CometError as error:  # it comes too late, or the broker has gone
            about = fields(broker_group=broker_group, error=error)
            _log.info("the answer to a question did not count", extra=about)

    async def _fill(
        self,
        answer: broker_pb2.AnswerQuestionRequest,
        broker_group: str,
        question: broker_pb2.ClientQuestion,
    ) -> None:
        """Raises why there is no answer."""
        if not self._is_enabled:
            raise RemoteQuestionsOff("This client answers no questions.")
        match question.WhichOneof("kind"):
            case "describe":
                answer.description.CopyFrom(self._describe(question.describe.with_stacks))
            case "consume" if self._consume is not None:
                if not self._may_consume:
                    raise RemoteQuestionsOff("This client consumes nothing on request.")
                if self._consuming >= CONSUMING_MAX:
                    raise TooManyQuestions(f"{CONSUMING_MAX} such listener calls still run.")
                self._consuming += 1
                try:
                    answer.result.CopyFrom(await self._consume(broker_group, question.consume))
                finally:
                    self._consuming -= 1
            case _:
                raise QuestionUnsupported("This client does not know the question.")

    def close(self) -> None:
        """The client closes: it answers nothing more."""
        self._tasks = None
