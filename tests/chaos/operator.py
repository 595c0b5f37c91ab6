"""An operator, as a process: ``python -m tests.chaos.operator NAME HISTORY NAMESRV``.

It asks clients of all kinds what they do, and lets members of the group *asked* consume messages
(:mod:`tests.chaos.asked`). A line on its standard input ends it, when each of these members has
answered both once more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress

from cometmq.admin import clients
from cometmq.admin.connection import Connection
from cometmq.admin.views import ClientView
from cometmq.client import Position, PullConsumer
from cometmq.errors import CometError, QuestionTimeout, QuestionUnsupported, Retry
from tests.chaos.asked import GOOD, GROUP, MESSAGES, TIMEOUT_MS
from tests.chaos.later import RECEIVERS_COUNT
from tests.chaos.topics import ASKED
from tests.chaos.workload import RETRY_S, name_of, queue_ref, run_delivery_client, until_told
from tests.support.faults.delivery_history import DeliveryRecorder

AT_ONCE = 3
PAUSE_S = 0.2
LISTED_MAX = 100  # clients


class Operator:
    """``ids``: of the messages to be consumed, by name."""

    def __init__(
        self, name: str, connection: Connection, ids: dict[str, str], recorder: DeliveryRecorder
    ) -> None:
        self._name = name
        self._connection = connection
        self._ids = ids
        self._recorder = recorder
        self._numbers = itertools.count()
        self.ends = False

    async def ask_on(self) -> None:
        """One question after the other, until it ends."""
        while not self.ends:
            with suppress(CometError):
                known = await self._clients()
                if known:
                    await self._ask(random.choice(known))
                if mine := [one for one in known if one.group == GROUP]:
                    await self._ask(random.choice(mine), random.choice(MESSAGES))
            await asyncio.sleep(PAUSE_S)

    async def until_all_answer(self) -> None:
        while True:
            with suppress(CometError):
                mine = [one for one in await self._clients() if one.group == GROUP]
                answers = [await self._ask(one) and await self._ask(one, GOOD) for one in mine]
                if answers == [True] * RECEIVERS_COUNT:
                    return
            await asyncio.sleep(RETRY_S)

    async def _clients(self) -> list[ClientView]:
        known = await clients.list_clients(self._connection, None, "", LISTED_MAX)
        # A producer that is a bare stub has no name.
        return [one for one in known if one.client_id and not one.is_away]

    async def _ask(self, client: ClientView, message: str = "") -> bool:
        """Whether it has answered."""
        question = f"{self._name}/{next(self._numbers)}"
        self._recorder.asked(question, client.client_id, message)
        try:
            answer = await self._answer(client, message)
        except CometError as error:
            in_fault = error.retry is not Retry.NEVER or isinstance(error, QuestionTimeout)
            # A producer that is a part of another client answers nothing.
            is_meant = client.kind == "producer" and isinstance(error, QuestionUnsupported)
            self._recorder.unanswered(question, error.name(), is_allowed=in_fault or is_meant)
            return False
        self._recorder.answered(question, answer)
        return True

    async def _answer(self, client: ClientView, message: str) -> str:
        """The verdict of its listener, or its own name."""
        if message:
            result = await clients.verify_message(
                self._connection, self._ids[message], client.group, client.client_id, TIMEOUT_MS
            )
            return result.verdict
        [told] = await clients.describe_clients(
            self._connection,
            client.client_id,
            kind=client.kind,
            group=client.group,
            with_stacks=True,
            timeout_ms=TIMEOUT_MS,
        )
        return told.client_id


async def message_ids(namesrv: str) -> dict[str, str]:
    """By name."""
    async with PullConsumer(namesrv, "operator") as consumer:
        while True:
            with suppress(CometError):
                batch = await consumer.pull(queue_ref((ASKED, 0)), Position(0, 0))
                return {name_of(message): message.message_id for message in batch.messages}
            await asyncio.sleep(RETRY_S)


async def play(name: str, recorder: DeliveryRecorder, namesrv: str) -> None:
    ids = await message_ids(namesrv)
    async with Connection(namesrv) as connection:
        operator = Operator(name, connection, ids, recorder)
        asking = [asyncio.create_task(operator.ask_on()) for _ in range(AT_ONCE)]
        await until_told()
        operator.ends = True
        await asyncio.gather(*asking)
        await operator.until_all_answer()


if __name__ == "__main__":
    run_delivery_client(play)
