"""Which clients are connected: members of groups and producers, at all broker groups."""

from __future__ import annotations

import re

from cometmq.admin.connection import Connection, call, each
from cometmq.admin.views import ClientView
from cometmq.v1 import broker_pb2, namesrv_pb2

KINDS = {
    "member": broker_pb2.CLIENT_KIND_MEMBER,
    "producer": broker_pb2.CLIENT_KIND_PRODUCER,
}
_LIBRARY = re.compile(r"grpc-(python|node|java|go|dotnet|csharp|ruby|php|c\+\+|swift|kotlin)\b")


async def list_clients(
    connection: Connection, kind: str | None, group: str, count: int
) -> list[ClientView]:
    """Members of groups, of one when it is named, then producers; at most ``count`` of each kind at
    each broker group.
    """
    kinds = [kind] if kind else ["member"] if group else list(KINDS)
    writers = await connection.writers()
    found = []
    for one in kinds:

        async def pages(member: namesrv_pb2.Member, one: str = one) -> list[broker_pb2.ClientInfo]:
            return await _pages(connection, member, one, group, count)

        answers = await each(writers, pages)
        found += [_view(one, name, row) for name, rows in answers.items() for row in rows]
    return found


async def _pages(
    connection: Connection, member: namesrv_pb2.Member, kind: str, group: str, count: int
) -> list[broker_pb2.ClientInfo]:
    request = broker_pb2.ListClientsRequest(kind=KINDS[kind], group=group)
    found: list[broker_pb2.ClientInfo] = []
    while True:
        request.max_count = min(1_000, count - len(found))
        answer = await call(member.internal_address, connection.admin(member).ListClients, request)
        found += answer.clients
        request.page_token = answer.next_page_token
        if not answer.next_page_token or len(found) >= count:
            return found


def _view(kind: str, broker_group: str, row: broker_pb2.ClientInfo) -> ClientView:
    return ClientView(
        kind,
        broker_group,
        row.group,
        row.client_id,
        row.address,
        *language_of(row.agent),
        row.since_ms,
        row.is_away,
        row.agent,
    )


def language_of(agent: str) -> tuple[str, str]:
    """Language and version by a user agent: of the program that names itself first, else of its
    gRPC library; empty: it does not tell.
    """
    library = _LIBRARY.search(agent)
    language = library[1] if library else "rust" if "tonic/" in agent else ""
    name, _, version = agent.partition(" ")[0].partition("/")
    return language, f"{name} {version}".strip()
