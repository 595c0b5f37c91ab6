"""Errors on the wire: what travels, what never does."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from cometmq import errors
from cometmq.clock import SystemClock
from cometmq.errors import CometError, Retry
from cometmq.rpc.calls import Calls, SilentPeers
from cometmq.rpc.guard import guard, refuse
from cometmq.rpc.interceptors import (
    ERROR_METADATA,
    ERROR_TEXT_BYTES_MAX,
    error_from,
    from_proto,
    to_proto,
    wire_errors,
)
from cometmq.rpc.unread import UnreadLimits
from cometmq.v1 import common_pb2


class Aborted(grpc.aio.AbortError):
    """What FakeContext.abort raises, as gRPC does."""


class FakeContext:
    """Remembers how a call was ended."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.metadata: dict[str, bytes] = {}
        self.request = b""
        self.written: list[bytes] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def add_done_callback(self, callback: object) -> None:
        """The call never ends here."""

    async def read(self) -> bytes:
        return self.request

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]
    ) -> None:
        self.status, self.details, self.metadata = code, details, dict(metadata)
        raise Aborted

    @property
    def error(self) -> CometError:
        return from_proto(common_pb2.Error.FromString(self.metadata[ERROR_METADATA]))


class Counts:
    """A CallObserver that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def started(self, method: str, *, stream: bool) -> float:
        self.heard.append(("started", method, stream))
        return 7.0

    def ended(self, method: str, token: float, result: str, *, stream: bool) -> None:
        self.heard.append(("ended", method, token, result, stream))


def _parse(raw: bytes) -> str:
    if raw == b"\xff":
        raise DecodeError("text that must not leak")
    return raw.decode()


def _unary(behavior: Any, observer: Counts | None = None) -> Any:
    handler = grpc.unary_unary_rpc_method_handler(behavior, _parse, str.encode)
    guarded: Any = guard("/s/M", handler, observer, _calls()).stream_unary

    async def call(request: bytes, context: FakeContext) -> Any:
        context.request = request
        return await guarded(None, context)

    return call


def _calls() -> Calls:
    clock = SystemClock()
    return Calls(UnreadLimits(), clock, SilentPeers(clock))


def _failing(error: Exception) -> Any:
    async def method(request: object, context: object) -> str:
        raise error

    return method


async def _echo(request: str, context: object) -> str:
    return request.upper()


async def _end_of(method: Any, request: bytes = b"x") -> FakeContext:
    context = FakeContext()
    with pytest.raises(Aborted):
        await method(request, context)
    return context


async def test_an_answer_passes() -> None:
    assert await _unary(_echo)(b"abc", FakeContext()) == b"ABC"


async def test_an_error_of_the_catalogue_becomes_its_status() -> None:
    context = await _end_of(_unary(_failing(errors.TopicNotFound("no topic t", segment=2))))

    assert context.status is grpc.StatusCode.NOT_FOUND
    assert context.details == "no topic t"
    assert isinstance(context.error, errors.TopicNotFound)
    assert context.error.segment == 2


async def test_any_other_error_is_internal_and_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = await _end_of(_unary(_failing(ValueError("secret path"))))

    assert context.status is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details + repr(context.metadata)
    assert isinstance(context.error, errors.InternalError)
    assert "secret path" in caplog.text


async def test_garbage_is_an_invalid_request() -> None:
    context = await _end_of(_unary(_echo), b"\xff")

    assert isinstance(context.error, errors.InvalidRequest)
    assert "leak" not in context.details + repr(context.metadata)


async def test_an_answer_that_cannot_be_serialized_tells_nothing() -> None:
    async def method(request: str, context: object) -> int:
        return 5

    context = await _end_of(_unary(method))
    assert isinstance(context.error, errors.InternalError)


async def test_of_a_group_the_catalogue_error_counts() -> None:
    inner = ExceptionGroup("inner", [errors.FlowControl("full")])
    context = await _end_of(_unary(_failing(ExceptionGroup("outer", [OSError("x"), inner]))))
    assert isinstance(context.error, errors.FlowControl)


async def test_a_method_may_abort_by_itself() -> None:
    async def method(request: str, context: FakeContext) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "own words", ())

    context = await _end_of(_unary(method))
    assert (context.status, context.details) == (grpc.StatusCode.DATA_LOSS, "own words")


@pytest.mark.parametrize("text", ["ы" * 10_000, "\x00\n" * 10_000, "x" * 10_000, "\ud800"])
def test_texts_are_short_and_printable(text: str) -> None:
    proto = to_proto(errors.TopicNameInvalid(text))

    assert len(proto.message.encode()) <= ERROR_TEXT_BYTES_MAX
    assert proto.message.isprintable()


def test_unknown_codes_keep_their_retry_rule() -> None:
    proto = common_pb2.Error(code=8765, name="NEW", message="m", retry=common_pb2.RETRY_LATER)
    error = from_proto(proto)

    assert isinstance(error, errors.UnknownError)
    assert error.retry is Retry.LATER
    assert "NEW (8765): m" in str(error)


@pytest.mark.parametrize("retry", [0, 99])
def test_unknown_retry_rules_mean_never(retry: int) -> None:
    proto = common_pb2.Error(code=8765)
    proto.MergeFromString(bytes([5 << 3, retry]))
    assert from_proto(proto).retry is Retry.NEVER


async def test_calls_are_observed_with_their_result() -> None:
    counts = Counts()
    await _unary(_echo, counts)(b"x", FakeContext())
    await _end_of(_unary(_failing(errors.DiskFull("full")), counts))

    assert counts.heard == [
        ("started", "/s/M", False),
        ("ended", "/s/M", 7.0, "OK", False),
        ("started", "/s/M", False),
        ("ended", "/s/M", 7.0, "DISK_FULL", False),
    ]


async def test_streams_are_guarded_once_and_left_alone() -> None:
    async def method(request_iterator: object, context: object) -> None:
        raise errors.LimitExceeded("too many")

    counts = Counts()
    handler = grpc.stream_stream_rpc_method_handler(method, _parse, str.encode)
    guarded = guard("/s/M", handler, counts, _calls())
    context = await _end_of(guarded.stream_stream)

    assert isinstance(context.error, errors.LimitExceeded)
    assert guarded.request_deserializer is _parse
    assert counts.heard[-1] == ("ended", "/s/M", 7.0, "LIMIT_EXCEEDED", True)


async def test_what_a_stream_has_serialized_itself_goes_as_it_is() -> None:
    async def method(request_iterator: object, context: Any) -> None:
        await context.write("made here")
        await context.write(b"\xff as it is")

    handler = grpc.stream_stream_rpc_method_handler(method, _parse, str.encode)
    guarded: Any = guard("/s/M", handler, None, _calls()).stream_stream
    context = FakeContext()
    await guarded(None, context)
    assert context.written == [b"made here", b"\xff as it is"]


@pytest.mark.parametrize("make", ["unary_stream", "stream_stream"])
def test_generators_are_refused_at_start(make: str) -> None:
    async def method(request: object, context: object) -> Any:
        yield "x"

    handler = getattr(grpc, f"{make}_rpc_method_handler")(method, _parse, str.encode)
    with pytest.raises(TypeError, match=r"/s/M .*context\.write"):
        guard("/s/M", handler, None, _calls())


async def test_unary_stream_is_guarded() -> None:
    failing = _failing(errors.NoPermission("closed"))
    handler = grpc.unary_stream_rpc_method_handler(failing, _parse, str.encode)
    context = await _end_of(guard("/s/M", handler, None, _calls()).unary_stream)
    assert isinstance(context.error, errors.NoPermission)


async def test_refuse_answers_any_call_with_the_error() -> None:
    context = await _end_of(refuse(errors.BrokerStarting("wait")).stream_stream)
    assert isinstance(context.error, errors.BrokerStarting)


def _rpc_error(status: grpc.StatusCode, *metadata: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        status, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details="words"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("UNAVAILABLE", errors.PeerUnavailable),
        ("DEADLINE_EXCEEDED", errors.PeerUnavailable),
        ("RESOURCE_EXHAUSTED", errors.LimitExceeded),
        ("UNIMPLEMENTED", errors.InvalidRequest),
        ("UNKNOWN", errors.InternalError),
    ],
)
def test_statuses_without_an_error_get_the_nearest(status: str, kind: type[CometError]) -> None:
    error = error_from(_rpc_error(grpc.StatusCode[status]))
    assert type(error) is kind
    assert error.message == f"{status}: words"


def test_a_write_that_the_streams_end_has_overtaken_is_no_fault_of_the_server() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Internal error from Core",
    )
    assert isinstance(error_from(error), errors.PeerUnavailable)


def test_the_error_in_the_metadata_counts() -> None:
    data = to_proto(errors.PositionFenced("old", fence=(3, 40))).SerializeToString()
    with pytest.raises(errors.PositionFenced) as caught, wire_errors():
        raise _rpc_error(grpc.StatusCode.ABORTED, ("other", b"x"), (ERROR_METADATA, data))
    assert caught.value.fence == (3, 40)


def test_damaged_metadata_falls_back_to_the_status() -> None:
    error = error_from(_rpc_error(grpc.StatusCode.UNAVAILABLE, (ERROR_METADATA, b"\xff")))
    assert isinstance(error, errors.PeerUnavailable)


def test_wire_errors_lets_other_errors_pass() -> None:
    with pytest.raises(KeyError), wire_errors():
        raise KeyError("x")
