"""A channel whose calls carry the secret of the internal ports.

Not by gRPC's interceptors, which put a queue and a task between a stream and its reader: the log
flows through such streams. Here the metadata is added where a call begins, and nothing stays in
its way.
"""

from __future__ import annotations

from typing import Any, Self

import grpc

from cometmq.rpc.secret import SharedSecret


class SecretChannel(grpc.aio.Channel):
    """``channel`` with the secret, as it is when a call begins, in the metadata of every call."""

    def __init__(self, channel: grpc.aio.Channel, secret: SharedSecret) -> None:
        self._channel = channel
        self._secret = secret

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_stream(*arguments, **options))

    def _with_secret(self, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return method(*arguments, metadata=self._secret.metadata(), **options)

        return call
