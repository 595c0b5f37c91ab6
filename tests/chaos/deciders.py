"""One producer of transactions, as a process that is killed with open ones:
``python -m tests.chaos.deciders NAME HISTORY NAMESRV``.

The number of a message tells every member of the group whether it is committed, so whoever is left
answers the checks. Some transactions are left open. A line on its standard input ends it in order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress

from cometmq.client import (
    Message,
    ReceivedMessage,
    SendStatus,
    TransactionProducer,
    TransactionState,
)
from cometmq.errors import CometError
from tests.chaos.topics import SETTLED
from tests.chaos.workload import RETRY_S, cancel, name_of, run_delivery_client, until_told
from tests.support.faults.delivery_history import DeliveryRecorder
from tests.support.faults.history import Outcome

GROUP = "deciders"
AT_ONCE = 4
WORK_S = 0.2  # between the half and its end: a killed process has open ones


def is_committed(number: int) -> bool:
    return number % 3 != 0


class Decider:
    def __init__(self, name: str, recorder: DeliveryRecorder) -> None:
        self._name = name
        self._recorder = recorder
        self._asked: set[str] = set()

    def check(self, message: ReceivedMessage) -> TransactionState:
        """Of some it is not known at the first time."""
        name = name_of(message)
        number = int(name.partition("/")[2])
        if number % 10 == 9 and name not in self._asked:
            self._asked.add(name)
            return TransactionState.UNKNOWN
        self._recorder.checked(name)
        return TransactionState.COMMIT if is_committed(number) else TransactionState.ROLLBACK

    async def transact(self, producer: TransactionProducer, numbers: Iterator[int]) -> None:
        """One transaction after the other."""
        for number in numbers:
            name = f"{self._name}/{number}"
            self._recorder.half(name, is_committed=is_committed(number))
            one = producer.transaction()
            try:
                receipt = await one.send(Message(SETTLED, name.encode()))
            except CometError:
                self._recorder.half_sent(name, Outcome.UNKNOWN)
                one.leave_open()
                await asyncio.sleep(RETRY_S)
                continue
            good = receipt.status is SendStatus.SEND_OK
            self._recorder.half_sent(name, Outcome.OK if good else Outcome.STORED)
            await asyncio.sleep(WORK_S)
            if number % 5 == 2:
                one.leave_open()
                continue
            self._recorder.ending(name)
            with suppress(CometError):  # then the checks end it
                await (one.commit() if is_committed(number) else one.rollback())


async def play(name: str, recorder: DeliveryRecorder, namesrv: str) -> None:
    decider = Decider(name, recorder)
    async with TransactionProducer(namesrv, GROUP, decider.check, topics=[SETTLED]) as producer:
        numbers = itertools.count()
        working = [asyncio.create_task(decider.transact(producer, numbers)) for _ in range(AT_ONCE)]
        await until_told()
        await cancel(working)
        # Until it is told again: it answers checks of what is left.
        print("done", flush=True)
        await until_told()


if __name__ == "__main__":
    run_delivery_client(play)
