"""How much may be sent and read: messages and bytes per second, of each client of a topic or group,
of each address, and of each topic. Off unless an operator says otherwise.

A second's quota may be used at once. What has been taken is paid for afterwards: so a batch larger
than a second's quota gets in, and the next ones wait for it. A client is its id at its address, so
that nobody else uses its quota up; its address and the topic have quotas of their own, so that many
ids get no more. Pure; the time is passed in.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from cometmq.errors import FlowControl, InvalidRequest, LimitExceeded
from cometmq.messaging.topics import is_system

QUOTA_MAX = 1 << 40
ACCOUNTS_MAX = 10_000  # of one scope with something to pay for; above it new ones share one
NAMED_MAX = 1_000  # addresses with a quota of their own
BURST_S = 1.0
SWEEP_S = 1.0
EACH = ""  # the name of all that have no quota of their own
_NETWORK_BITS = 64  # of IPv6, that one customer has at least


class Way(StrEnum):
    """What is counted."""

    SEND = "sends"
    READ = "reads"


class Scope(StrEnum):
    """Whose quota it is. Clients have one in a topic (sends) or a group (reads)."""

    CLIENT = "client"
    ADDRESS = "address"
    TOPIC = "topic"


@dataclass(frozen=True, slots=True)
class Quota:
    """0: no limit."""

    messages_per_s: int = 0
    bytes_per_s: int = 0

    def __bool__(self) -> bool:
        return bool(self.messages_per_s or self.bytes_per_s)


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Limits:
    """What an address or a topic may send and read. None: as each one that says nothing."""

    send: Quota | None = None
    read: Quota | None = None

    def of(self, way: Way) -> Quota | None:
        """The quota of sends or of reads."""
        return self.send if way is Way.SEND else self.read


_NO_LIMITS = Limits()


def check_quota(what: str, quota: Quota) -> None:
    """Raises InvalidRequest."""
    for name, value in (
        ("messages_per_s", quota.messages_per_s),
        ("bytes_per_s", quota.bytes_per_s),
    ):
        if not 0 <= value <= QUOTA_MAX:
            raise InvalidRequest(f"{what}: {name} is 0 (no limit) to {QUOTA_MAX}, not {value}")


@lru_cache(maxsize=4_096)
def address_name(text: str) -> str:
    """The name under which an address is counted: of IPv6 the /64 that it is in. Empty: not known.
    Raises InvalidRequest.
    """
    if not text:
        return ""
    try:
        network = ipaddress.ip_interface(text).network
    except ValueError:
        raise InvalidRequest(f"{text[:100]!r} is no IP address") from None
    is_whole = network.num_addresses == 1
    if not is_whole and (network.version == 4 or network.prefixlen != _NETWORK_BITS):
        raise InvalidRequest(f"{text}: an address, or a /{_NETWORK_BITS} of IPv6")
    return counted_as(network.network_address.packed)


@lru_cache(maxsize=4_096)
def counted_as(address: bytes) -> str:
    """The name under which an address of 4 or 16 bytes is counted."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))


class Caller(NamedTuple):
    """A client: the id that it names, and the name of its address. Both may be empty: not known."""

    client: str
    address: str


class QuotaRules:
    """Which quotas there are. Those without any limit are not kept, but for what an address or a
    topic has instead of the limit of each.
    """

    def __init__(self) -> None:
        self.limits_sends = self.limits_reads = False  # whether any quota does
        # Of each client: sends by topic, reads by group.
        self.of_clients: dict[Way, dict[str, Quota]] = {Way.SEND: {}, Way.READ: {}}
        self._limits: dict[Scope, dict[str, Limits]] = {Scope.ADDRESS: {}, Scope.TOPIC: {}}

    def put_clients(self, way: Way, of: str, quota: Quota) -> None:
        """What each client may send to a topic, or read as a member of a group."""
        self.of_clients[way].pop(of, None)
        if quota:
            self.of_clients[way][of] = quota
        self._look()

    def put(self, scope: Scope, name: str, limits: Limits) -> None:
        """What an address or a topic, or EACH, may send and read."""
        if limits == _NO_LIMITS:
            self._limits[scope].pop(name, None)
        else:
            self._limits[scope][name] = limits
        self._look()

    def _look(self) -> None:
        every = [one for named in self._limits.values() for one in named.values()]
        self.limits_sends = bool(self.of_clients[Way.SEND]) or any(one.send for one in every)
        self.limits_reads = bool(self.of_clients[Way.READ]) or any(one.read for one in every)

    def get(self, scope: Scope, name: str) -> Limits:
        """What was put."""
        return self._limits[scope].get(name, _NO_LIMITS)

    def __iter__(self) -> Iterator[tuple[Scope, str, Limits]]:
        """All limits of addresses and topics, in order."""
        for scope, named in self._limits.items():
            for name in sorted(named):
                yield scope, name, named[name]

    def __len__(self) -> int:
        return sum(map(len, self._limits.values()))

    def check_room(self, scope: Scope, name: str) -> None:
        """LimitExceeded: too many addresses have limits of their own."""
        named = self._limits[scope]
        if scope is Scope.ADDRESS and name not in named and len(named) > NAMED_MAX:
            raise LimitExceeded(f"{NAMED_MAX} addresses have quotas of their own: unset some")

    def forget_topic(self, topic: str) -> None:
        """A topic is deleted."""
        if topic in self.of_clients[Way.SEND]:
            self.put_clients(Way.SEND, topic, NO_QUOTA)
        if topic in self._limits[Scope.TOPIC]:
            self.put(Scope.TOPIC, topic, _NO_LIMITS)

    def is_topic_read_limited(self, topic: str) -> bool:
        """Whether a quota other than that of a group's clients counts who reads the topic."""
        addresses = self._limits[Scope.ADDRESS].values()
        return bool(self.of_topic(Way.READ, topic)) or any(one.read for one in addresses)

    def of_topic(self, way: Way, topic: str) -> Quota:
        """What all clients of a topic have together; topics of the broker's own have no limit."""
        return self._of(way, Scope.TOPIC, topic) if not is_system(topic) else NO_QUOTA

    def of_address(self, way: Way, address: str) -> Quota:
        """What one address has in all topics and groups."""
        return self._of(way, Scope.ADDRESS, address) if address else NO_QUOTA

    def _of(self, way: Way, scope: Scope, name: str) -> Quota:
        found = self.get(scope, name).of(way)
        return found if found is not None else self.get(scope, EACH).of(way) or NO_QUOTA


