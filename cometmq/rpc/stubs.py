"""Stubs of services, made from their descriptors.

A generated stub makes all methods of its service at once, and its module is as large as the
messages'. Here a method is made when it is called first.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


class Stub:
    """The methods of ``service`` on a channel, by their names. AttributeError: it has none of this
    name.
    """

    def __init__(self, channel: grpc.aio.Channel, service: ServiceDescriptor) -> None:
        self._channel = channel
        self._service = service

    def __getattr__(self, name: str) -> Any:
        method = self._service.methods_by_name.get(name)
        if method is None:
            raise AttributeError(f"{self._service.full_name} has no method {name}")
        kinds = ("unary", "stream")
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        made = getattr(self._channel, kind)(
            f"/{self._service.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(self, name, made)
        return made
