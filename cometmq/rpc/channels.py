"""Channels to other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from cometmq.rpc.forks import FORKS
from cometmq.telemetry import version

if TYPE_CHECKING:  # clients have no secret
    from cometmq.rpc.secret import SharedSecret

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # of one answer: a route table is larger than a batch
DIAL_S = 2.0

_OPTIONS = [
    # Each channel has its own connection: a slow stream must not hold up another's bytes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the receiver's limit counts
    # A machine that has gone says nothing: while a call waits, its silence is noticed within 5 s.
    ("grpc.keepalive_time_ms", 2_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # this decides; else it is a minute
    ("grpc.http2.max_pings_without_data", 0),  # else the third question waits for a minute
    # A name may mean another machine from one second to the next; gRPC asks again after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.primary_user_agent", f"cometmq-python/{version()}"),
    ("grpc.enable_http_proxy", 0),  # an HTTP_PROXY of the environment is not meant for the cluster
]


def open_channel(
    address: str,
    secret: SharedSecret | None = None,
    *,
    insist: bool = True,
    dial_s: float = DIAL_S,
) -> grpc.aio.Channel:
    """A channel to ``host:port``; connects when first used, each attempt within ``dial_s``. To be
    closed by the caller.

    With ``secret`` both sides prove before each call that they know it. ``insist`` False: a server
    that wants no proof is called without. ClientForked: gRPC does not work in this process.
    """
    FORKS.check()
    # Its name notwithstanding this is how long one attempt may take.
    limit = ("grpc.min_reconnect_backoff_ms", int(dial_s * 1000))
    channel = grpc.aio.insecure_channel(address, options=[*_OPTIONS, limit])
    FORKS.opened(channel)
    if secret is None:
        return channel
    from cometmq.rpc.authorized import ProvenChannel

    return ProvenChannel(channel, address, secret, insist)
