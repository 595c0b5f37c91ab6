"""The name server's port, before anything slow is imported: health answers from here on."""

from __future__ import annotations

from cometmq.clock import SystemClock
from cometmq.rpc.gate import Gate
from cometmq.rpc.secret import open_secret
from cometmq.rpc.server import RpcServer, limits_of
from services.namesrv.config import NamesrvConfig

SERVICE = "cometmq.v1.NameService"
# Methods that change the name server, or serve callers that do, want a proof; all others do not.
PROVEN = frozenset(
    f"/{SERVICE}/{method}"
    for method in (
        "RegisterMember",
        "UnregisterMember",
        "WatchRegistration",
        "SetWritePermission",
        "PutValue",
        "DeleteValue",
        "RegisterPullhold",
        "UnregisterPullhold",
    )
)
MESSAGE_BYTES_MAX = 32 * 1024 * 1024  # a registration carries up to 100,000 topics


def new_server(config: NamesrvConfig) -> RpcServer:
    """A server that has not started yet. ConfigInvalid: ``internal_secret_file`` is no good."""
    return RpcServer(
        host=config.listen_host,
        port=config.port,
        services=[SERVICE],
        gate=Gate(),
        limits=limits_of(config, MESSAGE_BYTES_MAX),
        secret=open_secret(config.internal_secret_file, SystemClock()),
        proven=PROVEN,
    )
