"""A consumer that receives is a member of its group, as operators see it: one stream to each broker
group that has its topics. It divides nothing with the other members, so it is not informed of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from cometmq.client.group.membership import Membership
from cometmq.client.options import ConsumerOptions, backoff_policy
from cometmq.client.pop.calls import PopCalls
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.remote.answers import Answers
from cometmq.model import Filter
from cometmq.rpc.tasks import Tasks, stop_all


class PopMember:
    """``subscriptions`` are those of the consumer, by topic. Belongs to the event loop."""

    def __init__(
        self,
        options: ConsumerOptions,
        calls: BrokerCalls,
        pop: PopCalls,
        subscriptions: Mapping[str, Filter],
    ) -> None:
        self._pop = pop
        self._subscriptions = subscriptions
        self._changed = asyncio.Event()
        self._following: list[asyncio.Task[None]] = []
        self._membership = Membership(
            calls.client_id,
            secrets.token_hex(8),
            "",
            False,
            0,
            calls,
            backoff_policy(options),
            on_change=lambda: None,
            on_reset=lambda _broker_group: None,
            receives=True,
        )

    @property
    def retry_times_max(self) -> int | None:
        """How often the group's messages are tried again, as brokers say; None: not known."""
        return self._membership.known_retry_times_max

    def answer(self, answers: Answers) -> None:
        """Before the start: let brokers ask this client questions."""
        self._membership.answers = answers

    def start(self, tasks: Tasks) -> None:
        """A member from the first subscription on."""
        self._following = [tasks.start(self._follow(tasks), "stay a member")]

    def look_again(self) -> None:
        """Takes notice that other topics are read, or at other broker groups."""
        self._changed.set()

    async def _follow(self, tasks: Tasks) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            groups = self._pop.broker_groups()
            await self._membership.update(self._subscriptions, groups, tasks)

    async def leave(self) -> None:
        """A member no more."""
        await stop_all(self._following)  # else a change of routes would make it one again
        await self._membership.leave()
