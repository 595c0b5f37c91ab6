"""Errors on the wire, both ways, and the guard around every served method.

Server: a :class:`CometError` ends a call with its gRPC status and, in the trailing metadata
``cometmq-error-bin``, a serialized ``cometmq.v1.Error``. Any other exception becomes
INTERNAL_ERROR: the log gets the traceback, the wire gets no exception text.

Client: ``with wire_errors():`` turns gRPC's errors back into the catalogue's.

The guard is laid around a method once, when it is added to a server. It costs something per call or
per stream, nothing per message of a stream; therefore methods that answer with a stream have to use
``context.write``: an asynchronous generator could only be guarded message by message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from cometmq import errors
from cometmq.errors import CATALOGUE, CometError, Retry
from cometmq.rpc.calls import Calls, Serialize
from cometmq.telemetry import escape, fields, logger
from cometmq.v1 import common_pb2

ERROR_METADATA = "cometmq-error-bin"
# gRPC refuses metadata above 8 KiB, and `details` may grow threefold by percent-encoding.
ERROR_TEXT_BYTES_MAX = 512

_log = logger(__name__)


# --- catalogue ↔ proto --------------------------------------------------------------------------


def to_proto(error: CometError) -> common_pb2.Error:
    """The error as it travels; its message is cut to ERROR_TEXT_BYTES_MAX, controls escaped."""
    proto = common_pb2.Error(
        code=error.code,
        name=error.name(),
        message=_short(error.message),
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


def _short(text: str) -> str:
    data = escape(text).encode("utf-8", "replace")
    if len(data) <= ERROR_TEXT_BYTES_MAX:
        return data.decode()
    return data[: ERROR_TEXT_BYTES_MAX - 3].decode("utf-8", "ignore") + "…"


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
    kind = _BY_STATUS.get(error.code(), errors.InternalError)
    return kind(f"{error.code().name}: {_short(error.details() or '')}")


# What a write gets that the end of its stream has overtaken, in the place of the true status.
_WRITTEN_TO_THE_END = "Internal error from Core"
# Statuses that gRPC itself gives, so without an error in the metadata.
_BY_STATUS: dict[grpc.StatusCode, type[CometError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerUnavailable,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,  # a message above the size limit
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,  # a server of an older release
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


# --- server side --------------------------------------------------------------------------------


class CallObserver(Protocol):
    """Who counts calls. ``result`` is ``OK`` or the name of the error."""

    def started(self, method: str, *, stream: bool) -> float:
        """A call begins; what is returned comes back in ``ended``."""

    def ended(self, method: str, token: float, result: str, *, stream: bool) -> None:
        """The call is over."""


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = (
    Any  # grpc.aio.ServicerContext, whose message types differ from method to method
)
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


def guard(method: str, handler: Handler, observer: CallObserver | None, calls: Calls) -> Handler:
    """``handler`` with errors turned into statuses, and its calls among the bounded ones;
    ``method`` is its full name.
    """
    parse, serialize = handler.request_deserializer, handler.response_serializer
    assert parse is not None
    assert serialize is not None
    if handler.unary_unary is not None:
        unary = calls.unary(
            method, _parsed(_checked(method, handler.unary_unary), parse, serialize)
        )
        guarded = _guarded(method, unary, observer, calls, stream=False)
        # The request is read by us: a call counts before it has come.
        return grpc.stream_unary_rpc_method_handler(guarded)
    if handler.unary_stream is not None:
        streaming = _parsed(_checked(method, handler.unary_stream), parse, None)
        guarded = _guarded(method, streaming, observer, calls, serialize, stream=True)
        return grpc.unary_stream_rpc_method_handler(guarded)
    assert handler.stream_stream is not None, f"{method}: answers to a stream are a stream here"
    both = _checked(method, handler.stream_stream)
    guarded = _guarded(method, both, observer, calls, serialize, stream=True)
    return grpc.stream_stream_rpc_method_handler(guarded, parse)


def refuse(error: CometError) -> Handler:
    """A method of any kind that only answers with ``error``: a stream serves unary callers too."""

    async def refused(_: object, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refused)


def _checked(method: str, behavior: Any) -> Behavior:
    """Fail at start, not at the first call."""
    if not inspect.iscoroutinefunction(behavior):
        raise TypeError(f"{method} must be a coroutine function that answers with context.write")
    checked: Behavior = behavior
    return checked


def _parsed(
    behavior: Behavior, parse: Callable[[bytes], Any], serialize: Callable[[Any], bytes] | None
) -> Behavior:
    """Parse and serialize inside the guard: from gRPC their exceptions would reach the wire."""

    async def call(raw: bytes, context: Context) -> Any:
        response = await behavior(parse(raw), context)
        return response if serialize is None else serialize(response)

    return call


def _guarded(
    method: str,
    behavior: Behavior,
    observer: CallObserver | None,
    calls: Calls,
    serialize: Serialize | None = None,
    *,
    stream: bool,
) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        call = calls.open(context, serialize)
        token = observer.started(method, stream=stream) if observer else 0.0
        result = "CANCELLED"  # unless the method gets to its end
        try:
            response = await behavior(request, call)
            result = "OK"
            return response
        except grpc.aio.BaseError:  # the caller has gone, or the method has aborted
            raise
        except Exception as error:
            refusal = _refusal(method, error)
            result = refusal.name()
            await _abort(call, refusal)
        finally:
            if observer:
                observer.ended(method, token, result, stream=stream)

    return guarded


def _refusal(method: str, error: Exception) -> CometError:
    """The catalogue error that the caller gets. The single place where any exception is taken."""
    cause = _first_cause(error)
    if isinstance(cause, CometError):
        return cause
    if isinstance(cause, DecodeError):
        return errors.InvalidRequest("the request is not a message of this method")
    if isinstance(cause, grpc.aio.BaseError):
        raise cause
    _log.error("method failed", extra=fields(method=method), exc_info=error)
    return errors.InternalError("the server failed; its log tells more")


def _first_cause(error: BaseException) -> BaseException:
    """What a task group was ended by: its first error of the catalogue, else its first error."""
    while isinstance(error, BaseExceptionGroup):
        known = error.subgroup(CometError)
        error = (known or error).exceptions[0]
    return error


async def _abort(context: Context, error: CometError) -> None:
    """End the call with the error's status. Does not return: gRPC leaves by an exception."""
    metadata = ((ERROR_METADATA, to_proto(error).SerializeToString()),)
    await context.abort(grpc.StatusCode[error.status], _short(error.message), metadata)
