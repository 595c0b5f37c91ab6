"""The addresses of pull-holds. Pure; time is passed in.

A pull-hold keeps nothing, so its registration needs no epoch and no order: a pull-hold is listed
until it is silent for ``silence_max_s``.
"""

from __future__ import annotations

from collections.abc import Callable

from cometmq.errors import InvalidRequest, LimitExceeded
from services.namesrv.routes import ADDRESS, NAME


class PullholdTable:
    """All registered pull-holds, by (cluster, address). ``moved`` gets each that comes or goes."""

    def __init__(
        self,
        *,
        silence_max_s: float = 120.0,
        holds_max: int = 10_000,
        moved: Callable[[str, str], None] = lambda cluster, address: None,
    ) -> None:
        self._silence_max_s = silence_max_s
        self._holds_max = holds_max
        self._moved = moved
        self._heard_s: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._heard_s)

    def register(self, cluster: str, address: str, now_s: float) -> None:
        """Adds a pull-hold, or notes that it is alive. InvalidRequest, LimitExceeded."""
        if not NAME.fullmatch(cluster):
            raise InvalidRequest(f"cluster: {cluster[:127]!r} is not a name")
        if not ADDRESS.fullmatch(address):
            raise InvalidRequest(f"address: {address[:127]!r} is not host:port")
        key = (cluster, address)
        is_new = key not in self._heard_s
        if is_new and len(self._heard_s) >= self._holds_max:
            raise LimitExceeded(f"{self._holds_max} pullholds are registered (holds_max)")
        self._heard_s[key] = now_s
        if is_new:
            self._moved(cluster, address)

    def knows(self, cluster: str, address: str) -> bool:
        return (cluster, address) in self._heard_s

    def unregister(self, cluster: str, address: str) -> None:
        """Removes a pull-hold; an unknown one is no error."""
        if self._heard_s.pop((cluster, address), None) is not None:
            self._moved(cluster, address)

    def expire(self, now_s: float) -> list[str]:
        """Removes the pull-holds that were silent for too long. Returns their addresses."""
        silent = [k for k, s in self._heard_s.items() if now_s - s >= self._silence_max_s]
        for key in silent:
            self.unregister(*key)
        return [address for _, address in silent]

    def addresses(self, cluster: str) -> list[str]:
        """Sorted, each once; an empty ``cluster`` means all clusters."""
        return sorted({a for c, a in self._heard_s if cluster in ("", c)})
