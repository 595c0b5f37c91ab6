"""What a server holds for peers that have not taken it yet, and which peers may have more. Pure:
the time is passed in.

A *peer* is a connection. It *owes* a call whose request has not come whole, that waits for room, or
whose answer it has not read. Such a call costs memory as long as the peer likes, so:

- An answer needs room before it is begun: within what its connection may have, and within one of
  two pools. The pool of *strangers* is for bytes above what a connection has read before, so one
  that never read takes nothing that is kept for those that do. Of that pool an address gets a part.
- Every connection has a few calls and a small answer without asking: a peer that begins, or makes
  small calls, never waits for others.
- Waiters are served in turn, connection by connection. A waiter that gets no room is refused. A
  peer that reads nothing is to be cut off: soon while others wait for room, else after a longer
  time.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cometmq.errors import AnswersUnread
from cometmq.rpc.shares import address_of

CALLS_FREE = 4  # of a connection, owed at a time, whatever others do
# unary calls in flight to those that are owed: a call that waits for changes owes nothing
IN_FLIGHT_FACTOR = 4
BYTES_FREE = 16 * 1024  # the same for the bytes of its answers
PATIENCE_S = 5.0  # with a peer that reads nothing, while others wait for room
WAIT_S = 8.0  # for room, without getting any; longer, for then there is some again
SCARCE_S = 1.0  # a waiter that has waited so long shows that there is too little
BYTES_PER_S_MIN = 64 * 1024  # a client that reads at least so fast gets the time it needs
PEERS_REMEMBERED = 10_000  # without a call; what they have read counts for their next


@dataclass(frozen=True, slots=True)
class UnreadLimits:
    """Of one port. Bytes are those of answers; the process holds each of them about twice."""

    bytes_max: int = 32 * 1024 * 1024
    bytes_per_connection_max: int = 16 * 1024 * 1024
    bytes_per_address_max: int = 8 * 1024 * 1024  # of its strangers
    calls_max: int = 512  # owed by all, before a connection that owes more than its few is refused
    silence_s_max: float = 30.0  # after it a connection that does not read is closed

    @property
    def strange_bytes_max(self) -> int:
        """What is above is kept for connections that have read before."""
        return self.bytes_max // 2


class _Address:
    __slots__ = ("host", "peer_count", "strange_bytes")

    def __init__(self, host: str) -> None:
        self.host = host
        self.peer_count = 0
        self.strange_bytes = 0


class Peer:
    """One connection."""

    __slots__ = (
        "account_count",
        "address",
        "held_bytes",
        "name",
        "owed_count",
        "progress_s",
        "read_bytes",
        "read_calls",
        "unary_count",
        "waiting",
    )

    def __init__(self, name: str, address: _Address) -> None:
        self.name = name
        self.address = address
        self.account_count = 0
        self.owed_count = 0
        self.held_bytes = 0
        self.read_bytes = 0  # up to what a connection may hold
        self.read_calls = 0
        self.unary_count = 0
        self.progress_s = -math.inf  # when it has taken something last
        self.waiting: deque[Waiter] = deque()

    @property
    def calls_allowed(self) -> int:
        """How many calls it may have at a time, while there are many in all."""
        return max(self.read_calls, CALLS_FREE)

    def knows(self, more_bytes: int) -> bool:
        """Whether it has read as much as it would have unread: it is no stranger to that."""
        return self.held_bytes + more_bytes <= max(self.read_bytes, BYTES_FREE)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is held for it."""
        return not (self.held_bytes or self.owed_count or self.waiting)

    def still_s(self, since_s: float, now_s: float) -> float:
        """For how long it has not got on."""
        return now_s - max(since_s, self.progress_s)


class Account:
    """One call. ``held_bytes``: reserved for its answer, or on the way to the peer."""

    __slots__ = ("held_bytes", "owed", "peer", "strange_bytes", "unary")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.held_bytes = 0
        self.strange_bytes = 0  # of these, in the pool of strangers
        self.owed = False
        self.unary = False


Notify: TypeAlias = Callable[[AnswersUnread | None], None]


class Waiter:
    """A call that waits for room. ``notify`` is called once: None, or why there is no room."""

    __slots__ = ("account", "notify", "since_s", "size_bytes")

    def __init__(self, account: Account, size_bytes: int, since_s: float, notify: Notify) -> None:
        self.account = account
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.notify = notify


