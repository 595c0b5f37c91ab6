"""Which clients have streams open at this broker: members of groups, and producers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cometmq.errors import ClientNotFound, InvalidRequest
from cometmq.messaging.groups import Stay
from services.broker.groups.membership import Groups, Origin
from services.broker.groups.questions import Questioned

CLIENTS_PER_PAGE_MAX = 1_000


@dataclass(frozen=True, slots=True, order=True)
class Client:
    """``number``: of its stream. A producer has no group, and no name until it sends one."""

    group: str
    client_id: str
    number: int
    origin: Origin
    is_away: bool = False

    @property
    def key(self) -> str:
        """Its place among all clients."""
        return f"{self.group}\0{self.client_id}\0{self.number:020}"


class Senders:
    """The send streams that are open."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Origin, Questioned]] = {}

    @contextmanager
    def sending(self, origin: Origin, questioned: Questioned) -> Iterator[None]:
        """A stream, as long as the block lasts."""
        number = next(self._numbers)
        self._open[number] = origin, questioned
        try:
            yield
        finally:
            del self._open[number]

    def clients(self) -> Iterator[Client]:
        for number, (origin, questioned) in self._open.items():
            yield Client("", questioned.client_id, number, origin)

    def find(self, client_id: str) -> tuple[Client, Questioned] | None:
        """The newest stream of a producer: of one that can be asked, if there is one. Consumers and
        producers have others of their name, for replies and traces.
        """
        mine = [
            (bool(questioned.known), number)
            for number, (_, questioned) in self._open.items()
            if questioned.client_id == client_id
        ]
        if not mine:
            return None
        number = max(mine)[1]
        origin, questioned = self._open[number]
        return Client("", client_id, number, origin), questioned


class ClientList:
    """Pages of clients, in order of group, client id and stream. Belongs to the event loop."""

    def __init__(self, groups: Groups, senders: Senders) -> None:
        self._groups = groups
        self._senders = senders

    def find(self, group: str, client_id: str) -> tuple[Client, Questioned]:
        """A member of a group, or a producer when the group is empty. Raises ClientNotFound."""
        if not group:
            producer = self._senders.find(client_id)
            if producer is None:
                raise ClientNotFound(f"no producer {client_id} sends to this broker")
            return producer
        stream = self._groups.stream(group, client_id)
        if stream is None:
            raise ClientNotFound(f"client {client_id} of group {group} has no stream open here")
        return Client(group, client_id, stream.number, stream.origin), stream.questioned

    def members(self, group: str) -> dict[str, tuple[Origin, Stay]]:
        """The members of a group, those that are away included, by client id."""
        stays = {one.client_id: one for one in self._groups.stays(group)}
        return {name: (origin, stays[name]) for name, origin in self._groups.origins(group)}

    def page(
        self, *, producers: bool, group: str, after: str, count_max: int, client_id: str = ""
    ) -> tuple[list[Client], str]:
        """At most ``count_max`` producers, or members of ``group`` (empty: of all groups), with
        ``client_id`` if it is not empty. And the start of the next page; empty: there is none.
        Raises InvalidRequest.
        """
        if not 0 <= count_max <= CLIENTS_PER_PAGE_MAX:
            raise InvalidRequest(f"max_count is 0 to {CLIENTS_PER_PAGE_MAX}, not {count_max}")
        count_max = count_max or CLIENTS_PER_PAGE_MAX
        found = self._senders.clients() if producers else self._members(group, after, client_id)
        if client_id:
            found = (client for client in found if client.client_id == client_id)
        keyed = sorted((client.key, client) for client in found)
        rest = [(key, client) for key, client in keyed if key > after]
        page = [client for _, client in rest[:count_max]]
        return page, page[-1].key if len(rest) > count_max else ""

    def _members(self, group: str, after: str, name_wanted: str) -> Iterator[Client]:
        table = self._groups.table
        first = after.partition("\0")[0]
        names = [group] if group else [name for name in table.groups() if name >= first]
        seen = 0
        for name in names:
            if seen > CLIENTS_PER_PAGE_MAX:
                return
            for client_id, origin in self._groups.origins(name):
                if name_wanted and client_id != name_wanted:
                    continue
                member = table.member(name, client_id)
                assert member is not None, (name, client_id)
                client = Client(name, client_id, member.stream, origin, member.is_away)
                seen += client.key > after
                yield client
