"""What must not get in, each with its error over the wire; and that nothing of it stays."""

from __future__ import annotations

import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.errors import CometError
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.timers import TIMER_TOPIC
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    STREAM,
    BrokerClient,
    LiveBroker,
    SendLane,
    batch,
    encoded,
    refusal,
    running_broker,
)
from tests.support.faults.forgeries import FORGERIES, TOPIC

BAD_TOPICS = ["../x", "x\n", "a" * 128, "", ".", "a b", "Tü", "a/b", "a\0"]


async def test_forged_batches_are_refused_and_survived(tmp_path: Path) -> None:
    # Large enough for the largest of them, so that it is refused for what it is.
    largest = max(len(forgery.records) for forgery in FORGERIES)
    options = {"mapped_file_size_commit_log": max(1 << 18, 2 * largest)}
    bodies = [b"%d" % number for number in range(len(FORGERIES))]
    async with running_broker(tmp_path, **options) as broker:
        await broker.put_topic(TOPIC, 2)
        lane = await broker.lane()
        await lane.send((TOPIC, 0, [b"before"]), (TOPIC, 1, [b"other"]))
        for forgery, body in zip(FORGERIES, bodies, strict=True):
            checksum = zlib.crc32(forgery.records)
            error = await lane.refused(forgery.records, forgery.proto_segments, checksum)
            assert error.name() == forgery.error, f"{forgery.name}: {error}"
            await lane.send((TOPIC, 0, [body]))
        broker.crash()
    async with running_broker(tmp_path, **options) as broker:
        assert await broker.bodies(TOPIC, 0) == [b"before", *bodies]
        assert await broker.bodies(TOPIC, 1) == [b"other"]
        later = (await broker.send(TOPIC, 0, b"later")).sent[0]
        assert later.position.offset == len(bodies) + 1


async def test_a_batch_larger_than_a_batch_may_be(tmp_path: Path) -> None:
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 23) as broker:
        await broker.put_topic(TOPIC, 1)
        lane = await broker.lane()
        halves = [b"x" * (2 * 1024 * 1024 + 40_000)] * 2
        error = await lane.refused(*batch((TOPIC, 0, halves)))
        assert error.name() == "BATCH_TOO_LARGE"
        error = await lane.refused(*batch((TOPIC, 0, [b""] * 1025)))
        assert error.name() == "BATCH_TOO_LARGE"
        largest = b"x" * (4 * 1024 * 1024)
        await lane.send((TOPIC, 0, [largest]))
        assert await broker.bodies(TOPIC, 0) == [largest]


async def test_a_batch_larger_than_a_log_file(tmp_path: Path) -> None:
    async with running_broker(tmp_path, mapped_file_size_commit_log=256 * 1024) as broker:
        await broker.put_topic(TOPIC, 1)
        lane = SendLane(broker.stub)
        told = (await lane.opened()).batch_max_bytes
        assert told == 256 * 1024 - 8
        head = len(batch((TOPIC, 0, [b""]))[0])
        error = await lane.refused(*batch((TOPIC, 0, [b"x" * (told - head + 1)])))
        assert error.name() == "BATCH_TOO_LARGE"
        await lane.send((TOPIC, 0, [b"x" * (told - head)]))


# --- the structured form ------------------------------------------------------------------------

