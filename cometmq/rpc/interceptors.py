"""Errors on the wire, both ways. A call that fails has its :class:`CometError` in the trailing
metadata ``cometmq-error-bin``, as a serialized ``cometmq.v1.Error``.

Client: ``with wire_errors():`` turns gRPC's errors back into the catalogue's. Servers:
:mod:`cometmq.rpc.guard`, which clients do without.
"""

from __future__ import annotations

import functools
from types import TracebackType

import grpc
from google.protobuf.message import DecodeError

from cometmq import errors
from cometmq.errors import CATALOGUE, CometError, Retry
from cometmq.telemetry import escape
from cometmq.v1 import common_pb2

ERROR_METADATA = "cometmq-error-bin"
# gRPC refuses metadata above 8 KiB, and `details` may grow threefold by percent-encoding.
ERROR_TEXT_BYTES_MAX = 512

# --- catalogue ↔ proto --------------------------------------------------------------------------


def to_proto(error: CometError) -> common_pb2.Error:
    """The error as it travels; its message is cut to ERROR_TEXT_BYTES_MAX, controls escaped."""
    proto = common_pb2.Error(
        code=error.code,
        name=error.name(),
        message=short_text(error.message),
        advice=error.advice,
        retry=common_pb2.Retry.ValueType(error.retry.value),
    )
    if error.segment is not None:
        proto.segment = error.segment
    if error.fence is not None:
        proto.fence.generation, proto.fence.offset = error.fence
    if error.epoch is not None:
        proto.epoch = error.epoch
    if error.retry_after_ms is not None:
        proto.retry_after_ms = error.retry_after_ms
    return proto


def from_proto(proto: common_pb2.Error) -> CometError:
    """The catalogue's class for the code; a code of a newer release becomes an UnknownError.

    The latter keeps the sender's retry rule, so that older clients treat newer errors rightly.
    """
    segment = proto.segment if proto.HasField("segment") else None
    fence = (proto.fence.generation, proto.fence.offset) if proto.HasField("fence") else None
    epoch = proto.epoch if proto.HasField("epoch") else None
    retry_after_ms = proto.retry_after_ms if proto.HasField("retry_after_ms") else None
    kind = CATALOGUE.get(proto.code)
    if kind is not None:
        return kind(
            proto.message, segment=segment, fence=fence, epoch=epoch, retry_after_ms=retry_after_ms
        )
    text = f"{proto.name} ({proto.code}): {proto.message} {proto.advice}"
    return _unknown_error(proto.retry)(
        text, segment=segment, fence=fence, retry_after_ms=retry_after_ms
    )


@functools.cache
def _unknown_error(retry: int) -> type[errors.UnknownError]:
    known = retry in {member.value for member in Retry}
    rule = Retry(retry) if known else Retry.NEVER
    return type("UnknownError", (errors.UnknownError,), {"retry": rule})


def short_text(text: str) -> str:
    """At most ERROR_TEXT_BYTES_MAX of a text, controls escaped."""
    data = escape(text).encode("utf-8", "replace")
    if len(data) <= ERROR_TEXT_BYTES_MAX:
        return data.decode()
    return data[: ERROR_TEXT_BYTES_MAX - 3].decode("utf-8", "ignore") + "…"


def is_not_served(error: CometError) -> bool:
    """Whether a process has answered that it does not know the call: it is of another kind."""
    return error.advice == NOT_SERVED


# --- client side --------------------------------------------------------------------------------


def error_from(error: grpc.aio.AioRpcError) -> CometError:
    """What a failed call means: the error in its metadata, else the nearest to its status."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA and isinstance(value, bytes):
            try:
                return from_proto(common_pb2.Error.FromString(value))
            except DecodeError:
                break
    if error.details() == _WRITTEN_TO_THE_END:
        return errors.PeerUnavailable("the stream ended while it was written to")
    if error.code() is grpc.StatusCode.CANCELLED:
        return errors.PeerUnavailable("the other side has too many calls, and ended this one")
    kind = _BY_STATUS.get(error.code(), errors.InternalError)
    found = kind(f"{error.code().name}: {short_text(error.details() or '')}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return found.advising(NOT_SERVED)
    return found


# What a write gets that the end of its stream has overtaken, in the place of the true status.
_WRITTEN_TO_THE_END = "Internal error from Core"
NOT_SERVED = (
    "The process at this address does not serve this call. Check the address: it may be a process "
    "of another kind, such as a broker where a name server is meant, or of an older release."
)
# Statuses that gRPC itself gives, so without an error in the metadata.
_BY_STATUS: dict[grpc.StatusCode, type[CometError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,  # a message above the size limit
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,
}


class wire_errors:
    """``with wire_errors():`` around calls of stubs: gRPC's errors come out as the catalogue's."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_from(error) from error