class Ledger:
    """All connections of a port. Belongs to the event loop."""

    def __init__(self, limits: UnreadLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.strange_bytes = 0
        self.owed_count = 0
        self.unary_count = 0  # unary calls in flight, also those that wait
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._idle_count = 0
        self._addresses: dict[str, _Address] = {}
        self._unread: dict[Account, float] = {}  # calls that wait for their peer, and since when
        # Connections whose first waiter lacks nothing but room in its pool, in turn.
        self._turns: tuple[dict[Peer, None], dict[Peer, None]] = ({}, {})
        self._waiters: dict[Waiter, None] = {}
        self._at_owed: Callable[[], None] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether nothing is held for any peer, and none waits."""
        return not (self.owed_count or self.held_bytes or self._waiters)

    def at_owed(self, notify: Callable[[], None]) -> None:
        """``notify`` is called once: when the next call owes something."""
        self._at_owed = notify

    # --- calls ------------------------------------------------------------------------------------

    def open(self, name: str) -> Account:
        """A call of a connection, by gRPC's name of it."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._new_peer(name)
        elif not peer.account_count:
            self._idle_count -= 1
        peer.account_count += 1
        return Account(peer)

    def _new_peer(self, name: str) -> Peer:
        host = address_of(name)
        address = self._addresses.get(host)
        if address is None:
            address = self._addresses[host] = _Address(host)
        address.peer_count += 1
        peer = self._peers[name] = Peer(name, address)
        return peer

    def close(self, account: Account) -> None:
        """The call is over; whatever it had is free."""
        self.settle(account)
        self.give_back(account, account.held_bytes)
        peer = account.peer
        if account.unary:
            peer.unary_count -= 1
            self.unary_count -= 1
        peer.account_count -= 1
        if not peer.account_count:
            assert peer.is_clear
            self._peers.move_to_end(peer.name)
            self._idle_count += 1
            if self._idle_count > PEERS_REMEMBERED:
                self._forget_one()

    def _forget_one(self) -> None:
        peer = next(p for p in self._peers.values() if not p.account_count)
        del self._peers[peer.name]
        self._idle_count -= 1
        peer.address.peer_count -= 1
        if not peer.address.peer_count:
            del self._addresses[peer.address.host]

    def owe(self, account: Account, since_s: float | None) -> None:
        """A call's memory is kept for its peer. None: it is not the peer that is waited for."""
        assert not account.owed
        account.owed = True
        account.peer.owed_count += 1
        self.owed_count += 1
        if self._at_owed is not None:
            notify, self._at_owed = self._at_owed, None
            notify()
        if since_s is not None:
            self._unread[account] = since_s

    def settle(self, account: Account) -> None:
        """The call owes nothing any more."""
        if account.owed:
            account.owed = False
            account.peer.owed_count -= 1
            self.owed_count -= 1
            self._unread.pop(account, None)

    def admit(self, account: Account) -> None:
        """A unary call is to be served. AnswersUnread when there are many, and its connection has
        more than it has read before.
        """
        peer = account.peer
        in_flight = self.unary_count >= IN_FLIGHT_FACTOR * self.limits.calls_max
        if in_flight and peer.unary_count >= peer.calls_allowed:
            raise AnswersUnread(
                f"{peer.unary_count} calls of this connection are in flight (unread_calls_max)"
            )
        self.check_calls(account)
        account.unary = True
        peer.unary_count += 1
        self.unary_count += 1

    def check_calls(self, account: Account) -> None:
        """AnswersUnread when the connection owes as many calls as it may."""
        owed = account.peer.owed_count
        if self._many_owed and owed >= account.peer.calls_allowed:
            raise AnswersUnread(f"{owed} calls of this connection wait for it (unread_calls_max)")

    @property
    def _many_owed(self) -> bool:
        return self.owed_count >= self.limits.calls_max

    # --- room -------------------------------------------------------------------------------------

    def has_room(self, account: Account, size_bytes: int) -> bool:
        """Whether an answer of that size may be begun."""
        peer = account.peer
        return self._within_connection(peer, size_bytes) and self._within_pool(peer, size_bytes)

    def _within_connection(self, peer: Peer, size_bytes: int) -> bool:
        return _fits(peer.held_bytes, size_bytes, self.limits.bytes_per_connection_max)

    def _within_pool(self, peer: Peer, size_bytes: int) -> bool:
        limits = self.limits
        if peer.held_bytes + size_bytes <= BYTES_FREE:
            return True
        if peer.knows(size_bytes):
            return _fits(self.held_bytes, size_bytes, limits.bytes_max)
        return _fits(self.strange_bytes, size_bytes, limits.strange_bytes_max) and _fits(
            peer.address.strange_bytes, size_bytes, limits.bytes_per_address_max
        )

    def try_reserve(self, account: Account, size_bytes: int) -> bool:
        """Take room, if there is."""
        if account.peer.waiting or not self.has_room(account, size_bytes):
            return False
        self.charge(account, size_bytes)
        return True

    def charge(self, account: Account, size_bytes: int) -> None:
        """Take room, if there is or not: what is there already has to be counted."""
        strange = 0 if account.peer.knows(size_bytes) else size_bytes
        self._add(account, size_bytes, strange)

    def give_back(self, account: Account, size_bytes: int) -> None:
        """Free ``size_bytes`` of what is held for the call."""
        assert 0 <= size_bytes <= account.held_bytes, (size_bytes, account.held_bytes)
        if not size_bytes:
            return
        self._add(account, -size_bytes, -min(size_bytes, account.strange_bytes))
        if account.peer.waiting:
            self._take_turn(account.peer)
        self._serve()

    def _add(self, account: Account, size_bytes: int, strange_bytes: int) -> None:
        peer = account.peer
        for holder in (self, peer, account):
            holder.held_bytes += size_bytes
        for owner in (self, peer.address, account):
            owner.strange_bytes += strange_bytes

    def read(self, account: Account, now_s: float) -> None:
        """The peer has taken what is held: so much it may have unread again."""
        peer, limits = account.peer, self.limits
        peer.progress_s = now_s
        peer.read_calls = min(peer.read_calls + 1, limits.calls_max)
        read_bytes = peer.read_bytes + account.held_bytes
        peer.read_bytes = min(read_bytes, limits.bytes_per_connection_max)
        self.give_back(account, account.held_bytes)

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, account: Account, size_bytes: int, now_s: float, notify: Notify) -> Waiter:
        """Reserve later; ``notify`` is called then, or when the wait is refused."""
        waiter = Waiter(account, size_bytes, now_s, notify)
        self._waiters[waiter] = None
        account.peer.waiting.append(waiter)
        self._take_turn(account.peer)
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """The waiter stops waiting; one that has been notified stays as it is."""
        if waiter in self._waiters:
            del self._waiters[waiter]
            peer = waiter.account.peer
            peer.waiting.remove(waiter)
            self._take_turn(peer)
            self._serve()

    def _take_turn(self, peer: Peer) -> None:
        """Put a connection into the turn of its first waiter; into none if it has no waiter."""
        for turn in self._turns:
            turn.pop(peer, None)
        if peer.waiting and self._within_connection(peer, peer.waiting[0].size_bytes):
            self._turns[peer.knows(peer.waiting[0].size_bytes)][peer] = None

    def _serve(self) -> None:
        while any(self._turns) and self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Whether a waiter got room."""
        for known, turn in enumerate(self._turns):
            if not turn:
                continue
            peer = next(iter(turn))
            waiter = peer.waiting[0]
            if peer.knows(waiter.size_bytes) != known:  # it has read, or got more, meanwhile
                self._take_turn(peer)
                return True
            # A waiter that asks for less does not overtake: else this one might wait for ever.
            if self._within_pool(peer, waiter.size_bytes):
                peer.waiting.popleft()
                del self._waiters[waiter]
                self.charge(waiter.account, waiter.size_bytes)
                self._take_turn(peer)  # behind the others
                waiter.notify(None)
                return True
        return False

    # --- time -------------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> tuple[list[Waiter], list[Peer]]:
        """Waiters that are to be refused, and connections that are to be closed."""
        tired = [w for w in self._waiters if w.account.peer.still_s(w.since_s, now_s) >= WAIT_S]
        scarce = self._is_scarce(now_s)
        silent: dict[Peer, None] = {}
        for account, since_s in self._unread.items():
            peer = account.peer
            allowed_s = self.limits.silence_s_max + account.held_bytes / BYTES_PER_S_MIN
            stuck = scarce and peer.still_s(since_s, now_s) >= PATIENCE_S
            if stuck or now_s - since_s >= allowed_s:
                silent[peer] = None
        return tired, list(silent)

    def _is_scarce(self, now_s: float) -> bool:
        """Whether a waiter has waited long for what others hold, or would be refused."""
        first = [next(iter(turn)).waiting[0] for turn in self._turns if turn]
        return self._many_owed or any(now_s - waiter.since_s >= SCARCE_S for waiter in first)

    def validate(self) -> None:
        """The invariants; for tests."""
        peers = list(self._peers.values())
        assert self.held_bytes == sum(peer.held_bytes for peer in peers)
        assert self.owed_count == sum(peer.owed_count for peer in peers)
        assert self.unary_count == sum(peer.unary_count for peer in peers)
        assert self.strange_bytes == sum(a.strange_bytes for a in self._addresses.values())
        assert 0 <= self.strange_bytes <= self.held_bytes
        assert len(self._waiters) == sum(len(peer.waiting) for peer in peers)
        assert self._idle_count == sum(not peer.account_count for peer in peers)
        for peer in peers:
            assert peer.account_count or peer.is_clear
        for turn in self._turns:
            for peer in turn:
                assert not self._within_pool(peer, peer.waiting[0].size_bytes) or (
                    peer is not next(iter(turn))
                )


def _fits(held_bytes: int, more_bytes: int, bytes_max: int) -> bool:
    """Something larger than all there may be fits alone: else it would never be answered."""
    return not held_bytes or held_bytes + more_bytes <= bytes_max