OUTGOING: list[tuple[str, dict[str, Any], str]] = [
    ("topic unknown", {"topic": "unknown"}, "TOPIC_NOT_FOUND"),
    ("queue unknown", {"queue_id": 2}, "QUEUE_NOT_FOUND"),
    ("queue negative", {"queue_id": -1}, "QUEUE_NOT_FOUND"),
    ("body too large", {"body": b"x" * (4 * 1024 * 1024 + 1)}, "BODY_TOO_LARGE"),
    ("body far too large", {"body": b"x" * (6 * 1024 * 1024)}, "BODY_TOO_LARGE"),
    ("tag with a bar", {"tag": "a|b"}, "PROPERTIES_INVALID"),
    ("tag with a control character", {"tag": "a\x02"}, "PROPERTIES_INVALID"),
    ("key with a blank", {"keys": ["a b"]}, "PROPERTIES_INVALID"),
    ("key empty", {"keys": [""]}, "PROPERTIES_INVALID"),
    ("property name empty", {"properties": {"": "v"}}, "PROPERTIES_INVALID"),
    ("property value empty", {"properties": {"k": ""}}, "PROPERTIES_INVALID"),
    ("property with a separator", {"properties": {"k": "a\x01b"}}, "PROPERTIES_INVALID"),
    ("property reserved", {"properties": {"DELAY": "3"}}, "PROPERTY_RESERVED"),
    ("property with its own field", {"properties": {"TAGS": "x"}}, "PROPERTY_RESERVED"),
    ("properties too long", {"properties": {"k": "v" * 32_768}}, "PROPERTIES_TOO_LARGE"),
    *((f"topic {name!r}", {"topic": name}, "TOPIC_NAME_INVALID") for name in BAD_TOPICS),
    ("topic of the system", {"topic": "rmq_sys_cometmq_state"}, "NO_PERMISSION"),
    ("retry topic", {"topic": "%RETRY%g"}, "NO_PERMISSION"),
]


async def test_structured_send_refuses_each_with_its_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 2)
        for what, fields, name in OUTGOING:
            good = pb.OutgoingMessage(topic="T", queue_id=0, body=b"good")
            bad = pb.OutgoingMessage(**{"topic": "T", "queue_id": 1, "body": b"bad", **fields})
            error = await refusal(broker.stub.Send(pb.SendRequest(messages=[good, bad])))
            assert (error.name(), error.segment) == (name, 1), what
        assert (await broker.status("T", 0)).appended_offset == 0  # all or nothing


async def test_structured_send_counts_its_messages(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for count in (0, 1025):
            messages = [pb.OutgoingMessage(topic="T")] * count
            error = await refusal(broker.stub.Send(pb.SendRequest(messages=messages)))
            assert error.name() == "INVALID_REQUEST", count


async def test_structured_send_of_too_much_at_once(tmp_path: Path) -> None:
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 23) as broker:
        await broker.put_topic("T", 1)
        messages = [pb.OutgoingMessage(topic="T", body=b"x" * 1024 * 1024)] * 5
        error = await refusal(broker.stub.Send(pb.SendRequest(messages=messages)))
        assert error.name() == "BATCH_TOO_LARGE"
        messages *= 2  # above what gRPC takes at all
        error = await refusal(broker.stub.Send(pb.SendRequest(messages=messages)))
        assert error.name() == "LIMIT_EXCEEDED"


