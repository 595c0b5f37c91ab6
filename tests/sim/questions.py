"""Operators' questions to members of groups, at the broker: the product's. Held streams are calls
here: a member fetches what it is asked.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from cometmq.errors import ClientNotFound
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2
from services.broker.groups.questions import Questioned, Questions
from tests.sim.world import Future, Violation, Wait

if TYPE_CHECKING:
    from tests.sim.writer import Writer

KINDS = (
    broker_pb2.CLIENT_QUESTION_KIND_DESCRIBE,
    broker_pb2.CLIENT_QUESTION_KIND_CONSUME,
)
LATE_S_MAX = 0.01


class Outcome(Future):
    """As asyncio's future with a result, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self._result: Any = None
        self._error: Exception | None = None

    def set_result(self, result: Any) -> None:
        self._result = result
        self.set()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self.set()

    def __await__(self) -> Generator[Wait[None], None, Any]:
        yield from super().__await__()
        if self._error is not None:
            raise self._error
        return self._result


class BrokerQuestions(Questions):
    """Without an event loop."""

    def __init__(self, writer: Writer, metrics: Any) -> None:
        super().__init__(metrics)
        self._writer = writer

    def _new_future(self) -> Any:
        return Outcome()

    async def _in_time(self, future: Any, timeout_s: float) -> Any:
        def end() -> None:
            if not future.done():
                future.set_exception(TimeoutError())

        self._writer.after(timeout_s, end)
        return await future


class Asking:
    """The questions at one writer."""

    def __init__(self, writer: Writer, metrics: Any) -> None:
        self._writer = writer
        self._questions = BrokerQuestions(writer, metrics)
        self._streams: dict[str, tuple[Questioned, float]] = {}

    @property
    def open_count(self) -> int:
        """Questions without an answer."""
        return len(self._questions)

    async def fetch(self, client: str) -> list[broker_pb2.ClientQuestion]:
        """What a member is asked since it fetched last. It is heard from now."""
        now_s = self._writer.clock.monotonic_s()
        if client in self._streams:
            questioned, _ = self._streams[client]
        else:
            questioned = Questioned(lambda: None, client)
            questioned.known = frozenset(KINDS)
        self._streams[client] = questioned, now_s
        found = []
        while (question := questioned.take()) is not None:
            found.append(question)
        return found

    def leave_silent(self, silence_s_max: float) -> None:
        """Streams of members that are not heard any more end."""
        now_s = self._writer.clock.monotonic_s()
        for client, (questioned, heard_s) in list(self._streams.items()):
            if now_s - heard_s > silence_s_max:
                del self._streams[client]
                self._questions.left(questioned)

    async def ask(self, client: str, nonce: str, timeout_s: float) -> str:
        """What the member answers: a describing one its options, a listener its text."""
        if client not in self._streams:
            raise ClientNotFound(f"client {client} has no stream open here")
        is_over = False

        def check() -> None:
            if not (is_over or self._writer.member.machine.stopped) and self._writer.alive:
                raise Violation(f"a question to {client} has not ended after {timeout_s} s")

        self._writer.world.at(timeout_s + LATE_S_MAX, check)
        questioned, _ = self._streams[client]
        timeout_ms = round(timeout_s * 1000)
        try:
            if not nonce:
                found = await self._questions.describe(questioned, timeout_ms, with_stacks=False)
                return found.options["name"]
            asked = broker_pb2.ConsumeQuestion(record=nonce.encode())
            return (await self._questions.consume(questioned, timeout_ms, asked)).text
        finally:
            is_over = True

    async def answered(self, answer: broker_pb2.AnswerQuestionRequest) -> None:
        """As ``BrokerServicer.AnswerQuestion`` takes it."""
        question_id = answer.question_id
        if answer.HasField("refused"):
            self._questions.answered(answer.client_id, question_id, from_proto(answer.refused))
        else:
            said = answer.description if answer.HasField("description") else answer.result
            self._questions.answered(answer.client_id, question_id, said)
