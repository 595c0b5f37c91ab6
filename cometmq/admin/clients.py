"""Clients that are connected, at all broker groups: which there are, what they say of themselves,
and messages that they are to consume.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cometmq.admin.connection import Connection, call, each
from cometmq.admin.messages import until_settled
from cometmq.admin.views import (
    ClientCallView,
    ClientDescriptionView,
    ClientLeasesView,
    ClientQueueView,
    ClientRatesView,
    ClientSendingView,
    ClientTopicView,
    ClientView,
    ListenerResultView,
)
from cometmq.errors import (
    ClientGone,
    ClientNotFound,
    CometError,
    MessageNotFound,
    QuestionUnsupported,
)
from cometmq.format.ids import parse_message_id
from cometmq.v1 import broker_pb2, namesrv_pb2

KINDS = {
    "member": broker_pb2.CLIENT_KIND_MEMBER,
    "producer": broker_pb2.CLIENT_KIND_PRODUCER,
}
MATCHES_MAX = 100  # clients of one name that are asked
ANSWER_S = 3.0  # for the broker, beside the time for the client
_LIBRARY = re.compile(r"grpc-(python|node|java|go|dotnet|csharp|ruby|php|c\+\+|swift|kotlin)\b")


async def list_clients(
    connection: Connection, kind: str | None, group: str, count: int, client_id: str = ""
) -> list[ClientView]:
    """Members of groups, of one when it is named, then producers; only clients of one name when it
    is given; at most ``count`` of each kind at each broker group.
    """
    kinds = [kind] if kind else ["member"] if group else list(KINDS)
    writers = await connection.writers()
    found = []
    for one in kinds:
        request = broker_pb2.ListClientsRequest(kind=KINDS[one], group=group, client_id=client_id)

        async def pages(
            member: namesrv_pb2.Member,
            request: broker_pb2.ListClientsRequest = request,
        ) -> list[broker_pb2.ClientInfo]:
            return await _pages(connection, member, request, count)

        answers = await each(writers, pages)
        found += [_view(one, name, row) for name, rows in answers.items() for row in rows]
    return found


async def _pages(
    connection: Connection,
    member: namesrv_pb2.Member,
    wanted: broker_pb2.ListClientsRequest,
    count: int,
) -> list[broker_pb2.ClientInfo]:
    request = broker_pb2.ListClientsRequest()
    request.CopyFrom(wanted)
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
    gRPC library. Empty where the user agent names none.
    """
    library = _LIBRARY.search(agent)
    language = library[1] if library else "rust" if "tonic/" in agent else ""
    name, _, version = agent.partition(" ")[0].partition("/")
    return language, f"{name} {version}".strip()


# --- what a client says ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Client:
    """A client, and where it is connected. ``group`` empty: a producer."""

    group: str
    broker_groups: list[str]


async def describe_clients(
    connection: Connection,
    client_id: str,
    *,
    kind: str | None = None,
    group: str = "",
    with_stacks: bool = False,
    timeout_ms: int = 0,
) -> list[ClientDescriptionView]:
    """The descriptions that clients of this name give: the members of each group, or of one, and
    the producer. Each is asked once, through one broker group that it is connected to; it has
    ``timeout_ms``, 0 = 10 s. Raises InvalidRequest, ClientNotFound, what DescribeClient raises of
    one of them, and QuestionUnsupported when none of them can be asked.
    """
    request = broker_pb2.DescribeClientRequest(
        client_id=client_id, with_stacks=with_stacks, timeout_ms=timeout_ms
    )
    described = []
    refused: CometError | None = None
    for client in await _find(connection, client_id, kind, group):
        request.group = client.group
        try:
            described.append(await _describe(connection, client, request))
        except QuestionUnsupported as error:  # a part of another client, for one
            refused = error
    if refused is not None and not described:
        raise refused
    return described


async def _find(
    connection: Connection, client_id: str, kind: str | None, group: str
) -> list[_Client]:
    found: dict[str, _Client] = {}
    for one in await list_clients(connection, kind, group, MATCHES_MAX, client_id):
        if not one.is_away:
            at = found.setdefault(one.group, _Client(one.group, [])).broker_groups
            if one.broker_group not in at:
                at.append(one.broker_group)
    if not found:
        where = f" of group {group}" if group else ""
        raise ClientNotFound(
            f"no {kind or 'client'} {client_id}{where} is connected to any broker group"
        )
    return list(found.values())


async def _describe(
    connection: Connection, client: _Client, request: broker_pb2.DescribeClientRequest
) -> ClientDescriptionView:
    writers = await connection.writers(tuple(client.broker_groups))
    [*others, last] = writers.items()
    for broker_group, member in others:
        with suppress(ClientNotFound, ClientGone):  # it may answer at another one
            return await _describe_at(connection, broker_group, member, request)
    return await _describe_at(connection, *last, request)


