"""How much one client may send to a topic, or read as a member of a group: messages and bytes per
second. Off unless a topic or a group says otherwise.

A client may use the quota of a second at once. It pays for a batch when it has been taken: so one
larger than a second's quota gets in, and the next ones wait for it. Pure; the time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from cometmq.errors import FlowControl, InvalidRequest

QUOTA_MAX = 1 << 40
CLIENTS_MAX = 10_000  # with something to pay for; above it new ones share an account
BURST_S = 1.0
_OTHERS = ""


@dataclass(frozen=True, slots=True)
class Quota:
    """0: no limit."""

    messages_per_s: int = 0
    bytes_per_s: int = 0

    def __bool__(self) -> bool:
        return bool(self.messages_per_s or self.bytes_per_s)


NO_QUOTA = Quota()


def check_quota(what: str, quota: Quota) -> None:
    """Raises InvalidRequest."""
    for name, value in (
        ("messages_per_s", quota.messages_per_s),
        ("bytes_per_s", quota.bytes_per_s),
    ):
        if not 0 <= value <= QUOTA_MAX:
            raise InvalidRequest(f"{what}: {name} is 0 (no limit) to {QUOTA_MAX}, not {value}")


class Account(NamedTuple):
    """Whose quota it is: a topic or a group, and a client."""

    of: str
    client: str


class QuotaTable:
    """What clients have still to pay for. ``what`` is for the refusal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._paid_at_s: dict[Account, float] = {}  # when all that was taken is paid for

    def __len__(self) -> int:
        return len(self._paid_at_s)

    def check(self, account: Account, now_s: float) -> None:
        """Raises FlowControl while the client has used its quota up, and says when it may go on."""
        paid_at_s = self._paid_at_s.get(self._place(account, now_s))
        if paid_at_s is not None and paid_at_s > now_s + BURST_S:
            wait_ms = ceil((paid_at_s - now_s - BURST_S) * 1000)
            raise FlowControl(
                f"client {account.client[:255]!r} has used up its quota {self._what} {account.of}",
                retry_after_ms=wait_ms,
            )

    def take(self, account: Account, quota: Quota, count: int, size: int, now_s: float) -> None:
        """The client has sent or got so many messages and bytes."""
        cost_s = 0.0
        if quota.messages_per_s:
            cost_s = count / quota.messages_per_s
        if quota.bytes_per_s:
            cost_s = max(cost_s, size / quota.bytes_per_s)
        if cost_s:
            place = self._place(account, now_s)
            self._paid_at_s[place] = max(self._paid_at_s.get(place, now_s), now_s) + cost_s

    def _place(self, account: Account, now_s: float) -> Account:
        if account in self._paid_at_s or len(self._paid_at_s) < CLIENTS_MAX:
            return account
        # Who has paid needs no entry.
        self._paid_at_s = {a: s for a, s in self._paid_at_s.items() if s > now_s}
        return account if len(self._paid_at_s) < CLIENTS_MAX else Account(account.of, _OTHERS)
