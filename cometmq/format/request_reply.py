"""Request and reply as properties of messages, in RocketMQ's names. Pure.

A request has CORRELATION_ID, REPLY_TO_CLIENT and TTL. Its reply is a message of the reply topic of
the cluster with the same three and MSG_TYPE = reply; ours has the correlation id among its keys,
too, so that the key index finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cometmq.errors import ReplyInvalid
from cometmq.names import REPLY_TOPIC_SUFFIX

CORRELATION_ID = "CORRELATION_ID"
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
TTL = "TTL"  # in ms: how long the requester waits, from when the request was made
MSG_TYPE = "MSG_TYPE"
CLUSTER = "CLUSTER"  # RocketMQ's brokers add it

REPLY = "reply"
TTL_MS_MAX = 86_400_000


def reply_topic(cluster: str) -> str:
    """Where replies of a cluster go."""
    return f"{cluster}{REPLY_TOPIC_SUFFIX}"


class Requester(NamedTuple):
    """The client that waits for the reply to a request. ``until_ms``: by the requester's clock."""

    client_id: str
    correlation_id: str
    ttl_ms: int
    until_ms: int


def request_properties(client_id: str, correlation_id: str, ttl_ms: int) -> dict[str, str]:
    """What makes a message a request."""
    return {CORRELATION_ID: correlation_id, REPLY_TO_CLIENT: client_id, TTL: str(ttl_ms)}


def reply_properties(requester: Requester) -> dict[str, str]:
    """What makes a message the reply; its key is the correlation id."""
    made = request_properties(requester.client_id, requester.correlation_id, requester.ttl_ms)
    return {**made, MSG_TYPE: REPLY}


def requester_of(properties: Mapping[str, str], born_time_ms: int) -> Requester:
    """The requester that waits for a reply to the message with these properties. ReplyInvalid."""
    ttl = properties.get(TTL, "")
    client_id, correlation_id = properties.get(REPLY_TO_CLIENT), properties.get(CORRELATION_ID)
    if not client_id or not correlation_id or properties.get(MSG_TYPE) == REPLY:
        raise ReplyInvalid("The message is no request: no requester waits for a reply.")
    if not (ttl.isascii() and ttl.isdigit() and len(ttl) < 10 and 0 < int(ttl) <= TTL_MS_MAX):
        raise ReplyInvalid(f"The request's TTL is {ttl[:20]!r}, not 1 to {TTL_MS_MAX} ms.")
    return Requester(client_id, correlation_id, int(ttl), born_time_ms + int(ttl))
