from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cometmq.rpc.stubs import Stub
from cometmq.v1 import broker_pb2, broker_pb2_grpc, hold_pb2, hold_pb2_grpc, namesrv_pb2
from cometmq.v1 import namesrv_pb2_grpc as names_grpc

BROKER, ADMIN = (
    broker_pb2.DESCRIPTOR.services_by_name[name] for name in ("BrokerService", "BrokerAdminService")
)
SERVICES = [
    (BROKER, broker_pb2_grpc.BrokerServiceStub),
    (ADMIN, broker_pb2_grpc.BrokerAdminServiceStub),
    (hold_pb2.DESCRIPTOR.services_by_name["HoldService"], hold_pb2_grpc.HoldServiceStub),
    (namesrv_pb2.DESCRIPTOR.services_by_name["NameService"], names_grpc.NameServiceStub),
]


class FakeChannel:
    """Its methods answer what they were asked to make."""

    def __getattr__(self, kind: str) -> Any:
        def make(path: str, **made_of: Any) -> Any:
            return kind, path, made_of["request_serializer"], made_of["response_deserializer"]

        return make


def made(stub: Any, service: ServiceDescriptor) -> dict[str, tuple[str, str, bytes, type[Message]]]:
    """Of each method its kind and path, what it does to a request, and what it reads."""
    found = {}
    for method in service.methods:
        kind, path, serialize, parse = getattr(stub, method.name)
        request = GetMessageClass(method.input_type)()
        found[method.name] = kind, path, serialize(request), type(parse(b""))
    return found


@pytest.mark.parametrize(("service", "generated"), SERVICES)
def test_a_stub_makes_the_methods_of_the_generated_one(
    service: ServiceDescriptor, generated: Any
) -> None:
    channel: Any = FakeChannel()
    ours, theirs = Stub(channel, service), generated(channel)
    assert service.methods
    assert made(ours, service) == made(theirs, service)
    first = service.methods[0].name
    assert getattr(ours, first) is getattr(ours, first)  # made once


def test_a_stub_has_no_other_names() -> None:
    channel: Any = FakeChannel()
    with pytest.raises(AttributeError, match=r"cometmq\.v1\.BrokerService has no method Pul"):
        _ = Stub(channel, BROKER).Pul
