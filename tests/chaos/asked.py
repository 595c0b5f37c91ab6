"""Members of the group *asked*. They are suspended, so that their listener has no messages but
those that an operator lets it consume.
"""

from __future__ import annotations

import asyncio

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from tests.chaos.workload import name_of
from tests.support.faults.delivery_history import DeliveryRecorder

GROUP = "asked"
TIMEOUT_MS = 3_000  # of a question
SLOW_S = 2 * TIMEOUT_MS / 1000
GOOD, FAILING, SLOW = "asked/good", "asked/failing", "asked/slow"  # the messages
MESSAGES = (GOOD, FAILING, SLOW)
VERDICTS = {GOOD: "success", FAILING: "exception"}  # the slow one has none in time


def member(namesrv: str, name: str, recorder: DeliveryRecorder) -> PushConsumer:
    """One that is neither open nor suspended yet."""

    async def listen(messages: list[ReceivedMessage]) -> None:
        message = name_of(messages[0])
        recorder.consumed(name, message)
        if message == SLOW:
            await asyncio.sleep(SLOW_S)
        elif message == FAILING:
            raise ValueError(message)

    return PushConsumer(namesrv, GROUP, listen, options=PushConsumerOptions(client_id=name))
