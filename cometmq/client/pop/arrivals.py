"""Waits of consumers whose group receives (POP) for messages, at a pull-hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf

from cometmq.client.options import ConsumerOptions
from cometmq.client.pop.calls import PopAnswer, filter_proto
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.errors import CometError
from cometmq.model import Filter
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import broker_pb2

UNKNOWN_AGAIN_S = 1.0  # while no broker group is known


class PopArrivals:
    """``subscriptions`` are those of the consumer, by topic."""

    def __init__(
        self,
        calls: BrokerCalls,
        options: ConsumerOptions,
        long_poller: LongPoller,
        subscriptions: Mapping[str, Filter],
    ) -> None:
        self._calls = calls
        self._again_s = options.poll_backoff_max_ms / 1000
        self._long_poller = long_poller
        self._subscriptions = subscriptions

    async def wait(
        self,
        answers: Mapping[str, PopAnswer],
        timeout_s: float,
        sooner: asyncio.Event,
    ) -> bool:
        """Whether to ask again: one of the queues that had nothing may have something, or
        ``sooner`` is set. False: the time is over, and nothing has come. ``answers``: the last one
        of each broker group; they may be old, for what came since is found at once.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        again_at_s = min((a.again_at_s for a in answers.values() if a.again_at_s), default=inf)
        timeout_s = max(0.0, min(ends_s, again_at_s) - loop.time())
        waits: list[asyncio.Task[bool]] = [
            asyncio.create_task(self._park(broker_group, one, timeout_s))
            for broker_group, answer in answers.items()
            for one in answer.positions
        ]
        if not waits:
            waits.append(asyncio.create_task(self._route_change(timeout_s)))
        waits.append(asyncio.create_task(sooner.wait()))
        try:
            done, _ = await asyncio.wait(
                waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await stop_all(waits)
        return any(task.result() for task in done) or again_at_s <= min(ends_s, loop.time())

    async def _route_change(self, timeout_s: float) -> bool:
        await self._calls.wait(min(timeout_s, UNKNOWN_AGAIN_S))
        return True

    async def _park(
        self, broker_group: str, one: broker_pb2.ReceivePosition, timeout_s: float
    ) -> bool:
        """Whether something may have come; False: the time is over. While no pull-hold answers, the
        broker is asked now and then.
        """
        topic = self._calls.namespace.shown(one.queue.topic)
        pull = broker_pb2.PullRequest(
            group=self._calls.wire_group,
            queue=one.queue,
            position=one.position,
            filter=filter_proto(self._subscriptions.get(topic, Filter())),
        )
        loop = asyncio.get_running_loop()
        deadline_s, number = loop.time() + timeout_s, one.return_number
        while (left_s := deadline_s - loop.time()) > 0:
            try:
                answer = await self._long_poller.park_for_arrival(
                    broker_group, pull, number, left_s
                )
            except CometError:  # the broker will say it, if it is of the same mind
                answer = None
            if answer is None:
                await asyncio.sleep(min(left_s, self._again_s))
                return True
            response, number = answer
            if response.status == broker_pb2.PULL_STATUS_FOUND:
                return True
            pull.position.CopyFrom(response.next_position)
        return False
