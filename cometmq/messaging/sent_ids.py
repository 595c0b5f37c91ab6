"""Which messages of the structured ``Send`` are stored already: a client that got no answer calls
again.

Clients of ``Send`` give their messages unique ids of any form (UNIQ_KEY); RocketMQ's clients number
theirs across all brokers, so that a broker sees gaps. So each id is kept, for a minute. Pure: time
is a parameter.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from hashlib import blake2b
from typing import NamedTuple

IDS_MAX = 131_072  # of all clients
IDS_PER_CLIENT_MAX = 1_024
KEPT_S = 60.0
ID_LENGTH_MAX = 64  # of a longer id its hash is kept

_NUMBERED = re.compile(r"[0-9A-F]{34}")
_STREAM_DIGITS = 26


class SentId(NamedTuple):
    """An id that a client gave a message. ``client``: what the ids of one client have in common, or
    else its address, in hexadecimal digits.
    """

    client: str
    unique_id: str


def sent_id(unique_id: str, born_host: bytes) -> SentId:
    """The id of a message that came from this host (address and port, as a record has it)."""
    if len(unique_id) > ID_LENGTH_MAX:
        unique_id = blake2b(unique_id.encode(), digest_size=16).hexdigest()
    is_numbered = _NUMBERED.fullmatch(unique_id) is not None
    return SentId(unique_id[:_STREAM_DIGITS] if is_numbered else born_host[:-4].hex(), unique_id)


class _Entry(NamedTuple):
    unique_id: str
    log_offset: int
    came_s: float


class _Client:
    """The newest ids of one client."""

    __slots__ = ("entries", "places")

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()  # oldest first
        self.places: dict[str, _Entry] = {}  # of an id that came twice the last

    def forget_oldest(self) -> None:
        gone = self.entries.popleft()
        if self.places[gone.unique_id] is gone:
            del self.places[gone.unique_id]


class SentIds:
    """The newest ids of all clients, the client that sent longest ago first. Above a limit the
    oldest ids go.
    """

    def __init__(
        self, ids_max: int = IDS_MAX, ids_per_client_max: int = IDS_PER_CLIENT_MAX
    ) -> None:
        self._ids_max = ids_max
        self._ids_per_client_max = ids_per_client_max
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, sent: SentId, now_s: float) -> int | None:
        """Log offset of the message that came with this id in the last minute."""
        client = self._clients.get(sent.client)
        entry = None if client is None else client.places.get(sent.unique_id)
        return None if entry is None or now_s - entry.came_s > KEPT_S else entry.log_offset

    def add(self, sent: SentId, log_offset: int, now_s: float) -> None:
        """A message was stored there."""
        client = self._clients.get(sent.client)
        if client is None:
            client = self._clients[sent.client] = _Client()
        else:
            self._clients.move_to_end(sent.client)
        entry = client.places[sent.unique_id] = _Entry(sent.unique_id, log_offset, now_s)
        client.entries.append(entry)
        self._count += 1
        if len(client.entries) > self._ids_per_client_max:
            client.forget_oldest()
            self._count -= 1
        while self._count > self._ids_max:
            self._forget_first()
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        """Clients that have sent nothing for so long lose their ids."""
        while now_s - next(iter(self._clients.values())).entries[-1].came_s > KEPT_S:
            self._forget_first()

    def _forget_first(self) -> None:
        """The oldest id of the client that sent longest ago."""
        name, client = next(iter(self._clients.items()))
        client.forget_oldest()
        self._count -= 1
        if not client.entries:
            del self._clients[name]

    def validate(self) -> None:
        """Assert the bounds; for tests."""
        assert self._count == sum(len(client.entries) for client in self._clients.values())
        assert self._count <= self._ids_max
        for client in self._clients.values():
            assert 0 < len(client.entries) <= self._ids_per_client_max
            assert client.places.keys() == {entry.unique_id for entry in client.entries}
