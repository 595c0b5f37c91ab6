"""Recalls delayed messages: asks the writer of the broker group that stored one until it has
answered. A recall that comes twice changes nothing.
"""

from __future__ import annotations

import random

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ProducerOptions, backoff_policy
from cometmq.clock import Clock
from cometmq.errors import CometError, PeerUnavailable, Retry, SendTimeout
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.retry import Backoff
from cometmq.rpc.streams import ask
from cometmq.v1 import broker_pb2


class Recaller:
    """Of one producer."""

    def __init__(
        self,
        options: ProducerOptions,
        connections: Connections,
        routes: RouteWatcher,
        clock: Clock,
    ) -> None:
        self._options = options
        self._namespace = Namespace(options.namespace)
        self._connections = connections
        self._routes = routes
        self._clock = clock

    async def recall(self, broker_group: str, handle: str) -> bool:
        """Whether it was in time. SendTimeout: it is not known; else why it was refused."""
        backoff = Backoff(backoff_policy(self._options), random.Random())
        deadline_s = self._clock.monotonic_s() + self._options.delivery_timeout_ms / 1000
        while True:
            try:
                return await self._call(broker_group, handle)
            except CometError as error:
                self._namespace.strip(error)
                if error.retry is Retry.NEVER:
                    raise
                if self._clock.monotonic_s() >= deadline_s:
                    raise SendTimeout(
                        f"Broker group {broker_group!r} has not said whether the message was "
                        "recalled."
                    ).after(error) from error
            self._routes.doubt(broker_group)
            await self._routes.wait_change(backoff.next_s())

    async def _call(self, broker_group: str, handle: str) -> bool:
        writer = self._routes.require_writer(broker_group)
        stub = self._connections.broker(writer.address)
        request = broker_pb2.RecallRequest(handles=[handle])
        timeout_s = self._options.request_timeout_ms / 1000
        response = await ask(stub.Recall, request, timeout_s)
        if len(response.results) != 1:
            raise PeerUnavailable("The broker's answer does not fit the recall.")
        result = response.results[0]
        if result.HasField("error"):
            raise from_proto(result.error)
        return result.recalled
