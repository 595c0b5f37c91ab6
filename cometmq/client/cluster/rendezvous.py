"""Which of several equal servers a client prefers. Pure: the same for everybody who asks.

Rendezvous hashing: each (client, server) pair has a weight, a client prefers the heavier. So
clients spread evenly, and when a server comes or goes only its own share of them moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def ranked(client_id: str, addresses: Iterable[str]) -> list[str]:
    """The addresses, each once, the preferred one first."""
    return sorted(set(addresses), key=lambda address: (_weight(client_id, address), address))


def _weight(client_id: str, address: str) -> bytes:
    # The NUL keeps ("a", "bc") and ("ab", "c") apart; neither text may hold one.
    return blake2b(f"{client_id}\0{address}".encode(), digest_size=8).digest()
