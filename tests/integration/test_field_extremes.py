"""Each field of each request of each service at the ends of what it can hold: a good answer or an
error of the catalogue, nothing in the log, and everybody still serves. Generated from the contract,
so that a new field is played too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cometmq.clock import SystemClock
from cometmq.replication.versions import FORMAT_VERSION, PROTOCOL_MIN
from cometmq.rpc.channels import open_channel
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import ERROR_METADATA
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.server import RpcServer
from cometmq.v1 import broker_pb2, common_pb2, member_pb2
from tests.support.cluster.broker import batch, running_namesrv
from tests.support.cluster.live_group import LiveGroup, live_group
from tests.support.cluster.pullhold import running_pullhold
from tests.support.faults.border import services, usual_request, variants

AT_A_TIME = 64
PATIENCE_S = 60.0
IDLE_S = 0.2  # streams that go on without an answer are left then

_numbers = itertools.count(10)
_RECORDS, _ = batch(("T", 0, [b"x"]))
USUAL: dict[str, Any] = {
    "topic": "T",
    "topics": "T",
    "add": "T",
    "remove": "U",
    "group": "group",
    "client_id": "client",
    "tags": "tag",
    "key": "key",
    "keys": "key",
    "namespace": "namespace",
    "value": "value",
    "message_id": "g1/0",
    "cluster": "DefaultCluster",
    "broker_group": "g1",
    "address": "host:1",
    "internal_address": "host:2",
    "hold_ms": 1,
    "count": 1,
    "records": _RECORDS,
    "protocol_version": PROTOCOL_MIN,
    "format_version": FORMAT_VERSION,
    "store_id": "5" * 32,
    "nonce": b"n" * 32,
    "log_end_offset": 1_000,
    "read_queue_count": 1,
    "write_queue_count": 1,
    "permission": 6,
    "replication_mode": 1,
    "batch_id": 1,
    "epoch": 1,
    "role": 1,
    "flush_mode": 1,
    # Each registration of a group of its own, each follower with a number of its own: what one
    # leaves behind is no other's matter.
    "Member.broker_group": lambda: f"g-{next(_numbers)}",
    "UnregisterMemberRequest.broker_group": "nobody",
    "FollowerHello.member_id": lambda: 10 + next(_numbers) % 900,
    "EpochStart.epoch": 1,
    "TopicConfig.name": "made",
    "DeleteTopicRequest.topic": "never",
    "offsets": 0,
    "half_offsets": 0,
    "queue_ids": 0,
    "until_ms": 1,
    "bound": 1,
    "RetryPolicy.kind": broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED,
    "steps_ms": 10_000,
    "StepDownRequest.member_id": 999,
}
# What would change who writes, which is no matter of ranges.
NOT_PLAYED = {"StepDownRequest.member_id = absent", "StepDownRequest.member_id = 1"}


def joining() -> member_pb2.ReplicateRequest:
    """The hello of a follower that has nothing, which is let in."""
    hello = usual_request(member_pb2.FollowerHello.DESCRIPTOR, USUAL)
    del hello.epochs[:]
    hello.log_end_offset, hello.last_record_offset = 0, -1
    return member_pb2.ReplicateRequest(hello=hello)


# What has to come before, on the same stream.
FIRST: dict[str, Callable[[], Any]] = {"ReplicateRequest.ack": joining}


# Beyond what a field may hold: these must be refused, wherever they are taken at all.
BEYOND = (
    "form = 99",
    "_ms = -1",
    "member.epoch = 18446744073709551615",
    "epochs.epoch = 18446744073709551615",
    "data_version.epoch = 18446744073709551615",
    "data_version.counter = 18446744073709551615",
    "inline_deliveries.message_count = 18446744073709551615",
    "inline_deliveries.record_bytes = 18446744073709551615",
    "queue_id = -1",
    "offset = -1",
    "max_count = -1",
    "max_bytes = -1",
    "_mode = 99",
    "role = 99",
    "boundary = 99",
    "permission = 99",
)
# Watches do not look at what they are to forget, or want of a queue that is not theirs. An empty
# log has its last record at -1. What a producer says in its records is RocketMQ's.
NOT_LOOKED_AT = (
    "remove.queue_id",
    "inline_wanted.queue_id",
    "hello.last_record_offset",
    "answers_boot_ms",
    "retry_policy.initial_ms",  # of another kind of policy
    "retry_policy.max_ms",
)


def is_looked_at(place: Place, method: MethodDescriptor, name: str) -> bool:
    """Only the writer takes the commit of a pull."""
    if ".commit." in name and (place.name, method.name) != ("writer", "Pull"):
        return False
    return not any(part in name for part in NOT_LOOKED_AT)


@dataclass(frozen=True)
class Place:
    """A port, and the service that is asked there."""

    name: str
    channel: grpc.aio.Channel
    service: Any


@asynccontextmanager
async def everybody(directory: Path) -> AsyncIterator[tuple[list[Place], LiveGroup]]:
    """A name server, a writer, its follower, a pullhold, and a port that wants a proof."""
    known = services()
    (directory / "secret").write_text("correct-horse-battery")
    guarded = RpcServer(
        host="127.0.0.1",
        port=0,
        services=[],
        gate=Gate(),
        secret=SharedSecret(directory / "secret", SystemClock()),
    )
    await guarded.start()
    async with (
        running_namesrv(directory) as namesrv,
        live_group(directory, namesrv=(namesrv,)) as group,
        running_pullhold(namesrv) as pullhold,
        open_channel(namesrv) as names,
        open_channel(guarded.address) as strangers,
    ):
        await group[0].client.put_topic("T", 1)
        await group[0].client.send("T", 0, b"first")
        await group.all_in_sync(0, 1)
        places = [
            Place("namesrv", names, known["NameService"]),
            Place("pullhold", pullhold.channel, known["HoldService"]),
            Place("guarded", strangers, known["AuthService"]),
        ]
        for member, role in ((group[0], "writer"), (group[1], "follower")):
            client = member.client
            places += [
                Place(role, client.channel, known["BrokerService"]),
                Place(role, client.admin_channel, known["BrokerAdminService"]),
                Place(role, client.admin_channel, known["MemberService"]),
            ]
        assert {place.service.name for place in places} == set(known)
        yield places, group
    await guarded.stop(0)


GOOD = "OK"


def outcome(error: grpc.aio.AioRpcError) -> str:
    """How a call ended: the name of an error of the catalogue, else what is wrong, after a !."""
    found = dict(error.trailing_metadata() or ()).get(ERROR_METADATA)
    if found is not None:
        return known(common_pb2.Error.FromString(found).name)
    own = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    return GOOD if error.code() in own else f"! {error.code().name}: {error.details()}"


def known(name: str) -> str:
    return f"! {name}" if name == "INTERNAL_ERROR" else name


def inside(message: Message) -> str:
    """The first error within an answer."""
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            if isinstance(inner, common_pb2.Error):
                return known(inner.name)
            if (found := inside(inner)) != GOOD:
                return found
    return GOOD


async def call(
    place: Place, method: MethodDescriptor, *requests: Any, idle_s: float = IDLE_S
) -> str:
    """Play requests, on one stream where there is one; what came of it. What goes on for
    ``idle_s`` without an answer is good, and is left.
    """
    path = f"/{place.service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    kinds = {
        (False, False): place.channel.unary_unary,
        (False, True): place.channel.unary_stream,
        (True, True): place.channel.stream_stream,
    }
    start: Any = kinds[method.client_streaming, method.server_streaming]
    stub = start(path, lambda request: request.SerializeToString(), parse)
    try:
        if not method.server_streaming:
            waits = method.name == "Hold"
            return inside(await stub(requests[0], timeout=idle_s if waits else PATIENCE_S))
        stream = stub() if method.client_streaming else stub(requests[0])
        try:
            return await _stream(stream, requests if method.client_streaming else (), idle_s)
        finally:
            stream.cancel()
    except grpc.aio.AioRpcError as error:
        return outcome(error)


async def _stream(stream: Any, requests: tuple[Any, ...], idle_s: float) -> str:
    with suppress(asyncio.InvalidStateError):  # it has ended already; reading tells why
        for request in requests:
            await stream.write(request)
        if requests:
            await stream.done_writing()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                answer = await stream.read()
        except TimeoutError:
            return GOOD
        if answer is grpc.aio.EOF:
            return GOOD
        if (found := inside(answer)) != GOOD:
            return found


Makes = list[Callable[[], Any]]


def plays(method: MethodDescriptor) -> list[tuple[str, Makes]]:
    """What each call is about, and its requests."""
    kind = method.input_type
    found: list[tuple[str, Makes]] = [("usual", [lambda: usual_request(kind, USUAL)])]
    for name, make in variants(kind, USUAL):
        if name not in NOT_PLAYED:
            befores = [first for prefix, first in FIRST.items() if name.startswith(prefix)]
            found.append((name, [*befores, make]))
    return found


async def test_no_field_of_any_request_hurts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    wrong: list[str] = []
    found: Counter[str] = Counter()
    async with everybody(tmp_path) as (places, group):
        room = asyncio.Semaphore(AT_A_TIME)

        async def play(place: Place, method: MethodDescriptor, name: str, makes: Makes) -> None:
            beyond = name.endswith(BEYOND) and is_looked_at(place, method, name)
            async with room:
                requests = [make() for make in makes]
                idle_s = PATIENCE_S if beyond else IDLE_S  # a refusal comes, on any machine
                outcomes = [await call(place, method, *requests, idle_s=idle_s)]
                if method.name == "RegisterMember":  # what has that left behind?
                    again = usual_request(method.input_type, USUAL)
                    again.member.broker_group = requests[0].member.broker_group
                    outcomes.append(await call(place, method, again))
            found.update(outcomes)
            if any(one.startswith("!") for one in outcomes) or (beyond and outcomes[0] == GOOD):
                wrong.append(f"{place.name} {method.name}: {name}: {outcomes}")

        async with asyncio.TaskGroup() as tasks:
            for place in places:
                for method in place.service.methods:
                    for name, makes in plays(method):
                        tasks.create_task(play(place, method, name, makes))
        assert not wrong, "\n".join(sorted(wrong)[:40])
        assert (group[0].role, group[1].role) == ("writer", "follower")
        await group[0].client.send("T", 0, b"last")
        assert (await group[0].client.bodies("T", 0))[-1] == b"last"
        for place in places:
            for method in place.service.methods:
                request = usual_request(method.input_type, USUAL)
                assert not (await call(place, method, request)).startswith("!"), method.name
    told = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert not told, [r.getMessage() for r in told][:10]
    assert found[GOOD] > 500, found
    assert len(found) > 15, found
