"""The pullhold's port, before anything slow is imported: health answers from here on."""

from __future__ import annotations

from cometmq.rpc.gate import Gate
from cometmq.rpc.server import RpcServer, limits_of
from services.pullhold.config import PullholdConfig

SERVICE = "cometmq.v1.HoldService"


def new_server(config: PullholdConfig) -> RpcServer:
    """A server that has not started yet."""
    return RpcServer(
        host=config.listen_host,
        port=config.port,
        services=[SERVICE],
        gate=Gate(),
        limits=limits_of(config),
    )
