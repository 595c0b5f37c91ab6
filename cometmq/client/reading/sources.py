"""From which member of a broker group queues are read now.

From the follower that the last answer suggested, else from the writer, which has what is new first.
Who does not answer is passed over for a while: so reading goes on, from a follower, while a broker
group has no writer, or one that name servers still list though it has gone.
"""

from __future__ import annotations

import random

from cometmq.client.cluster.routes import RouteWatcher
from cometmq.clock import Clock, SystemClock
from cometmq.errors import (
    BrokerDraining,
    BrokerStarting,
    CometError,
    FlowControl,
    PeerUnavailable,
    PositionFenced,
    StoreFailed,
)
from cometmq.rpc.failure_backoff import FailureBackoff
from cometmq.rpc.retry import BackoffPolicy
from cometmq.v1 import common_pb2, namesrv_pb2

PASS_OVER = BackoffPolicy(first_s=1.0, max_s=10.0)
# What a writer refuses for other reasons no follower knows better.
_GONE = (PeerUnavailable, BrokerStarting, BrokerDraining, StoreFailed)

Member = namesrv_pb2.Member


class Sources:
    """Shared by all that a client reads."""

    def __init__(self, routes: RouteWatcher, *, clock: Clock | None = None) -> None:
        self._routes = routes
        self._clock = clock or SystemClock()
        self._aside = FailureBackoff(PASS_OVER, random.Random())

    def choose(self, broker_group: str, suggested: int | None) -> Member:
        """Whom to ask. PeerUnavailable: no member of the group is known."""
        members = sorted(self._routes.members(broker_group), key=lambda m: _rank(m, suggested))
        if not members:
            raise PeerUnavailable(f"Broker group {broker_group!r} has no live member.")
        now_s = self._clock.monotonic_s()
        there = (member for member in members if not self._aside.is_aside(_name(member), now_s))
        return next(there, members[0])

    def answered(self, member: Member) -> None:
        """It lives."""
        self._aside.answered(_name(member))

    def failed(self, member: Member, error: CometError) -> None:
        """Takes notice that a pull from the member ended with this error."""
        if isinstance(error, PositionFenced | FlowControl):
            return
        if is_writer(member):
            if not isinstance(error, _GONE):
                return
            self._routes.doubt(member.broker_group)
        self._aside.failed(_name(member), self._clock.monotonic_s())


def is_writer(member: Member) -> bool:
    return member.role == common_pb2.MEMBER_ROLE_WRITER


def _rank(member: Member, suggested: int | None) -> tuple[bool, bool, int, int]:
    """The preferred one first: of followers the one with the newest epoch."""
    return member.member_id != suggested, not is_writer(member), -member.epoch, member.member_id


def _name(member: Member) -> str:
    # With the epoch: a member that restarts at the same address counts as another.
    return f"{member.address} {member.epoch}"
