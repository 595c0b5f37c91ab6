"""Transactions over real gRPC from bare stubs: halves, ends, checks, crashes, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.errors import (
    BatchMalformed,
    CometError,
    FlowControl,
    GroupNameInvalid,
    InvalidRequest,
    LimitExceeded,
    MessageTypeMismatch,
    NoPermission,
    PropertiesInvalid,
    PropertyReserved,
    TopicNotFound,
    TransactionEnded,
    TransactionNotFound,
)
from cometmq.format import halves, record
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC, HalfForm
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient, encoded, refusal, running_broker
from tests.support.waiting import DEADLINE_S, until_async

COMMIT = pb.TRANSACTION_RESOLUTION_COMMIT
ROLLBACK = pb.TRANSACTION_RESOLUTION_ROLLBACK
UNKNOWN = pb.TRANSACTION_RESOLUTION_UNKNOWN
HALF = pb.SEGMENT_KIND_HALF
QUICK = {"transaction_time_out": 0, "transaction_check_interval": 1_000}


def outgoing(body: bytes, group: str = "P", topic: str = "T", **fields: Any) -> pb.OutgoingMessage:
    return pb.OutgoingMessage(topic=topic, queue_id=0, body=body, producer_group=group, **fields)


async def send_halves(broker: BrokerClient, *bodies: bytes, **fields: Any) -> list[pb.HalfRef]:
    messages = [outgoing(body, **fields) for body in bodies]
    answer = await broker.stub.Send(pb.SendRequest(messages=messages))
    assert not any(one.HasField("position") for one in answer.sent)
    return [one.half for one in answer.sent]


async def end(
    broker: BrokerClient,
    *ends: tuple[pb.HalfRef, pb.TransactionResolution.ValueType],
    group: str = "P",
) -> list[CometError | tuple[int, str]]:
    """Of each: the error, or offset and message id (empty when it is rolled back)."""
    wanted = [pb.TransactionEnd(half=half, resolution=how) for half, how in ends]
    request = pb.EndTransactionsRequest(producer_group=group, ends=wanted)
    answer = await broker.stub.EndTransactions(request)
    return [
        from_proto(one.error) if one.HasField("error") else (one.position.offset, one.message_id)
        for one in answer.results
    ]


def changed(half: pb.HalfRef, **fields: Any) -> pb.HalfRef:
    other = pb.HalfRef()
    other.CopyFrom(half)
    other.MergeFrom(pb.HalfRef(**fields))
    return other


async def test_what_is_committed_is_seen_once_and_nothing_else(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        a, b, c, d = await send_halves(broker, b"a", b"b", b"c", b"d", keys=("k",), tag="A")
        assert await broker.bodies("T", 0) == []
        first = await end(broker, (c, COMMIT), (a, ROLLBACK), (b, COMMIT))
        assert [one[0] for one in first if isinstance(one, tuple)] == [0, 0, 1]
        assert await broker.bodies("T", 0) == [b"c", b"b"]
        found = (await broker.read_queue("T", 0))[0]
        assert found.sys_flag & halves.SYS_FLAG_TRANSACTION == halves.SYS_FLAG_COMMITTED
        assert (found.prepared_offset, found.unique_id) == (c.log_offset, c.transaction_id)
        assert (found.tag, found.keys, found.properties["PGROUP"]) == ("A", ("k",), "P")
        again = await end(broker, (b, COMMIT), (a, ROLLBACK), (c, COMMIT))
        assert again == [first[2], first[1], first[0]]
        opposite = await end(broker, (b, ROLLBACK), (a, COMMIT))
        assert list(map(type, opposite)) == [TransactionEnded, TransactionEnded]
        assert await broker.bodies("T", 0) == [b"c", b"b"]
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await end(broker, (b, COMMIT), (a, ROLLBACK), (c, COMMIT)) == again
        [committed] = await end(broker, (d, COMMIT))
        assert committed[0] == 2  # type: ignore[index]
    async with running_broker(tmp_path) as broker:  # the index tells what became of them
        await until_async(lambda: _answers(broker, (d, COMMIT), committed))
        assert list(map(type, await end(broker, (d, ROLLBACK)))) == [TransactionEnded]
        assert await end(broker, (a, ROLLBACK)) == [(0, "")]
        assert await broker.bodies("T", 0) == [b"c", b"b", b"d"]


@pytest.mark.parametrize("together", [True, False])
async def test_halves_that_fill_several_log_files_end_at_once(
    tmp_path: Path, together: bool
) -> None:
    body, count = b"." * 10_000, 20
    async with running_broker(tmp_path, mapped_file_size_commit_log=64 * 1024) as broker:
        await broker.put_topic("T", 1)
        sent = [half for _ in range(count) for half in await send_halves(broker, body)]
        ends = [(half, COMMIT) for half in sent]
        if not together:  # one that has ended: each needs a look
            await end(broker, ends[0])
        answers = await end(broker, *ends)
        assert [one[0] for one in answers if isinstance(one, tuple)] == [*range(count)]
        assert await broker.bodies("T", 0) == [body] * count


async def _answers(broker: BrokerClient, wanted: Any, answer: object) -> bool:
    return await end(broker, wanted) == [answer]


async def test_ends_of_what_is_no_half_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.put_topic("Gone", 1)
        half, other = await send_halves(broker, b"a", b"b")
        [gone] = await send_halves(broker, b"c", topic="Gone")
        await broker.drop_topic("Gone")
        answers = await end(
            broker,
            (changed(half, half_offset=99), COMMIT),
            (changed(other, log_offset=half.log_offset), COMMIT),
            (changed(gone, transaction_id="X"), COMMIT),
        )
        assert list(map(type, answers)) == [TransactionNotFound] * 3
        assert list(map(type, await end(broker, (half, COMMIT), group="Q"))) == [NoPermission]
        assert list(map(type, await end(broker, (half, UNKNOWN)))) == [InvalidRequest]
        twice = await end(broker, (other, ROLLBACK), (other, ROLLBACK))
        assert isinstance(twice[1], InvalidRequest)
        assert list(map(type, await end(broker, (gone, COMMIT)))) == [TopicNotFound]
        assert await end(broker, (gone, ROLLBACK)) == [(0, "")]
        many = pb.EndTransactionsRequest(producer_group="P", ends=[pb.TransactionEnd()] * 1_025)
        assert isinstance(await refusal(broker.stub.EndTransactions(many)), LimitExceeded)
        none = pb.EndTransactionsRequest(producer_group="P", ends=[pb.TransactionEnd(half=half)])
        assert isinstance(await refusal(broker.stub.EndTransactions(none)), InvalidRequest)
        unnamed = pb.EndTransactionsRequest(producer_group="")
        assert isinstance(await refusal(broker.stub.EndTransactions(unnamed)), GroupNameInvalid)


async def end_run(
    broker: BrokerClient, run: Sequence[pb.HalfRef], how: pb.TransactionResolution.ValueType
) -> list[tuple[str, int, int, list[str]]]:
    """Halves that follow each other by one end: of each result the error's name, how many halves
    it is for, the first one's offset, and the message ids.
    """
    following = [half.log_offset for half in run[1:]]
    wanted = pb.TransactionEnd(half=run[0], resolution=how, following_log_offsets=following)
    request = pb.EndTransactionsRequest(producer_group="P", ends=[wanted])
    answer = await broker.stub.EndTransactions(request)
    return [
        (
            one.error.name,
            max(1, one.count),
            one.position.offset,
            [one.message_id, *(f"g1/{place}" for place in one.following_log_offsets)]
            if one.message_id
            else [],
        )
        for one in answer.results
    ]


async def test_halves_that_follow_each_other_end_by_one_name(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 2)
        run = await send_halves(broker, *(b"%d" % number for number in range(6)))
        assert await end(broker, (run[2], ROLLBACK)) == [(0, "")]
        answers = await end_run(broker, run, COMMIT)
        assert [(name, count, offset) for name, count, offset, _ in answers] == [
            ("", 2, 0),
            ("TRANSACTION_ENDED", 1, 0),
            ("", 3, 2),
        ]
        assert await broker.bodies("T", 0) == [b"0", b"1", b"3", b"4", b"5"]
        places = [one for _, _, _, some in answers for one in some]
        found = [f"g1/{one.log_offset}" for one in await broker.read_queue("T", 0)]
        assert places == found
        assert await end_run(broker, run, COMMIT) == answers
        assert [one[:2] for one in await end_run(broker, run, ROLLBACK)] == [
            *[("TRANSACTION_ENDED", 1)] * 2,
            ("", 1),
            *[("TRANSACTION_ENDED", 1)] * 3,
        ]
        messages = [outgoing(b"a"), outgoing(b"b"), outgoing(b"c")]
        for message, queue_id in zip(messages, (0, 1, 1), strict=True):
            message.queue_id = queue_id
        sent_to = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent
        both = await end_run(broker, [one.half for one in sent_to], COMMIT)
        assert [one[1:3] for one in both] == [(1, 5), (2, 0)]
        run = await send_halves(broker, b"x", b"y")
        assert [one[:2] for one in await end_run(broker, run, ROLLBACK)] == [("", 2)]


async def test_ends_of_several_halves_that_name_none_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        run = await send_halves(broker, b"a", b"b", b"c")
        wrong = [run[0], changed(run[1], log_offset=run[1].log_offset + 1), run[2]]
        names = [name for name, _, _, _ in await end_run(broker, wrong, COMMIT)]
        assert names == ["", "TRANSACTION_NOT_FOUND", ""]
        two = await send_halves(broker, b"d", b"e")
        counted = await end_run(broker, [changed(two[0], transaction_id="0" * 34), two[1]], COMMIT)
        assert [name for name, _, _, _ in counted] == ["TRANSACTION_NOT_FOUND"] * 2
        for unique_id in ("", "0A", "x" * 34, "0" * 26 + "FFFFFFFF", "0" * 26 + "+0000001"):
            first = pb.HalfRef(half_offset=1, log_offset=1, transaction_id=unique_id)
            one = pb.TransactionEnd(half=first, resolution=COMMIT, following_log_offsets=[2])
            request = pb.EndTransactionsRequest(producer_group="P", ends=[one])
            assert isinstance(await refusal(broker.stub.EndTransactions(request)), InvalidRequest)
        many = pb.TransactionEnd(half=run[1], resolution=COMMIT, following_log_offsets=range(1_024))
        request = pb.EndTransactionsRequest(producer_group="P", ends=[many])
        assert isinstance(await refusal(broker.stub.EndTransactions(request)), LimitExceeded)
        assert await broker.bodies("T", 0) == [b"a", b"c"]


PREFIX = halves.prefix(HalfForm("P"), "T", 0)


def sent(topic: str, queue_id: int, raw: bytes) -> bytes:
    return encoded(topic, queue_id, b"x", properties=raw)


NO_HALVES: list[tuple[bytes, dict[str, Any], type[CometError]]] = [
    (sent(HALF_TOPIC, 0, PREFIX), {"kind": HALF}, GroupNameInvalid),
    (
        sent(HALF_TOPIC, 0, PREFIX),
        {"kind": HALF, "producer_group": "P", "delay_level": 3},
        InvalidRequest,
    ),
    (
        sent(HALF_TOPIC, 0, PREFIX),
        {"kind": HALF, "producer_group": "P", "no_wait_store": True},
        InvalidRequest,
    ),
    (
        sent(HALF_TOPIC, 0, PREFIX),
        {"kind": HALF, "producer_group": "P", "check_immunity_s": 3_601},
        InvalidRequest,
    ),
    (
        sent(HALF_TOPIC, 0, PREFIX),
        {"kind": HALF, "producer_group": "P", "check_immunity_s": 9},
        PropertiesInvalid,
    ),
    (sent(HALF_TOPIC, 0, PREFIX), {"kind": HALF, "producer_group": "Q"}, PropertiesInvalid),
    (sent("T", 0, PREFIX), {"kind": HALF, "producer_group": "P"}, BatchMalformed),
    (sent("T", 0, PREFIX), {}, PropertyReserved),
    (sent("T", 0, b""), {"producer_group": "P"}, InvalidRequest),
    (
        sent(HALF_TOPIC, 0, PREFIX),
        {"topic": "Normal", "kind": HALF, "producer_group": "P"},
        MessageTypeMismatch,
    ),
    (sent(HALF_TOPIC, 0, PREFIX), {"topic": HALF_TOPIC}, NoPermission),
]


async def test_halves_that_are_none_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        normal = common.TopicConfig(
            name="Normal",
            read_queue_count=1,
            write_queue_count=1,
            message_type=common.MESSAGE_TYPE_NORMAL,
        )
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=normal))
        lane = await broker.lane()
        for data, segment, error in NO_HALVES:
            one = pb.Segment(**{"topic": "T", "queue_id": 0, "count": 1, **segment})
            assert type(await lane.refused(data, [one])) is error, segment
        assert not (await broker.bodies("T", 0))


async def test_structured_halves_that_are_none_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for fields in (
            {"group": "", "check_immunity_s": 9},
            {"delay_level": 3},
            {"delay_ms": 30_000},
            {"no_wait_store": True},
            {"check_immunity_s": -1},
        ):
            message = outgoing(b"x", **fields)
            call = broker.stub.Send(pb.SendRequest(messages=[message]))
            assert isinstance(await refusal(call), InvalidRequest), fields


# --- checks ---------------------------------------------------------------------------------------


class Checker:
    """A producer that answers checks by hand."""

    def __init__(self, broker: BrokerClient, group: str, client_id: str) -> None:
        self.call = broker.stub.CheckTransactions()
        self._join = pb.CheckTransactionsJoin(producer_group=group, client_id=client_id)

    async def begin(self) -> None:
        await self.call.write(pb.CheckTransactionsRequest(join=self._join))
        assert await self.call.read() == pb.CheckTransactionsResponse()

    async def asked(self) -> list[pb.TransactionCheck]:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        assert response is not grpc.aio.EOF
        assert isinstance(response, pb.CheckTransactionsResponse)
        return list(response.checks)

    async def refused(self) -> list[CometError]:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        assert isinstance(response, pb.CheckTransactionsResponse)
        return [from_proto(one.error) for one in response.refused]

    async def answer(
        self, halves: Sequence[pb.HalfRef], how: pb.TransactionResolution.ValueType
    ) -> None:
        answers = [pb.TransactionEnd(half=half, resolution=how) for half in halves]
        await self.call.write(pb.CheckTransactionsRequest(answers=answers))


@asynccontextmanager
async def checker(
    broker: BrokerClient, group: str = "P", name: str = "c1"
) -> AsyncIterator[Checker]:
    found = Checker(broker, group, name)
    await found.begin()
    try:
        yield found
    finally:
        found.call.cancel()


async def test_an_orphan_is_checked_by_any_member_of_its_group(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **QUICK) as broker:
        await broker.put_topic("T", 1)
        a, b = await send_halves(broker, b"a", b"b")
        async with checker(broker, "Q") as stranger, checker(broker) as mine:
            checks = await mine.asked()
            assert [one.half for one in checks] == [a, b]
            assert [record.decode(one.record).body for one in checks] == [b"a", b"b"]
            await stranger.answer([a], COMMIT)
            assert list(map(type, await stranger.refused())) == [NoPermission]
            await mine.answer([a], COMMIT)
            await mine.answer([b], UNKNOWN)
            again = await mine.asked()
            assert [(one.half, one.check_count) for one in again] == [(b, 2)]
        async with checker(broker, name="c2") as next_one:  # the first has left and not answered
            assert [one.half for one in await next_one.asked()] == [b]
            await next_one.answer([b], ROLLBACK)
            await until_async(lambda: _answers(broker, (b, ROLLBACK), (0, "")))
        assert await broker.bodies("T", 0) == [b"a"]


async def test_what_nobody_knows_is_given_up_after_the_last_check(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **QUICK, transaction_check_max=2) as broker:
        await broker.put_topic("T", 1)
        [half] = await send_halves(broker, b"a")
        async with checker(broker) as mine:
            for number in (1, 2):
                [check] = await mine.asked()
                assert check.check_count == number
                await mine.answer([half], UNKNOWN)
            await until_async(lambda: _is_given_up(broker))
        assert await broker.bodies(GIVEN_UP_TOPIC, 0) == [b"a"]
        assert list(map(type, await end(broker, (half, COMMIT)))) == [TransactionEnded]


async def _is_given_up(broker: BrokerClient) -> bool:
    try:
        return (await broker.status(GIVEN_UP_TOPIC, 0)).max_offset == 1
    except grpc.aio.AioRpcError:
        return False


async def test_checks_wait_for_a_producer_and_do_not_count(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **QUICK, transaction_check_max=1) as broker:
        await broker.put_topic("T", 1)
        [half] = await send_halves(broker, b"a")
        broker.crash()
    async with running_broker(tmp_path, **QUICK, transaction_check_max=1) as broker:
        async with checker(broker) as mine:
            [check] = await mine.asked()
            assert (check.half, check.check_count) == (half, 1)
            await mine.answer([half], COMMIT)
            await until_async(lambda: _has(broker, 1))
        assert await broker.bodies("T", 0) == [b"a"]


async def _has(broker: BrokerClient, count: int) -> bool:
    return (await broker.status("T", 0)).max_offset == count


async def test_streams_of_checks_that_begin_wrongly_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        join = pb.CheckTransactionsJoin(producer_group="P", client_id="c")
        for first in (
            pb.CheckTransactionsRequest(),
            pb.CheckTransactionsRequest(join=join, answers=[pb.TransactionEnd()]),
            pb.CheckTransactionsRequest(join=pb.CheckTransactionsJoin(producer_group="P")),
        ):
            call = broker.stub.CheckTransactions()
            await call.write(first)
            assert isinstance(await refusal(call.read()), InvalidRequest)
        async with checker(broker) as mine:
            await mine.call.write(pb.CheckTransactionsRequest(join=join))
            assert isinstance(await refusal(mine.call.read()), InvalidRequest)


async def test_open_halves_have_a_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        broker.state.halves.halves_max = 3
        a, b = await send_halves(broker, b"a", b"b")
        call = broker.stub.Send(pb.SendRequest(messages=[outgoing(b"x"), outgoing(b"y")]))
        assert isinstance(await refusal(call), FlowControl)
        await end(broker, (a, ROLLBACK), (b, COMMIT))
        await send_halves(broker, b"x", b"y", b"z")