async def test_ids_of_stubs_take_bounded_memory(tmp_path: Path) -> None:
    """Of one client and of many, with ids of every form."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for turn in range(6):
            messages = [
                pb.OutgoingMessage(topic="T", properties={"UNIQ_KEY": unique_id})
                for n in range(turn * 512, turn * 512 + 512)
                for unique_id in (f"text {n}", f"{n:026X}{n:08X}")
            ]
            await broker.stub.Send(pb.SendRequest(messages=messages))
        sent_ids = broker.state.sent_ids
        sent_ids.validate()
        assert len(sent_ids) == 1_024 + 6 * 512


# --- what a segment may say ---------------------------------------------------------------------


NO_SEGMENTS: list[tuple[dict[str, Any], str]] = [
    ({"kind": 3}, "BATCH_MALFORMED"),
    ({"kind": 4}, "GROUP_NAME_INVALID"),
    ({"kind": 5}, "INVALID_REQUEST"),
    ({"kind": 99}, "INVALID_REQUEST"),
    ({"kind": -1}, "INVALID_REQUEST"),
    ({"kind": 1, "delay_level": 1}, "INVALID_REQUEST"),
    ({"kind": 2}, "DELAY_LEVEL_INVALID"),
    ({"kind": 2, "delay_level": -1}, "DELAY_LEVEL_INVALID"),
    ({"kind": 2, "delay_level": 2**31 - 1}, "DELAY_LEVEL_INVALID"),
    ({"kind": 2, "delay_level": 1, "no_wait_store": True}, "BATCH_MALFORMED"),
    ({"count": 0}, "BATCH_MALFORMED"),
    ({"count": -1}, "BATCH_MALFORMED"),
    ({"count": 2**31 - 1}, "BATCH_TOO_LARGE"),
]


async def test_what_no_segment_may_say(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        # Makes the topics of messages that wait.
        delayed = pb.OutgoingMessage(topic="T", delay_level=18)
        timed = pb.OutgoingMessage(topic="T", delay_ms=3_600_000)
        await broker.stub.Send(pb.SendRequest(messages=[delayed, timed]))
        lane = await broker.lane()
        records, _ = batch(("T", 0, [b"x"]))
        for fields, name in NO_SEGMENTS:
            segment = pb.Segment(**{"topic": "T", "queue_id": 0, "count": 1, **fields})
            assert (await lane.refused(records, [segment])).name() == name, fields
        queues = ((SCHEDULE_TOPIC, 17, 1), (TIMER_TOPIC, 0, 1), ("T", 0, 0))
        for topic, queue_id, count in queues:
            assert (await broker.status(topic, queue_id)).appended_offset == count, topic


async def test_a_batch_that_lies_about_its_ids_hides_no_message(tmp_path: Path) -> None:
    """The broker looks at the first and the last id. Who lies about those between is told of a
    part of the batch, at worst; messages that have these ids are stored.
    """

    def one(counter: int, body: bytes) -> bytes:
        raw = f"UNIQ_KEY\x01{STREAM}{counter:08X}\x02".encode()
        return encoded("T", 0, body, properties=raw)

    segment = pb.Segment(topic="T", queue_id=0, count=3)
    lies = one(0, b"lie 0") + one(77, b"lie 1") + one(2, b"lie 2")
    truth = one(0, b"0") + one(1, b"1") + one(2, b"2")
    stored = [b"lie 0", b"lie 1", b"lie 2", b"0", b"1", b"2"]
    for crashes in (True, False):
        async with running_broker(tmp_path) as broker:
            lane = await broker.lane()
            if crashes:
                await broker.put_topic("T", 1)
                assert not (await lane.exchange(lies, [segment])).HasField("error")
                again = await lane.exchange(lies, [segment])
                assert (again.stored_count, list(again.queue_offsets)) == (1, [0])
            assert not (await lane.exchange(truth, [segment])).HasField("error")
            assert await broker.bodies("T", 0) == stored, "what is honest is stored, once"
            broker.state.streams.validate()
            if crashes:
                broker.crash()


# --- reading, groups, administration ------------------------------------------------------------


def _queue(topic: str = "T", queue_id: int = 0) -> common.QueueRef:
    return common.QueueRef(topic=topic, queue_id=queue_id)


def _pull(**fields: Any) -> Callable[[BrokerClient], Awaitable[object]]:
    return lambda b: b.stub.Pull(pb.PullRequest(**{"queue": _queue(), **fields}))


def _commit(group: str, count: int = 1) -> Callable[[BrokerClient], Awaitable[object]]:
    return lambda b: b.commit(group, *[("T", 0, 0, 0)] * count)


def _put(**fields: Any) -> Callable[[BrokerClient], Awaitable[object]]:
    config = common.TopicConfig(**{"name": "N", **fields})
    return lambda b: b.admin.PutTopic(pb.PutTopicRequest(topic=config))


def _message(message_id: str) -> Callable[[BrokerClient], Awaitable[object]]:
    return lambda b: b.stub.GetMessage(pb.GetMessageRequest(message_id=message_id))


def _queues(count: int) -> Callable[[BrokerClient], Awaitable[object]]:
    return lambda b: b.stub.QueryQueues(pb.QueryQueuesRequest(queues=[_queue()] * count))


def _offsets(group: str, count: int = 1) -> Callable[[BrokerClient], Awaitable[object]]:
    request = pb.QueryOffsetsRequest(group=group, queues=[_queue()] * count)
    return lambda b: b.stub.QueryOffsets(request)


def _group(name: str) -> Callable[[BrokerClient], Awaitable[object]]:
    return lambda b: b.admin.DescribeGroup(pb.DescribeGroupRequest(group=name))


def _join(**wanted: Any) -> Callable[[BrokerClient], Awaitable[object]]:
    """A member that subscribes to T with this filter."""

    async def join(b: BrokerClient) -> None:
        subscription = pb.Subscription(topic="T", filter=common.Filter(**wanted))
        stream = b.stub.JoinGroup()
        await stream.write(
            pb.JoinGroupRequest(group="joined", client_id="c", subscriptions=[subscription])
        )
        async for _ in stream:
            stream.cancel()

    return join


def _lock(client_id: str, count: int = 1, group: str = "g") -> Any:
    request = pb.LockQueuesRequest(group=group, client_id=client_id, queues=[_queue()] * count)
    return lambda b: b.stub.LockQueues(request)


def _unlock(client_id: str, count: int = 1, group: str = "g") -> Any:
    request = pb.UnlockQueuesRequest(group=group, client_id=client_id, queues=[_queue()] * count)
    return lambda b: b.stub.UnlockQueues(request)


MANY_TAGS = common.Filter(tags=[str(n) for n in range(257)])
TOO_MANY_TAGS = [f"tag-{n}" for n in range(10_000)]
DEEP = "(" * 33 + "a = 1" + ")" * 33
MANY_STEPS = " OR ".join(["a = 1"] * 52)
CALLS: list[tuple[str, Callable[[BrokerClient], Awaitable[object]], str]] = [
    ("pull negative", _pull(position=common.Position(offset=-1)), "OFFSET_INVALID"),
    ("pull unknown topic", _pull(queue=_queue("unknown")), "TOPIC_NOT_FOUND"),
    ("pull unknown queue", _pull(queue=_queue("T", 9)), "QUEUE_NOT_FOUND"),
    ("pull negative queue", _pull(queue=_queue("T", -1)), "QUEUE_NOT_FOUND"),
    ("pull bad tag", _pull(filter=common.Filter(tags=["a|b"])), "FILTER_INVALID"),
    ("pull empty tag", _pull(filter=common.Filter(tags=[""])), "FILTER_INVALID"),
    ("pull many tags", _pull(filter=MANY_TAGS), "FILTER_INVALID"),
    ("pull bad SQL", _pull(filter=common.Filter(sql="price >")), "FILTER_INVALID"),
    ("pull long SQL", _pull(filter=common.Filter(sql="a = 1".ljust(2_048))), "FILTER_INVALID"),
    ("pull deep SQL", _pull(filter=common.Filter(sql="(" * 2_047)), "FILTER_INVALID"),
    ("pull 10,000 tags", _pull(filter=common.Filter(tags=TOO_MANY_TAGS)), "FILTER_INVALID"),
    ("pull SQL of depth 33", _pull(filter=common.Filter(sql=DEEP)), "FILTER_INVALID"),
    ("join 10,000 tags", _join(tags=TOO_MANY_TAGS), "FILTER_INVALID"),
    ("join long SQL", _join(sql="a = 1".ljust(2_048)), "FILTER_INVALID"),
    ("join SQL of depth 33", _join(sql=DEEP), "FILTER_INVALID"),
    ("join many steps", _join(sql=MANY_STEPS), "FILTER_INVALID"),
    ("lock without a name", _lock(""), "INVALID_REQUEST"),
    ("lock with a long name", _lock("c" * 256), "INVALID_REQUEST"),
    ("lock with a line end", _lock("c\n"), "INVALID_REQUEST"),
    ("lock too many", _lock("c", 4097), "LIMIT_EXCEEDED"),
    ("lock of a bad group", _lock("c", group="a b"), "GROUP_NAME_INVALID"),
    ("unlock without a name", _unlock(""), "INVALID_REQUEST"),
    ("unlock too many", _unlock("c", 4097), "LIMIT_EXCEEDED"),
    ("unlock of a group that is not there", _unlock("c", group="nobody"), "GROUP_NOT_FOUND"),
    ("pull many steps", _pull(filter=common.Filter(sql=MANY_STEPS)), "FILTER_INVALID"),
    ("pull tags and SQL", _pull(filter=common.Filter(tags=["a"], sql="a = 1")), "FILTER_INVALID"),
    ("pull bad group", _pull(group="a b"), "GROUP_NAME_INVALID"),
    ("pull negative count", _pull(max_count=-1), "INVALID_REQUEST"),
    ("pull negative bytes", _pull(max_bytes=-1), "INVALID_REQUEST"),
    ("pull state topic", _pull(queue=_queue("rmq_sys_cometmq_state")), "NO_PERMISSION"),
    *((f"pull topic {n!r}", _pull(queue=_queue(n)), "TOPIC_NAME_INVALID") for n in BAD_TOPICS),
    ("commit bad group", _commit("a/b"), "GROUP_NAME_INVALID"),
    ("commit empty group", _commit(""), "GROUP_NAME_INVALID"),
    ("commit long group", _commit("g" * 256), "GROUP_NAME_INVALID"),
    ("commit too many", _commit("g", 4097), "LIMIT_EXCEEDED"),
    ("offsets bad group", _offsets("g\n"), "GROUP_NAME_INVALID"),
    ("offsets too many", _offsets("g", 4097), "LIMIT_EXCEEDED"),
    ("queues too many", _queues(4097), "LIMIT_EXCEEDED"),
    ("message id empty", _message(""), "MESSAGE_ID_INVALID"),
    ("message id negative", _message("g1/-1"), "MESSAGE_ID_INVALID"),
    ("message id above int64", _message(f"g1/{1 << 63}"), "MESSAGE_ID_INVALID"),
    ("message of another broker", _message("g2/0"), "MESSAGE_NOT_FOUND"),
    ("message beyond the end", _message(f"g1/{(1 << 63) - 1}"), "MESSAGE_NOT_FOUND"),
    ("message inside another", _message("g1/7"), "MESSAGE_NOT_FOUND"),
    ("message of the state topic", _message("g1/0"), "MESSAGE_NOT_FOUND"),
    *((f"put topic {n!r}", _put(name=n), "TOPIC_NAME_INVALID") for n in BAD_TOPICS),
    ("put system topic", _put(name="TBW102"), "NO_PERMISSION"),
    ("put too many queues", _put(read_queue_count=1025), "QUEUE_COUNT_INVALID"),
    ("put negative queues", _put(write_queue_count=-1), "QUEUE_COUNT_INVALID"),
    ("put unknown flush mode", _put(flush_mode=7), "INVALID_REQUEST"),
    ("put unknown permission", _put(permission=8), "INVALID_REQUEST"),
    ("drop unknown topic", lambda b: b.drop_topic("unknown"), "TOPIC_NOT_FOUND"),
    ("drop system topic", lambda b: b.drop_topic("rmq_sys_cometmq_state"), "NO_PERMISSION"),
    ("drop bad topic", lambda b: b.drop_topic("../x"), "TOPIC_NAME_INVALID"),
    ("describe bad topic", lambda b: b.status("../x", 0), "TOPIC_NAME_INVALID"),
    ("describe unknown topic", lambda b: b.status("unknown", 0), "TOPIC_NOT_FOUND"),
    ("describe unknown group", _group("unknown"), "GROUP_NOT_FOUND"),
    ("describe bad group", _group("a b"), "GROUP_NAME_INVALID"),
]  # fmt: skip


async def test_every_bad_call_gets_its_error(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"x")
        await broker.read_queue("T", 0)
        end = broker.store.appended_offset
        for what, call, name in CALLS:
            assert (await refusal(call(broker))).name() == name, what
        assert broker.store.appended_offset == end, "a refused call leaves no trace"
        assert await broker.bodies("T", 0) == [b"x"]


async def test_topics_and_groups_have_limits(tmp_path: Path) -> None:
    async with running_broker(tmp_path, topics_max=2, groups_max=1) as broker:
        await broker.put_topic("A")
        await broker.put_topic("B")
        assert (await refusal(broker.put_topic("C"))).name() == "LIMIT_EXCEEDED"
        await broker.put_topic("B", 4)  # one that is there may change
        await broker.commit("g", ("A", 0, 0, 0))
        assert (await refusal(broker.commit("h", ("A", 0, 0, 0)))).name() == "LIMIT_EXCEEDED"
        await broker.drop_topic("A")
        await broker.put_topic("C")


async def test_locks_of_others_and_old_numbers_open_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"x", b"y")
        await broker.read_queue("T", 0)
        await broker.commit("g", ("T", 0, 0, 0))

        async def lock(client_id: str) -> tuple[str, int]:
            [one] = (await _lock(client_id)(broker)).results
            return one.error.name, one.lock_number

        async def commit(number: int) -> str:
            position = common.Position(offset=1)
            item = pb.OffsetCommit(queue=_queue(), position=position, lock_number=number)
            request = pb.CommitOffsetsRequest(group="g", commits=[item])
            return (await broker.stub.CommitOffsets(request)).results[0].error.name

        async def pulls(number: int) -> bool:
            position = common.Position()
            pull = pb.PullRequest(group="g", queue=_queue(), position=position, lock_number=number)
            try:
                await broker.stub.Pull(pull)
            except grpc.aio.AioRpcError as error:
                return error_from(error).name() != "QUEUE_LOCKED"
            return True

        request = pb.LockQueuesRequest(group="new", client_id="c", queues=[_queue("T", 9)])
        [one] = (await broker.stub.LockQueues(request)).results
        assert one.error.name == "QUEUE_NOT_FOUND"
        listed = await broker.admin.ListGroups(pb.ListGroupsRequest())
        assert list(listed.groups) == ["g"], "no group is made for a queue that is not there"
        assert await commit(7) == "QUEUE_LOCKED", "a number that was never given"
        _, old = await lock("one")
        assert (await lock("two"))[0] == "QUEUE_LOCKED"
        await _unlock("two")(broker)
        assert (await lock("two"))[0] == "QUEUE_LOCKED", "locks of others stay"
        await _unlock("one")(broker)
        _, new = await lock("two")
        assert new > old
        assert not await pulls(old)
        assert not await pulls(1)
        for number in (old, new + 1, 1, (1 << 64) - 1):
            assert await commit(number) == "QUEUE_LOCKED", number
        kept = await broker.committed("g", "T", 0)
        assert kept is not None
        assert kept.offset == 0
        assert await pulls(new)
        assert await commit(new) == ""


# --- bytes that are no request ------------------------------------------------------------------

METHODS = [
    f"/cometmq.v1.{service}/{method.name}"
    for service in ("BrokerService", "BrokerAdminService")
    for method in pb.DESCRIPTOR.services_by_name[service].methods
]
LEAKS = ("Traceback", "Error(", "Exception", ".py", "object at 0x", "assert")


async def test_random_bytes_are_refused_without_telling_our_insides(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"x")
        for method in METHODS:
            for _ in range(8):
                error = await _throw(broker, method, rng.randbytes(rng.randrange(1, 200)))
                assert error is None or not any(leak in str(error) for leak in LEAKS), error
                assert error is None or error.name() != "INTERNAL_ERROR", (method, error)
        assert await broker.bodies("T", 0) == [b"x"]
    assert not [r for r in caplog.records if r.name == "cometmq.rpc.guard"]


async def _throw(broker: LiveBroker, method: str, data: bytes) -> CometError | None:
    """Send bytes to a method of any kind; the error it answers, if it does."""
    channel = broker.admin_channel if "Admin" in method else broker.channel
    call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)

    async def requests() -> AsyncIterator[bytes]:
        yield data

    try:
        async for _ in call(requests()):
            pass
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    return None


async def test_mutated_requests_never_hurt(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    records, segments = batch(("T", 0, [b"x", b"y"]), ("T", 1, [b"z"]))
    request = pb.SendStreamRequest(batch_id=1, records=records, segments=segments)
    good = request.SerializeToString()
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 2)
        for _ in range(150):
            forged = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                forged[rng.randrange(len(forged))] = rng.randrange(256)
            error = await _throw(broker, METHODS[0], bytes(forged))
            assert error is None or error.name() != "INTERNAL_ERROR", forged.hex()
        counts = [len(await broker.read_queue("T", q)) for q in (0, 1)]
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert [len(await broker.read_queue("T", q)) for q in (0, 1)] == counts
    assert not [r for r in caplog.records if r.name == "cometmq.rpc.guard"]
