"""Who holds how much: addresses, their connections, and the calls of those, with the limits of
each. Pure.
"""

from __future__ import annotations

from typing import Any

from cometmq.errors import LimitExceeded
from cometmq.rpc.shares import Shares, address_of
from services.pullhold.model import Hold, HoldLimits, Session


class _Client:
    __slots__ = ("hold_count", "session_count")

    def __init__(self) -> None:
        self.hold_count = 0
        self.session_count = 0


class Clients:
    """All clients that have an open call."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._clients: dict[str, _Client] = {}
        self._streams = Shares(
            limits.streams_per_peer_max, "calls that hold", "streams_per_peer_max"
        )
        self._holds = Shares(limits.holds_per_peer_max, "held pulls", "holds_per_peer_max")
        self.hold_count = 0  # of all clients

    def __len__(self) -> int:
        return len(self._clients)

    def open(self, client: str, inbox: Any) -> Session:
        """A new call of a client. LimitExceeded."""
        if client not in self._clients and len(self._clients) >= self._limits.clients_max:
            raise LimitExceeded(f"{self._limits.clients_max} clients are here (clients_max)")
        session = Session(client, address_of(client), inbox)
        self._streams.take(session.address)
        self._clients.setdefault(client, _Client()).session_count += 1
        return session

    def close(self, session: Session) -> None:
        """The call is over; its holds have ended."""
        assert not session.holds
        self._streams.give_back(session.address)
        client = self._clients[session.client]
        client.session_count -= 1
        if not client.session_count:
            assert not client.hold_count
            del self._clients[session.client]

    def check_room(self, session: Session) -> None:
        """LimitExceeded unless the call may hold one more."""
        limits = self._limits
        if self.hold_count >= limits.holds_max:
            raise LimitExceeded(f"{limits.holds_max} pulls are held (holds_max)")
        if self._clients[session.client].hold_count >= limits.holds_per_client_max:
            limit = limits.holds_per_client_max
            raise LimitExceeded(f"{limit} pulls of the client are held (holds_per_client_max)")
        if len(session.holds) >= limits.holds_per_stream_max:
            limit = limits.holds_per_stream_max
            raise LimitExceeded(f"{limit} pulls of the stream are held (holds_per_stream_max)")
        self._holds.check(session.address)

    def add(self, hold: Hold) -> None:
        """The call holds one more; :meth:`check_room` has been asked."""
        self._holds.take(hold.session.address)
        hold.session.holds[hold.hold_id] = hold
        self._clients[hold.session.client].hold_count += 1
        self.hold_count += 1

    def remove(self, hold: Hold) -> None:
        """The hold has ended."""
        self._holds.give_back(hold.session.address)
        del hold.session.holds[hold.hold_id]
        self._clients[hold.session.client].hold_count -= 1
        self.hold_count -= 1

    def validate(self) -> None:
        """For tests."""
        assert self.hold_count == sum(client.hold_count for client in self._clients.values())
