"""The name server's port, before anything slow is imported: health answers from here on."""

from __future__ import annotations

from cometmq.rpc.gate import Gate
from cometmq.rpc.server import RpcServer, ServerLimits
from services.namesrv.config import NamesrvConfig

SERVICE = "cometmq.v1.NameService"
MESSAGE_BYTES_MAX = 32 * 1024 * 1024  # a registration carries up to 100,000 topics


def new_server(config: NamesrvConfig) -> RpcServer:
    """A server that has not started yet."""
    return RpcServer(
        host=config.listen_host,
        port=config.port,
        services=[SERVICE],
        gate=Gate(),
        limits=ServerLimits(message_bytes_max=MESSAGE_BYTES_MAX),
    )
