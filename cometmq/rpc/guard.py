"""The guard around every served method: what it raises becomes the end of its call.

A :class:`CometError` ends a call with its gRPC status and, in the trailing metadata
``cometmq-error-bin``, a serialized ``cometmq.v1.Error``. Any other exception becomes
INTERNAL_ERROR: the log gets the traceback, the wire gets no exception text.

The guard is laid around a method once, when it is added to a server. It costs something per call or
per stream, nothing per message of a stream; therefore methods that answer with a stream have to use
``context.write``: an asynchronous generator could only be guarded message by message.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from cometmq import errors
from cometmq.errors import CometError
from cometmq.rpc.calls import BeforeAnswer, Calls, Serialize
from cometmq.rpc.interceptors import ERROR_METADATA, short_text, to_proto
from cometmq.telemetry import fields, logger

_log = logger(__name__)


class CallObserver(Protocol):
    """An observer that counts calls. ``result`` is ``OK`` or the name of the error."""

    def started(self, method: str, *, stream: bool) -> float:
        """A call begins; what is returned comes back in ``ended``."""

    def ended(self, method: str, token: float, result: str, *, stream: bool) -> None:
        """The call is over."""


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = (
    Any  # grpc.aio.ServicerContext, whose message types differ from method to method
)
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


def guard(
    method: str,
    handler: Handler,
    observer: CallObserver | None,
    calls: Calls,
    before_answer: BeforeAnswer | None = None,
) -> Handler:
    """``handler`` with errors turned into statuses, and its calls among the bounded ones;
    ``method`` is its full name. ``before_answer`` is waited for when an answer, or each message of
    a stream, is to leave.
    """
    parse, serialize = handler.request_deserializer, handler.response_serializer
    assert parse is not None
    assert serialize is not None
    if handler.unary_unary is not None:
        behavior = _checked(method, handler.unary_unary)
        if before_answer is not None:
            behavior = _answered(behavior, before_answer)
        unary = calls.unary(method, _parsed(behavior, parse, serialize))
        guarded = _guarded(method, unary, observer, calls, stream=False)
        # The request is read by us: a call counts before it has come.
        return grpc.stream_unary_rpc_method_handler(guarded)
    if handler.unary_stream is not None:
        streaming = _parsed(_checked(method, handler.unary_stream), parse, None)
        guarded = _guarded(
            method, streaming, observer, calls, serialize, before_answer, stream=True
        )
        return grpc.unary_stream_rpc_method_handler(guarded)
    assert handler.stream_stream is not None, f"{method}: answers to a stream are a stream here"
    both = _checked(method, handler.stream_stream)
    guarded = _guarded(method, both, observer, calls, serialize, before_answer, stream=True)
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


def _answered(behavior: Behavior, before_answer: BeforeAnswer) -> Behavior:
    async def call(request: Any, context: Context) -> Any:
        response = await behavior(request, context)
        await before_answer()
        return response

    return call


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
    before_answer: BeforeAnswer | None = None,
    *,
    stream: bool,
) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        call = calls.open(context, serialize, before_answer)
        token = observer.started(method, stream=stream) if observer else 0.0
        result = "CANCELLED"  # unless the method gets to its end
        try:
            response = await behavior(request, call)
            result = "OK"
            return response
        except grpc.aio.BaseError:  # the caller has gone, or the method has aborted
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the caller has gone, or the server stops
                raise
            # What the method waited for was cancelled by others: gRPC would give no answer at all.
            refusal = _refusal(method, error)
            result = refusal.name()
            await _abort(call, refusal)
        except Exception as error:
            refusal = _refusal(method, error)
            result = refusal.name()
            await _abort(call, refusal)
        finally:
            if observer:
                observer.ended(method, token, result, stream=stream)

    return guarded


def _refusal(method: str, error: BaseException) -> CometError:
    """The catalogue error that the caller gets. The single place where any exception is taken."""
    cause = _first_cause(error)
    if isinstance(cause, CometError):
        return cause
    if isinstance(cause, DecodeError):
        return errors.InvalidRequest("the request is not a message of this method")
    if isinstance(cause, grpc.aio.BaseError):
        raise cause
    _log.error("method failed", extra=fields(method=method), exc_info=error)
    return errors.InternalError("the server failed; its log has the reason")


def _first_cause(error: BaseException) -> BaseException:
    """What a task group was ended by: its first error of the catalogue, else its first error."""
    while isinstance(error, BaseExceptionGroup):
        known = error.subgroup(CometError)
        error = (known or error).exceptions[0]
    return error


async def _abort(context: Context, error: CometError) -> None:
    """End the call with the error's status. Does not return: gRPC leaves by an exception."""
    metadata = ((ERROR_METADATA, to_proto(error).SerializeToString()),)
    await context.abort(grpc.StatusCode[error.status], short_text(error.message), metadata)
