"""Questions to clients that hold a stream: each has a deadline, and only the client that was asked
can answer, for no other one knows the question's id.
"""

from __future__ import annotations

import asyncio
import secrets
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from cometmq.errors import (
    BrokerDraining,
    ClientGone,
    CometError,
    InvalidRequest,
    QuestionNotFound,
    QuestionTimeout,
    QuestionUnsupported,
    RemoteQuestionsOff,
    TooManyQuestions,
    TopicNotSubscribed,
)
from cometmq.member.metrics import MemberMetrics
from cometmq.v1 import broker_pb2

TIMEOUT_MS, TIMEOUT_MS_MAX = 10_000, 60_000
PER_CLIENT_MAX = 8
OUTSTANDING_MAX = 256
BYTES_MAX = 32 * 1024 * 1024  # of messages in questions that wait, unless it is one
ID_BYTES = 16
ANSWER_BYTES_MAX = 1 << 20
# What a client may refuse a question with.
REFUSALS = (
    RemoteQuestionsOff,
    QuestionUnsupported,
    TopicNotSubscribed,
    TooManyQuestions,
    InvalidRequest,
)

Description: TypeAlias = broker_pb2.ClientDescription
Result: TypeAlias = broker_pb2.ListenerResult

_KINDS = {
    "describe": broker_pb2.CLIENT_QUESTION_KIND_DESCRIBE,
    "consume": broker_pb2.CLIENT_QUESTION_KIND_CONSUME,
}
_ANSWERS: dict[str, type[Description | Result]] = {"describe": Description, "consume": Result}


class Questioned:
    """A client that can be asked, as long as one stream is open. ``wake`` is called when there is
    a question to be written to it.
    """

    def __init__(
        self, wake: Callable[[], None], client_id: str = "", known: Iterable[int] = ()
    ) -> None:
        self.client_id = client_id
        self.known = frozenset(known)  # kinds of questions
        self._wake = wake
        self._waiting: dict[bytes, broker_pb2.ClientQuestion] = {}

    def put(self, question: broker_pb2.ClientQuestion) -> None:
        self._waiting[question.question_id] = question
        self._wake()

    def drop(self, question_id: bytes) -> None:
        """No caller waits for the answer: the question is not sent, if it has not been."""
        self._waiting.pop(question_id, None)

    @property
    def has_questions(self) -> bool:
        return bool(self._waiting)

    def take(self) -> broker_pb2.ClientQuestion | None:
        """The next question to be written; None: there is none."""
        question_id = next(iter(self._waiting), None)
        return None if question_id is None else self._waiting.pop(question_id)


class _Open:
    """A question without an answer."""

    __slots__ = ("client", "future", "kind", "size")

    def __init__(
        self, client: Questioned, kind: str, size: int, future: Future[Description | Result]
    ) -> None:
        self.client = client
        self.kind = kind
        self.size = size
        self.future = future


