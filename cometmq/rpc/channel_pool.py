"""Channels that are kept, one for each address, and replaced when their connection is not up.

A member whose pod was replaced has another address behind the same name within seconds. A channel
keeps the address that it has, for as long as an attempt may take, and looks the name up more
and more rarely while there is none. So no call waits for a channel that failed: the next call
gets a new one, which looks the name up and connects at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from cometmq.clock import Clock, SystemClock
from cometmq.rpc.channels import open_channel
from cometmq.rpc.forks import FORKS
from cometmq.rpc.retry import BackoffPolicy

if TYPE_CHECKING:  # clients have none
    from cometmq.rpc.secret import SharedSecret

# How long an attempt may take: a machine that has gone is soon left, one that is far away reached.
DIAL = BackoffPolicy(first_s=1.0, max_s=5.0)
SHARED_S = 0.1  # callers that ask together use one attempt
# A call that its channel cancels looks as if its task were cancelled: calls end by themselves.
GRACE_S = 600.0  # for calls that were in flight: a server that stops lets them end
DIALLING_GRACE_S = 6.0  # for calls that wait for an attempt; others would be made for ever
# gRPC handles cancelled calls a moment later. Another event loop of the process would get
# what is meant for this one, and log that this one is closed.
CANCELLED_S = 0.02

_LOST = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
_DIALLING = (grpc.ChannelConnectivity.CONNECTING, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


@dataclass(slots=True)
class _Kept:
    channel: grpc.aio.Channel
    made_s: float
    failures: int  # attempts in a row that came to nothing, before this one

    @property
    def dial_s(self) -> float:
        return DIAL.ceiling_s(self.failures)


class ChannelPool:
    """Channels by address and secret. A port that must not learn the secret never gets it because
    another caller uses the same address as an internal one.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept: dict[tuple[str, SharedSecret | None], _Kept] = {}
        self._closing = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    def get(self, address: str, secret: SharedSecret | None = None) -> grpc.aio.Channel:
        """The channel for one call, not to be kept for the next. ClientForked."""
        FORKS.check()
        known = self._kept.get((address, secret))
        failures = 0
        if known is not None:
            state = known.channel.get_state()
            if not self._failed(known, state):
                return known.channel
            # Only what was connected is idle.
            idle = state is grpc.ChannelConnectivity.IDLE
            failures = 0 if idle else known.failures + 1
            self._retire(known)
        made_s = self._clock.monotonic_s()
        kept = _Kept(
            open_channel(address, secret, dial_s=DIAL.ceiling_s(failures)), made_s, failures
        )
        self._kept[address, secret] = kept
        return kept.channel

    def _failed(self, kept: _Kept, state: grpc.ChannelConnectivity) -> bool:
        if state is grpc.ChannelConnectivity.READY:
            kept.failures = 0
            return False
        age_s = self._clock.monotonic_s() - kept.made_s
        return age_s > (SHARED_S if state in _LOST else kept.dial_s)

    def drop(self, address: str) -> None:
        """Another process, or none, is at the address now: the next call connects again."""
        for key in [key for key in self._kept if key[0] == address]:
            self._retire(self._kept.pop(key))

    def keep_only(self, addresses: set[str]) -> None:
        """Drop all others."""
        for address in {address for address, _ in self._kept} - addresses:
            self.drop(address)

    def _retire(self, kept: _Kept) -> None:
        grace_s = DIALLING_GRACE_S if kept.channel.get_state() in _DIALLING else GRACE_S
        task = asyncio.create_task(self._close_late(kept.channel, grace_s))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _close_late(self, channel: grpc.aio.Channel, grace_s: float) -> None:
        # Not by gRPC's own grace, which nothing can cut short.
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._closing.wait()
        await channel.close()

    async def close(self) -> None:
        """End all calls."""
        self._closing.set()
        kept, self._kept = self._kept, {}
        retiring = list(self._retiring)
        for one in kept.values():
            await one.channel.close()
        await asyncio.gather(*retiring)
        if kept or retiring:
            await asyncio.sleep(CANCELLED_S)