async def _describe_at(
    connection: Connection,
    broker_group: str,
    member: namesrv_pb2.Member,
    request: broker_pb2.DescribeClientRequest,
) -> ClientDescriptionView:
    answer = await call(
        member.internal_address,
        connection.admin(member).DescribeClient,
        request,
        deadline_s=_deadline_s(request.timeout_ms),
    )
    return _description_view(broker_group, answer.client, answer.description)


def _deadline_s(timeout_ms: int) -> float:
    return (timeout_ms or 10_000) / 1000 + ANSWER_S


def _description_view(
    broker_group: str, known: broker_pb2.ClientInfo, said: broker_pb2.ClientDescription
) -> ClientDescriptionView:
    return ClientDescriptionView(
        client_id=known.client_id,
        group=known.group,
        broker_group=broker_group,
        address=known.address,
        agent=known.agent,
        since_ms=known.since_ms,
        role=_name(broker_pb2.ClientRole, said.role, "CLIENT_ROLE_"),
        version=said.version,
        language=said.language,
        start_time_ms=said.start_time_ms,
        time_ms=said.time_ms,
        options=dict(sorted(said.options.items())),
        is_suspended=said.is_suspended,
        subscriptions=[
            ClientTopicView(one.topic, list(one.filter.tags), one.filter.sql)
            for one in said.subscriptions
        ],
        queues=[
            ClientQueueView(
                one.queue.topic,
                one.broker_group,
                one.queue.queue_id,
                one.committed.offset if one.HasField("committed") else None,
                one.next.offset if one.HasField("next") else None,
                one.cached_count,
                one.cached_bytes,
                one.call_count,
                one.lock_number if one.HasField("lock_number") else None,
                one.is_locked,
                _ago_ms(said, one.last_pull_ms),
                one.is_paused,
            )
            for one in said.queues
        ],
        queue_count=said.queue_count,
        leases=[
            ClientLeasesView(
                one.broker_group,
                one.held_count,
                one.held_bytes,
                one.call_count,
                _ago_ms(said, one.last_receive_ms),
            )
            for one in said.leases
        ],
        sending=[
            ClientSendingView(
                one.broker_group,
                one.is_connected,
                one.in_flight_count,
                one.waiting_count,
                one.waiting_bytes,
                one.stored_count,
                one.failed_count,
            )
            for one in said.sending
        ],
        rates=[
            ClientRatesView(
                one.topic,
                round(one.pulled, 3),
                round(one.done, 3),
                round(one.failed, 3),
                round(one.process_ms, 3),
            )
            for one in said.rates
        ],
        rates_window_ms=said.rates_window_ms,
        calls=[
            ClientCallView(
                one.queue.topic,
                one.broker_group,
                one.queue.queue_id,
                one.queue_offset,
                one.count,
                one.age_ms,
                one.is_late,
                one.stack,
            )
            for one in said.calls
        ],
        call_count=said.call_count,
    )


def _ago_ms(said: broker_pb2.ClientDescription, time_ms: int) -> int | None:
    """How long ago a time of the client's clock was; None: it is 0, so not known."""
    return max(0, said.time_ms - time_ms) if time_ms else None


def _name(kind: Any, value: int, prefix: str) -> str:
    """The name of an enum's value, in small letters; empty for one that this release does not
    know.
    """
    names = dict(zip(kind.values(), kind.keys(), strict=True))
    name = str(names.get(value, "")).removeprefix(prefix).lower()
    return "" if name == "unspecified" else name


# --- consume a message ----------------------------------------------------------------------------


async def verify_message(
    connection: Connection, message_id: str, group: str, client_id: str, timeout_ms: int = 0
) -> ListenerResultView:
    """Lets a member's listener consume a message now, beside all else; the member has
    ``timeout_ms``, 0 = 10 s. Nothing is committed. Raises MessageIdInvalid, and what VerifyMessage
    raises. A message that was acknowledged before it was on disk is waited for.
    """
    broker_group, _, log_offset = parse_message_id(message_id)
    writers = await connection.writers((broker_group,) if broker_group else ())
    request = broker_pb2.VerifyMessageRequest(
        group=group, client_id=client_id, message_id=message_id, timeout_ms=timeout_ms
    )
    for member in writers.values():
        await until_settled(connection, member, log_offset)
        with suppress(MessageNotFound):
            answer = await call(
                member.internal_address,
                connection.admin(member).VerifyMessage,
                request,
                deadline_s=_deadline_s(timeout_ms),
            )
            result = answer.result
            return ListenerResultView(
                message_id,
                group,
                client_id,
                _name(broker_pb2.ListenerVerdict, result.verdict, "LISTENER_VERDICT_"),
                result.text,
                result.spent_ms,
                result.is_orderly,
            )
    raise MessageNotFound(f"no message {message_id} on {', '.join(writers)}")