class Account(NamedTuple):
    """Who pays. ``of``: the topic or group of a client, the topic, or nothing."""

    scope: Scope
    of: str = ""
    client: str = ""
    address: str = ""


class Charge(NamedTuple):
    """What counts against which quota. ``has_place``: never shares an account."""

    account: Account
    quota: Quota
    has_place: bool = True


class Use(NamedTuple):
    """Messages and bytes of one topic that were sent or read, and what they count against."""

    charges: Sequence[Charge]
    message_count: int
    size_bytes: int


class QuotaMeter:
    """Counts sends or reads against all quotas. ``throttled`` is called at each refusal."""

    def __init__(
        self,
        way: Way,
        rules: Callable[[], QuotaRules],
        throttled: Callable[[Way, Scope], None] = lambda _way, _scope: None,
    ) -> None:
        self._way = way
        self._rules = rules
        self._throttled = throttled
        self._books = {scope: _Book() for scope in Scope}

    def charges(self, caller: Caller, topic: str, group: str = "") -> list[Charge]:
        """What messages of a topic count against. ``group``: reads as its member. No topic: what
        is of no topic of its own.
        """
        rules, way = self._rules(), self._way
        of = topic if way is Way.SEND else group
        found = []
        if quota := rules.of_clients[way].get(of):
            account = Account(Scope.CLIENT, of, caller.client, caller.address)
            found.append(Charge(account, quota, has_place=False))
        if quota := rules.of_address(way, caller.address):
            account = Account(Scope.ADDRESS, address=caller.address)
            is_named = bool(rules.get(Scope.ADDRESS, caller.address).of(way))
            found.append(Charge(account, quota, is_named))
        if topic and (quota := rules.of_topic(way, topic)):
            found.append(Charge(Account(Scope.TOPIC, topic), quota))
        return found

    def check(self, charges: Iterable[Charge], now_s: float) -> None:
        """Raises FlowControl while a quota is used up, and says when it may go on."""
        for charge in charges:
            wait_s = self._books[charge.account.scope].wait_s(charge, now_s)
            if wait_s > 0:
                self._throttled(self._way, charge.account.scope)
                raise FlowControl(self._refusal(charge.account), retry_after_ms=ceil(wait_s * 1000))

    def _refusal(self, account: Account) -> str:
        scope, of, client, address = account
        is_send = self._way is Way.SEND
        what = f"has used up its quota of {self._way.value}"
        option = "--send" if is_send else "--read"
        if scope is Scope.CLIENT:
            to, kind = ("to topic", "topic") if is_send else ("of group", "group")
            name = (client or address)[:255]
            command = f"cometmq {kind} update {of} {option}-quota"
            return f"client {name!r} {what} {to} {of} ({command} changes it)"
        name = address if scope is Scope.ADDRESS else of
        command = f"cometmq quota set {scope.value} {name} {option}"
        return f"{scope.value} {name} {what} ({command} changes it)"

    def take(self, uses: Iterable[Use], now_s: float) -> None:
        """So much was sent or read."""
        counts, sizes = Counter[Charge](), Counter[Charge]()
        for charges, message_count, size_bytes in uses:
            for charge in charges:
                counts[charge] += message_count
                sizes[charge] += size_bytes
        for charge, count in counts.items():
            self._books[charge.account.scope].take(charge, count, sizes[charge], now_s)


class _Book:
    """What accounts of one scope have still to pay for."""

    def __init__(self) -> None:
        self._paid_at_s: dict[Account, float] = {}  # when all that was taken is paid for
        self._swept_s = 0.0

    def wait_s(self, charge: Charge, now_s: float) -> float:
        """How long until the account may take more; not above 0: it may."""
        paid_at_s = self._paid_at_s.get(self._place(charge, now_s), now_s)
        return paid_at_s - now_s - BURST_S

    def take(self, charge: Charge, count: int, size_bytes: int, now_s: float) -> None:
        quota, cost_s = charge.quota, 0.0
        if quota.messages_per_s:
            cost_s = count / quota.messages_per_s
        if quota.bytes_per_s:
            cost_s = max(cost_s, size_bytes / quota.bytes_per_s)
        if cost_s:
            place = self._place(charge, now_s)
            self._paid_at_s[place] = max(self._paid_at_s.get(place, now_s), now_s) + cost_s

    def _place(self, charge: Charge, now_s: float) -> Account:
        account = charge.account
        if account in self._paid_at_s or len(self._paid_at_s) < ACCOUNTS_MAX:
            return account
        if now_s >= self._swept_s + SWEEP_S:  # an account that has paid needs no entry
            self._paid_at_s = {a: s for a, s in self._paid_at_s.items() if s > now_s}
            self._swept_s = now_s
        has_room = charge.has_place or len(self._paid_at_s) < ACCOUNTS_MAX
        return account if has_room else Account(account.scope, account.of)
