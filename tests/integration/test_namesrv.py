"""The real name server, in this loop on a free port; at the end as a process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from cometmq import errors
from cometmq.errors import CometError, InvalidRequest, TopicNameInvalid
from cometmq.messaging import order
from cometmq.rpc import background
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import error_from, wire_errors
from cometmq.v1 import common_pb2, namesrv_pb2
from cometmq.v1 import namesrv_pb2 as pb
from cometmq.v1.namesrv_pb2_grpc import NameServiceStub
from services.namesrv import servicer
from services.namesrv.app import App
from services.namesrv.config import NamesrvConfig
from services.namesrv.listen import SERVICE, new_server
from services.namesrv.routes import RouteTable
from services.namesrv.values import encode_table
from tests.support.cluster.processes import Processes
from tests.support.cluster.pullhold import scraped
from tests.support.waiting import DEADLINE_S, until, until_async

if TYPE_CHECKING:  # the generated module has the class only for type checkers
    from cometmq.v1.namesrv_pb2_grpc import NameServiceAsyncStub


class ManualClock:
    """Time that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def wall_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def boottime_s(self) -> float:
        return self.now_s


class Running:
    """A name server and a stub to it."""

    def __init__(self, app: App, channel: grpc.aio.Channel, clock: ManualClock) -> None:
        self.app = app
        self.channel = channel
        self.clock = clock
        self.stub: NameServiceAsyncStub = NameServiceStub(channel)

    async def call(self, method: str, request: Any) -> Any:
        """A unary call; errors are the catalogue's."""
        with wire_errors():
            return await getattr(self.stub, method)(request, timeout=DEADLINE_S)

    async def register(self, *topics: str, **about: int) -> pb.RegisterMemberResponse:
        answer: pb.RegisterMemberResponse = await self.call(
            "RegisterMember", _registration(*topics, **about)
        )
        return answer

    async def route(self, topic: str) -> pb.TopicRoute:
        answer = await self.call("QueryRoute", pb.QueryRouteRequest(topic=topic))
        route: pb.TopicRoute = answer.route
        return route


def _registration(*topics: str, **about: int) -> pb.RegisterMemberRequest:
    """Of member 0 of group g, epoch 1, version 0, unless told otherwise."""
    number = about.get("member_id", 0)
    member = pb.Member(
        cluster="c",
        broker_group="g",
        member_id=number,
        role=common_pb2.MemberRole.ValueType(about.get("role", common_pb2.MEMBER_ROLE_WRITER)),
        address=f"10.0.0.{number}:10911",
        internal_address=f"10.0.0.{number}:10912",
        epoch=about.get("epoch", 1),
    )
    settings = [
        common_pb2.TopicConfig(
            name=topic,
            read_queue_count=about.get("queues", 4),
            write_queue_count=4,
            permission=6,
            flush_mode=common_pb2.FLUSH_MODE_ASYNC,
            replication_mode=common_pb2.REPLICATION_MODE_ASYNC,
            message_type=common_pb2.MESSAGE_TYPE_FIFO,
            is_ordered=False,
        )
        for topic in topics
    ]
    version = pb.DataVersion(epoch=about.get("epoch", 1), counter=about.get("version", 0))
    return pb.RegisterMemberRequest(member=member, data_version=version, topics=settings)


@pytest.fixture
def config(tmp_path: Path) -> NamesrvConfig:
    return NamesrvConfig(
        port=0,
        metrics_port=0,
        kv_config_path=tmp_path / "kvConfig.json",
        announce_file=tmp_path / "announce.json",
        drain_grace_s=5,
        scan_interval_s=0.01,
    )


@contextlib.asynccontextmanager
async def _running(config: NamesrvConfig) -> AsyncIterator[Running]:
    clock = ManualClock()
    server = new_server(config)
    await server.start()
    try:
        async with App(config, server, clock=clock) as app, open_channel(server.address) as channel:
            yield Running(app, channel, clock)
    finally:
        await server.stop(0)


Watch = Any  # grpc.aio.StreamStreamCall of the generated stub


async def _watch(running: Running, *topics: str) -> Watch:
    call: Watch = running.stub.WatchRoutes()
    # The watch may have ended: the reader learns why.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.write(pb.WatchRoutesRequest(add=topics))
    return call


