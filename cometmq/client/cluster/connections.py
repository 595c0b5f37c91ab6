"""The channels of one client, and the stubs on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import grpc

from cometmq.client.cluster.pulled import Pulled
from cometmq.errors import ConfigInvalid
from cometmq.rpc.addresses import Resolver, parse_addresses
from cometmq.rpc.channel_pool import ChannelPool
from cometmq.rpc.stubs import Stub
from cometmq.v1 import broker_pb2, namesrv_pb2

if TYPE_CHECKING:
    from cometmq.v1 import broker_pb2_grpc, hold_pb2_grpc, namesrv_pb2_grpc

_BROKER = broker_pb2.DESCRIPTOR.services_by_name["BrokerService"]
_NAMES = namesrv_pb2.DESCRIPTOR.services_by_name["NameService"]
_PULL = "/cometmq.v1.BrokerService/Pull"

NAMESRV_VARIABLE = "COMETMQ_NAMESRV"  # the command takes it too


def _known(namesrv: object) -> str:
    """The name servers: those that were given, else those of the environment."""
    if namesrv is None:
        namesrv = os.environ.get(NAMESRV_VARIABLE, "")
    if not isinstance(namesrv, str):
        raise ConfigInvalid(f"The name servers are a text, 'host:port;host:port', not {namesrv!r}.")
    if not namesrv.strip():
        raise ConfigInvalid(
            f"No name server is known: give namesrv='host:port', or set {NAMESRV_VARIABLE}."
        )
    return namesrv


class Connections:
    """One channel for each address, opened when first asked for, and again when it has failed."""

    def __init__(self, namesrv: str | None) -> None:
        """ConfigInvalid: neither ``namesrv`` nor the environment names a name server."""
        names = parse_addresses(_known(namesrv))
        self.namesrv = ";".join(names)
        self._resolver = Resolver(names)
        self._channels = ChannelPool()
        self._brokers: dict[
            str, tuple[grpc.aio.Channel, broker_pb2_grpc.BrokerServiceAsyncStub]
        ] = {}  # by address

    async def namesrv_addresses(self) -> tuple[str, ...]:
        """host:port of every name server, names resolved now; those known before, or the names
        themselves, when none resolves in time.
        """
        return await self._resolver.addresses()

    def broker(self, address: str) -> broker_pb2_grpc.BrokerServiceAsyncStub:
        channel = self._channels.get(address)
        known = self._brokers.get(address)
        if known is None or known[0] is not channel:
            stub = cast("broker_pb2_grpc.BrokerServiceAsyncStub", Stub(channel, _BROKER))
            known = self._brokers[address] = channel, stub
        return known[1]

    def pull(
        self, address: str
    ) -> grpc.aio.UnaryUnaryMultiCallable[broker_pb2.PullRequest, Pulled]:
        """The method Pull of a broker."""
        return self._channels.get(address).unary_unary(
            _PULL,
            request_serializer=broker_pb2.PullRequest.SerializeToString,
            response_deserializer=Pulled.from_wire,
        )

    def pullhold(self, address: str) -> hold_pb2_grpc.HoldServiceAsyncStub:
        from cometmq.v1 import hold_pb2  # a producer holds nothing

        service = hold_pb2.DESCRIPTOR.services_by_name["HoldService"]
        stub = Stub(self._channels.get(address), service)
        return cast("hold_pb2_grpc.HoldServiceAsyncStub", stub)

    def name_server(self, address: str) -> namesrv_pb2_grpc.NameServiceAsyncStub:
        stub = Stub(self._channels.get(address), _NAMES)
        return cast("namesrv_pb2_grpc.NameServiceAsyncStub", stub)

    def forget(self, address: str) -> None:
        """Another process is there now: the next call connects again."""
        self._brokers.pop(address, None)
        self._channels.drop(address)

    async def close(self) -> None:
        self._resolver.close()
        self._brokers.clear()  # what holds a channel holds gRPC's threads (cometmq.rpc.forks)
        await self._channels.close()