class Questions:
    """All questions that wait for their answers. Belongs to the event loop."""

    def __init__(self, metrics: MemberMetrics) -> None:
        self._metrics = metrics
        self._open: dict[bytes, _Open] = {}
        self._is_ended = False

    def __len__(self) -> int:
        """Questions that wait."""
        return len(self._open)

    async def describe(
        self, client: Questioned, timeout_ms: int, *, with_stacks: bool
    ) -> Description:
        """The description of the client as it is now. Raises as :meth:`_ask`."""
        asked = broker_pb2.DescribeQuestion(with_stacks=with_stacks)
        answer = await self._ask(client, broker_pb2.ClientQuestion(describe=asked), timeout_ms)
        assert isinstance(answer, Description)
        return answer

    async def consume(
        self, client: Questioned, timeout_ms: int, asked: broker_pb2.ConsumeQuestion
    ) -> Result:
        """How the client's listener has consumed the message. Raises as :meth:`_ask`."""
        answer = await self._ask(client, broker_pb2.ClientQuestion(consume=asked), timeout_ms)
        assert isinstance(answer, Result)
        return answer

    async def _ask(
        self, client: Questioned, question: broker_pb2.ClientQuestion, timeout_ms: int
    ) -> Description | Result:
        """Raises InvalidRequest, QuestionUnsupported, TooManyQuestions, QuestionTimeout,
        ClientGone, BrokerDraining, and what the client refuses with.
        """
        kind = question.WhichOneof("kind")
        assert kind is not None
        outcome = "refused"
        try:
            timeout_ms = self._check(client, kind, question.ByteSize(), timeout_ms)
            question.question_id = secrets.token_bytes(ID_BYTES)
            question.timeout_ms = timeout_ms
            answer = await self._answer(client, kind, question)
            outcome = "answered"
        except QuestionTimeout:
            outcome = "timed_out"
            raise
        except (ClientGone, BrokerDraining):
            outcome = "gone"
            raise
        finally:
            self._metrics.client_questions.labels(kind, outcome).inc()
        return answer

    def _check(self, client: Questioned, kind: str, size: int, timeout_ms: int) -> int:
        """The time for the answer."""
        if not 0 <= timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidRequest(f"timeout_ms is 0 to {TIMEOUT_MS_MAX}, not {timeout_ms}")
        if self._is_ended:
            raise BrokerDraining("the broker stops, and asks its clients nothing more")
        if _KINDS[kind] not in client.known:
            raise QuestionUnsupported(f"client {client.client_id} cannot be asked to {kind}")
        if len(self._open) >= OUTSTANDING_MAX:
            raise TooManyQuestions(f"{OUTSTANDING_MAX} questions to clients wait for answers")
        if self._open and sum(one.size for one in self._open.values()) + size > BYTES_MAX:
            raise TooManyQuestions(f"{BYTES_MAX} bytes of messages wait for clients")
        mine = Counter(one.client is client for one in self._open.values())[True]
        if mine >= PER_CLIENT_MAX:
            raise TooManyQuestions(
                f"client {client.client_id} has not answered {PER_CLIENT_MAX} questions"
            )
        return timeout_ms or TIMEOUT_MS

    async def _answer(
        self, client: Questioned, kind: str, question: broker_pb2.ClientQuestion
    ) -> Description | Result:
        question_id, timeout_s = question.question_id, question.timeout_ms / 1000
        future = self._new_future()
        self._open[question_id] = _Open(client, kind, question.ByteSize(), future)
        try:
            client.put(question)
            return await self._in_time(future, timeout_s)
        except TimeoutError:
            raise QuestionTimeout(
                f"client {client.client_id} has not answered for {timeout_s:g} s"
            ) from None
        finally:
            del self._open[question_id]
            client.drop(question_id)

    def _new_future(self) -> Future[Description | Result]:
        return asyncio.get_running_loop().create_future()

    async def _in_time(
        self, future: Future[Description | Result], timeout_s: float
    ) -> Description | Result:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await future

    def answered(
        self, client_id: str, question_id: bytes, answer: Description | Result | CometError
    ) -> None:
        """A client has answered. Raises QuestionNotFound, InvalidRequest."""
        opened = self._open.get(question_id)
        if opened is None or opened.client.client_id != client_id or opened.future.done():
            raise QuestionNotFound(f"no such question waits for an answer of client {client_id}")
        if isinstance(answer, CometError):
            opened.future.set_exception(answer)
        elif isinstance(answer, _ANSWERS[opened.kind]):
            opened.future.set_result(answer)
        else:
            raise InvalidRequest(f"answer: the question is to {opened.kind}")

    def left(self, client: Questioned) -> None:
        """The client's stream has ended."""
        mine = [one for one in self._open.values() if one.client is client]
        _fail(mine, ClientGone(f"client {client.client_id} went away before it answered"))

    def end(self) -> None:
        """The process drains: no client is asked any more."""
        self._is_ended = True
        _fail(self._open.values(), BrokerDraining("the broker stops before the client answered"))


def _fail(opened: Iterable[_Open], error: CometError) -> None:
    for one in opened:
        if not one.future.done():
            one.future.set_exception(error)