async def _next(call: Watch) -> pb.WatchRoutesResponse:
    async with asyncio.timeout(DEADLINE_S):
        with wire_errors():
            message = await call.read()
    assert message is not grpc.aio.EOF
    response: pb.WatchRoutesResponse = message
    return response


# --- registration and routes ----------------------------------------------------------------------


async def test_a_registered_topic_has_a_route(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        answer = await running.register("t", "u")
        route = await running.route("t")
        listed = await running.call("ListTopics", pb.ListTopicsRequest())

        assert answer.writer == _registration().member
        assert [group.broker_group for group in route.groups] == ["g"]
        assert route.groups[0].topic == _registration("t").topics[0]
        assert list(route.groups[0].members) == [_registration().member]
        assert list(listed.topics) == ["t", "u"]


async def test_the_fixed_queues_of_a_topic_are_part_of_its_route(config: NamesrvConfig) -> None:
    """RocketMQ's file counts as it is; a change reaches those that watch, a bad one nobody."""
    of_rocketmq = {"t": "b:2;a:4", "u": "nonsense"}
    config.kv_config_path.write_bytes(encode_table({order.NAMESPACE: of_rocketmq}))
    async with _running(config) as running:
        await running.register("t", "u")
        watch = await _watch(running, "t")
        [route] = (await _next(watch)).routes
        assert [(one.broker_group, one.queue_count) for one in route.order] == [("b", 2), ("a", 4)]
        assert not (await running.route("u")).order
        for key, value in (("t", "b:0"), ("t", ""), ("t/u", "b:1")):
            request = pb.PutValueRequest(namespace=order.NAMESPACE, key=key, value=value)
            with pytest.raises((InvalidRequest, TopicNameInvalid)):
                await running.call("PutValue", request)
        request = pb.PutValueRequest(namespace=order.NAMESPACE, key="t", value="a:1")
        await running.call("PutValue", request)
        [route] = (await _next(watch)).routes
        assert [(one.broker_group, one.queue_count) for one in route.order] == [("a", 1)]
        deletion = pb.DeleteValueRequest(namespace=order.NAMESPACE, key="t")
        await running.call("DeleteValue", deletion)
        assert not (await _next(watch)).routes[0].order
        watch.cancel()


async def test_a_follower_without_writer_learns_that_there_is_none(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        answer = await running.register(role=common_pb2.MEMBER_ROLE_FOLLOWER)
        assert not answer.HasField("writer")


async def test_the_cluster_is_described(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t", version=3)
        described = await running.call("DescribeCluster", pb.DescribeClusterRequest())

        (status,) = described.members
        assert status.member == _registration().member
        assert (status.last_heard_ms, status.topic_count) == (1_000_000, 1)
        assert (status.data_version.epoch, status.data_version.counter) == (1, 3)


async def test_a_take_over_is_told_at_once_and_the_old_writer_is_gone(
    config: NamesrvConfig,
) -> None:
    """It never said good-bye, and comes back to a group that has moved on."""
    follower = common_pb2.MEMBER_ROLE_FOLLOWER
    async with _running(config) as running:
        await running.register("t")
        await running.register(member_id=1, role=follower)
        watch = await _watch(running, "t")
        assert len((await _next(watch)).routes[0].groups[0].members) == 2
        await running.register("t", member_id=1, epoch=2)
        (now,) = (await _next(watch)).routes[0].groups[0].members
        assert (now.member_id, now.role, now.epoch) == (1, common_pb2.MEMBER_ROLE_WRITER, 2)
        with pytest.raises(errors.StaleEpoch):
            await running.register("t")
        assert list((await running.route("t")).groups[0].members) == [now]
        await running.register(epoch=2, role=follower)
        back = (await _next(watch)).routes[0].groups[0].members
        assert [member.role for member in back] == [follower, common_pb2.MEMBER_ROLE_WRITER]
        watch.cancel()


def _announce_stop(epoch: int = 1) -> pb.UnregisterMemberRequest:
    return pb.UnregisterMemberRequest(cluster="c", broker_group="g", member_id=0, epoch=epoch)


async def test_an_unregistered_member_is_gone_at_once(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t")
        for _ in range(2):
            await running.call("UnregisterMember", _announce_stop())
        with pytest.raises(errors.TopicNotFound):
            await running.route("t")


async def test_a_failure_of_background_work_ends_no_name_server(
    config: NamesrvConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The work begins again."""
    expire, looks = RouteTable.expire, list[int]()

    def fails_first(table: RouteTable, now_s: float) -> Any:
        looks.append(len(looks))
        assert len(looks) > 1, "a fault"
        return expire(table, now_s)

    monkeypatch.setattr(background, "AGAIN_S_MIN", 0.001)
    monkeypatch.setattr(RouteTable, "expire", fails_first)
    async with _running(replace(config, scan_interval_s=0.01)) as server:
        await until(lambda: len(looks) > 2)
        await server.register("t")
    [told] = [one for one in caplog.records if "begins again" in one.getMessage()]
    assert vars(told)["fields"]["task"] == "silent members"


async def test_a_silent_member_expires(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t")
        watch = await _watch(running, "t")
        assert len((await _next(watch)).routes[0].groups) == 1
        running.clock.now_s += 119.0
        await running.register("t", member_id=1, role=common_pb2.MEMBER_ROLE_FOLLOWER)
        assert len((await _next(watch)).routes[0].groups[0].members) == 2
        running.clock.now_s += 1.0

        left = (await _next(watch)).routes[0].groups[0].members
        assert [member.member_id for member in left] == [1]


async def test_the_write_permission_can_be_taken_and_given_back(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t", "u")
        for writable, permission in ((False, 4), (True, 6)):
            request = pb.SetWritePermissionRequest(broker_group="g", writable=writable)
            assert (await running.call("SetWritePermission", request)).topic_count == 2
            assert (await running.route("t")).groups[0].topic.permission == permission


# --- the watch stream -----------------------------------------------------------------------------


async def test_a_watch_starts_with_what_is_known(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t")
        first = await _next(await _watch(running, "t", "nowhere"))

        assert [route.topic for route in first.routes] == ["t", "nowhere"]
        assert first.routes[0] == await running.route("t")
        assert len(first.routes[1].groups) == 0


async def test_a_change_arrives_in_one_message(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        watch = await _watch(running, "t", "u", "v")
        await _next(watch)
        await running.register("t", "u", "other")
        change = await _next(watch)

        assert sorted(route.topic for route in change.routes) == ["t", "u"]
        assert change.routes[0].groups[0].members[0] == _registration().member


async def test_topics_can_be_added_and_removed(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        watch = await _watch(running, "t")
        await _next(watch)
        await watch.write(pb.WatchRoutesRequest(add=["u"], remove=["t"]))
        assert [route.topic for route in (await _next(watch)).routes] == ["u"]
        await running.register("t", "u")
        assert [route.topic for route in (await _next(watch)).routes] == ["u"]


async def test_a_half_closed_watch_goes_on(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        watch = await _watch(running, "t")
        await watch.done_writing()
        await _next(watch)
        await running.register("t")
        assert len((await _next(watch)).routes[0].groups) == 1


async def test_a_slow_watcher_gets_only_the_latest(
    config: NamesrvConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is held in its first write, as by a client that does not read."""
    write_may_go_on = asyncio.Event()
    original = servicer.NameServicer._send_changes

    class SlowContext:
        def __init__(self, context: Any) -> None:
            self._context = context
            self.room = context.room

        async def write(self, message: pb.WatchRoutesResponse) -> None:
            await write_may_go_on.wait()
            await self._context.write(message)

    def send_slowly(self: Any, watcher: Any, woken: Any, context: Any) -> Any:
        return original(self, watcher, woken, SlowContext(context))

    monkeypatch.setattr(servicer.NameServicer, "_send_changes", send_slowly)
    async with _running(config) as running:
        watch = await _watch(running, "t")
        await until_async(lambda: _gauge_is(running, "cometmq_namesrv_watch_streams", 1))
        for version in range(1, 51):
            await running.register("t", version=version, queues=version)
        write_may_go_on.set()

        messages = [await _next(watch)]
        while not messages[-1].routes[0].groups or _queues(messages[-1]) != 50:
            messages.append(await _next(watch))
        assert len(messages) <= 2


def _queues(message: pb.WatchRoutesResponse) -> int:
    return message.routes[0].groups[0].topic.read_queue_count


async def test_a_large_answer_comes_in_parts(
    config: NamesrvConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "WATCH_MESSAGE_BYTES", 100)
    topics = [f"topic{number}" for number in range(30)]
    async with _running(config) as running:
        await running.register(*topics)
        watch = await _watch(running, *topics)
        parts: list[list[str]] = []
        while sum(map(len, parts)) < len(topics):
            parts.append([route.topic for route in (await _next(watch)).routes])

        assert [topic for part in parts for topic in part] == topics
        assert len(parts) > 5


async def test_a_stream_that_ends_is_forgotten(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        gone, stays = await _watch(running, "t"), await _watch(running, "t")
        await gone.done_writing()
        await _next(gone)
        await _next(stays)
        gone.cancel()
        await until_async(lambda: _gauge_is(running, "cometmq_namesrv_watch_streams", 1))
        await running.register("t")
        assert len((await _next(stays)).routes[0].groups) == 1


async def test_draining_ends_the_watch_streams(config: NamesrvConfig) -> None:
    server = new_server(config)
    await server.start()
    async with open_channel(server.address) as channel:
        async with App(config, server):
            watch = NameServiceStub(channel).WatchRoutes()
            await watch.write(pb.WatchRoutesRequest(add=["t"]))
            await _next(watch)
        with pytest.raises(errors.BrokerDraining):
            await _next(watch)


async def test_a_damaged_table_keeps_it_from_starting(config: NamesrvConfig) -> None:
    await asyncio.to_thread(config.kv_config_path.write_text, "{")
    with pytest.raises(errors.StoreDamaged):
        async with _running(config):
            pass


# --- values ---------------------------------------------------------------------------------------


async def test_values_survive_a_restart(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        for key in ("a", "b"):
            await running.call(
                "PutValue", pb.PutValueRequest(namespace="n", key=key, value=key * 2)
            )
        await running.call("DeleteValue", pb.DeleteValueRequest(namespace="n", key="b"))
    async with _running(config) as running:
        listed = await running.call("ListValues", pb.ListValuesRequest(namespace="n"))
        assert dict(listed.values) == {"a": "aa"}


# --- bad input ------------------------------------------------------------------------------------

_BAD_NAMES = ["", "../x", "t\n", "x" * 128, "тема", "a\0b", "%00 "]


def _bad_registrations() -> Iterator[tuple[pb.RegisterMemberRequest, type[CometError]]]:
    yield pb.RegisterMemberRequest(), errors.InvalidRequest
    for field, value in (
        ("cluster", ""),
        ("broker_group", "a/b"),
        ("member_id", -1),
        ("role", 0),
        ("address", "nowhere"),
        ("internal_address", "x y:1"),
        ("epoch", 0),
    ):
        request = _registration("t")
        setattr(request.member, field, value)
        yield request, errors.InvalidRequest
    for name in _BAD_NAMES:
        yield _registration("good", name, version=1), errors.TopicNameInvalid
    yield _registration("t", "t", version=1), errors.InvalidRequest
    yield _registration("t", version=1, queues=0), errors.InvalidRequest
    yield _registration("t", version=1, queues=1025), errors.InvalidRequest


def _bad_requests() -> Iterator[tuple[str, Any, type[CometError]]]:
    for registration, kind in _bad_registrations():
        yield "RegisterMember", registration, kind
    for name in _BAD_NAMES:
        yield "QueryRoute", pb.QueryRouteRequest(topic=name), errors.TopicNameInvalid
    yield "QueryRoute", pb.QueryRouteRequest(topic="absent"), errors.TopicNotFound
    yield "SetWritePermission", pb.SetWritePermissionRequest(broker_group="h"), errors.GroupNotFound
    yield "SetWritePermission", pb.SetWritePermissionRequest(), errors.GroupNotFound
    yield "PutValue", pb.PutValueRequest(namespace="n"), errors.InvalidRequest
    yield "PutValue", pb.PutValueRequest(namespace="n" * 256, key="k"), errors.InvalidRequest
    large = pb.PutValueRequest(namespace="n", key="k", value="v" * 65_537)
    yield "PutValue", large, errors.InvalidRequest
    yield "DeleteValue", pb.DeleteValueRequest(namespace="n"), errors.InvalidRequest
    yield "ListValues", pb.ListValuesRequest(), errors.InvalidRequest


async def test_bad_requests_get_their_error_and_change_nothing(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("before")
        for method, request, kind in _bad_requests():
            with pytest.raises(CometError) as caught:
                await running.call(method, request)
            assert type(caught.value) is kind, (method, request)

        listed = await running.call("ListTopics", pb.ListTopicsRequest())
        assert list(listed.topics) == ["before"]


@pytest.mark.parametrize("topic", _BAD_NAMES)
async def test_a_bad_watch_ends_with_its_error(config: NamesrvConfig, topic: str) -> None:
    async with _running(config) as running:
        with pytest.raises(errors.TopicNameInvalid):
            await _next(await _watch(running, "t", topic))


async def test_limits_end_a_watch(config: NamesrvConfig) -> None:
    tight = replace(config, watch_topics_max=2, watch_streams_max=1)
    async with _running(tight) as running:
        with pytest.raises(errors.LimitExceeded):
            await _next(await _watch(running, "a", "b", "c"))
        await until_async(lambda: _gauge_is(running, "cometmq_namesrv_watch_streams", 0))
        await _next(await _watch(running, "a", "b"))
        with pytest.raises(errors.LimitExceeded):
            await _next(await _watch(running, "a"))


async def test_random_bytes_never_leak_an_exception(
    config: NamesrvConfig, rng: random.Random
) -> None:
    service = namesrv_pb2.DESCRIPTOR.services_by_name["NameService"]
    unary = [method.name for method in service.methods if method.name != "WatchRoutes"]
    async with _running(config) as running:
        for method in [*unary * 8, *["WatchRoutes"] * 8]:
            error = await _send_bytes(running.channel, method, rng.randbytes(rng.randint(1, 40)))
            if error is not None:
                assert not isinstance(error_from(error), errors.InternalError), (method, error)
                assert "rror" not in (error.details() or ""), error.details()


async def _send_bytes(
    channel: grpc.aio.Channel, method: str, data: bytes
) -> grpc.aio.AioRpcError | None:
    """The error that answers ``data``; a stream that goes on has none."""
    path = f"/{SERVICE}/{method}"
    try:
        if method == "WatchRoutes":
            stream: Any = channel.stream_stream(path)
            watch = stream(timeout=0.5)
            await watch.write(b"\xff" + data)
            await watch.read()
        else:
            call: Any = channel.unary_unary(path)
            await call(data, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_invalid_utf8_is_an_invalid_request(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        error = await _send_bytes(running.channel, "QueryRoute", b"\x0a\x02\xff\xfe")
        assert error is not None
        assert isinstance(error_from(error), errors.InvalidRequest)


# --- the process ----------------------------------------------------------------------------------


async def _gauge_is(running: Running, name: str, value: float) -> bool:
    text = await scraped(running.app.metrics_address)
    return f'\n{name}{{node_type="namesrv"}} {value:.1f}\n' in text


async def test_metrics_tell_what_is_registered(config: NamesrvConfig) -> None:
    async with _running(config) as running:
        await running.register("t", "u")
        with pytest.raises(errors.TopicNotFound):
            await running.route("absent")
        text = await scraped(running.app.metrics_address)

        group = 'broker_group="g",cluster="c",node_type="namesrv"'
        assert f'\ncometmq_namesrv_members{{{group},role="writer"}} 1.0\n' in text
        assert f'\ncometmq_namesrv_members{{{group},role="follower"}} 0.0\n' in text
        assert '\ncometmq_namesrv_topics{node_type="namesrv"} 2.0\n' in text
        assert 'request_code="/cometmq.v1.NameService/QueryRoute"' in text
        assert 'response_code="TOPIC_NOT_FOUND"' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_announces_itself_and_stops_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Processes(tmp_path) as processes:
        service = processes.service("names", "namesrv", kv_config_path=tmp_path / "kv.json")
        with grpc.insecure_channel(service.address) as channel:
            answer = NameServiceStub(channel).ListTopics(pb.ListTopicsRequest(), timeout=DEADLINE_S)
        assert list(answer.topics) == []
        assert "cometmq_build_info" in asyncio.run(scraped(service.metrics_address))
        assert processes.end("names", number) == 0


def test_a_process_with_a_bad_option_tells_and_fails(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        command = [sys.executable, "-m", "services.namesrv", "--prot", "1"]
        assert processes.spawn("names", command).wait(DEADLINE_S) == 1
        told = processes.log("names").read_text()
        assert "CONFIG_UNKNOWN_KEY: there is no option 'prot'" in told
