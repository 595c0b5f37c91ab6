"""Half messages for operators: listed by page, shown, resumed once, dropped."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cometmq.admin import transactions
from cometmq.admin.connection import Connection
from cometmq.admin.views import HalfView, HalvesChangedView
from cometmq.errors import (
    AlreadyResent,
    DiskFull,
    GroupNameInvalid,
    GroupNotFound,
    InvalidRequest,
    LimitExceeded,
    OffsetInvalid,
    TransactionNotFound,
)
from cometmq.format.halves import GIVEN_UP_TOPIC
from cometmq.member.state.statelog import load
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import resends
from cometmq.messaging.state import BrokerState
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import BrokerClient, refusal, running_broker, running_namesrv
from tests.support.waiting import until, until_async

Call = grpc.aio.StreamStreamCall[pb.CheckTransactionsRequest, pb.CheckTransactionsResponse]

ONE_CHECK = {
    "transaction_time_out": 0,
    "transaction_check_interval": 1_000,
    "transaction_check_max": 1,
}


async def send(broker: BrokerClient, group: str, *bodies: bytes) -> list[pb.HalfRef]:
    messages = [
        pb.OutgoingMessage(topic="T", queue_id=0, body=body, producer_group=group, keys=["k"])
        for body in bodies
    ]
    answer = await broker.stub.Send(pb.SendRequest(messages=messages))
    return [one.half for one in answer.sent]


async def listed(connection: Connection, group: str = "") -> list[HalfView]:
    return [view async for view, _ in transactions.open_halves(connection, group)]


async def given_up(connection: Connection) -> list[HalfView]:
    return [view async for view, _ in transactions.given_up(connection)]


async def test_open_halves_are_listed_shown_and_dropped(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        Connection(namesrv) as connection,
    ):
        assert await listed(connection) == []
        await broker.put_topic("T", 1)
        await send(broker, "P", b"a", b"b")
        await send(broker, "Q", b"c")
        found = await listed(connection)
        assert [(one.offset, one.producer_group, one.body) for one in found] == [
            (0, "P", "a"),
            (1, "P", "b"),
            (2, "Q", "c"),
        ]
        first = found[0]
        assert (first.topic, first.queue_id, first.keys) == ("T", 0, ["k"])
        assert (first.check_count, first.producer_count) == (0, 0)
        assert [one.body for one in await listed(connection, "Q")] == ["c"]
        shown = await transactions.find(connection, ("g1", 1), is_given_up=False)
        assert shown.body_text == "b"
        for place, given in ((7, False), (0, True)):
            with pytest.raises(TransactionNotFound):
                await transactions.find(connection, ("g1", place), is_given_up=given)
        with pytest.raises(GroupNotFound):
            await transactions.find(connection, ("g2", 0), is_given_up=False)
        done = await transactions.drop(connection, [("g1", 0), ("g1", 2)])
        assert done == HalvesChangedView(2, 0)
        with pytest.raises(TransactionNotFound, match=r"refused: 2 \(g1/0, g1/7\), done: 0"):
            await transactions.drop(connection, [("g1", 0), ("g1", 7)])
        with pytest.raises(TransactionNotFound):  # the next one that is open is another
            await transactions.find(connection, ("g1", 0), is_given_up=False)
        assert [one.body for one in await listed(connection)] == ["b"]
        with pytest.raises(TransactionNotFound, match=r"refused: 1 \(g1/0\), done: 1"):
            await transactions.drop(connection, [("g1", 0), ("g1", 1)])
        assert await listed(connection) == []
        assert await broker.bodies("T", 0) == []


async def test_pages_are_complete(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await send(broker, "P", *(b"%d" % n for n in range(25)))
        for _ in range(8):
            await send(broker, "Q", b"large" * 40_000)
        for group, count in (("", 33), ("P", 25), ("Q", 8)):
            found: list[int] = []
            request = pb.QueryHalvesRequest(producer_group=group, max_count=10)
            for _ in range(20):
                answer = await broker.admin.QueryHalves(request)
                found += [one.half_offset for one in answer.halves]
                if not answer.HasField("next_half_offset"):
                    break
                request.first_half_offset = answer.next_half_offset
            assert len(found) == len(set(found)) == count
        for bad in (
            pb.QueryHalvesRequest(first_half_offset=-1),
            pb.QueryHalvesRequest(max_count=1_001),
        ):
            assert isinstance(await refusal(broker.admin.QueryHalves(bad)), InvalidRequest)
        named = pb.QueryHalvesRequest(producer_group="a b")
        assert isinstance(await refusal(broker.admin.QueryHalves(named)), GroupNameInvalid)


async def test_given_up_halves_are_resumed_once(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **ONE_CHECK) as broker,
        Connection(namesrv) as connection,
    ):
        await broker.put_topic("T", 1)
        assert await given_up(connection) == []
        with pytest.raises(TransactionNotFound, match="no half message was given up"):
            await transactions.resume(connection, [("g1", 0)])
        await send(broker, "P", b"a", b"b")
        call = await _joined(broker)
        await until(lambda: not len(broker.state.halves))
        await until_async(lambda: _are_readable(broker, 2))
        call.cancel()
        assert [one.body for one in await given_up(connection)] == ["a", "b"]
        assert await transactions.resume(connection, [("g1", 1)]) == HalvesChangedView(1, 0)
        places = [("g1", 0), ("g1", 1)]
        assert await transactions.resume(connection, places) == HalvesChangedView(1, 1)
        found = await listed(connection)
        assert [(one.body, one.check_count) for one in found] == [("b", 0), ("a", 0)]
        shown = await transactions.find(connection, ("g1", 0), is_given_up=True)
        assert shown.body_text == "a"
        bad = await broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=[9, 0]))
        errors = [from_proto(one.error) for one in bad.results]
        assert list(map(type, errors)) == [OffsetInvalid, AlreadyResent]
        for too_many in (
            broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=range(257))),
            broker.admin.DropHalves(pb.DropHalvesRequest(half_offsets=range(257))),
        ):
            assert isinstance(await refusal(too_many), LimitExceeded)
        broker.crash()
    async with running_broker(tmp_path, **ONE_CHECK) as broker:
        again = await broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=[0, 1]))
        assert [from_proto(one.error).__class__ for one in again.results] == [AlreadyResent] * 2
        call = await _joined(broker)
        checks: list[pb.TransactionCheck] = []
        while len(checks) < 2:
            response = await call.read()
            assert isinstance(response, pb.CheckTransactionsResponse)
            checks += response.checks
        commit = [
            pb.TransactionEnd(half=one.half, resolution=pb.TRANSACTION_RESOLUTION_COMMIT)
            for one in checks
        ]
        await call.write(pb.CheckTransactionsRequest(answers=commit))
        await until(lambda: not len(broker.state.halves))
        assert sorted(await broker.bodies("T", 0)) == [b"a", b"b"]
        call.cancel()


async def test_a_half_that_is_resumed_is_stored_with_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path, **ONE_CHECK) as broker:
        await broker.put_topic("T", 1)
        await send(broker, "P", b"a")
        call = await _joined(broker)
        await until(lambda: not len(broker.state.halves))
        await until_async(lambda: _are_readable(broker, 1))
        call.cancel()
        resume = pb.ResumeChecksRequest(offsets=[0])
        with monkeypatch.context() as patch:
            patch.setattr(resends, "INTERVALS_IN_ALL_MAX", 0)
            assert isinstance(await refusal(broker.admin.ResumeChecks(resume)), LimitExceeded)
        assert not len(broker.state.halves)

        def is_full(*_: object, **__: object) -> int:
            raise DiskFull("no room for a record of its own")

        with monkeypatch.context() as patch:
            patch.setattr(MemberStorage, "append", is_full)
            answer = await broker.admin.ResumeChecks(resume)
            assert not answer.results[0].HasField("error")
            assert list(load(broker.store, BrokerState).resent) == list(broker.state.resent)
        again = await broker.admin.ResumeChecks(resume)
        assert isinstance(from_proto(again.results[0].error), AlreadyResent)
        assert len(broker.state.halves) == 1


async def test_a_half_between_resumed_ones_is_never_taken_for_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resends, "INTERVALS_MAX", 1)
    async with running_broker(tmp_path, **ONE_CHECK) as broker:
        await broker.put_topic("T", 1)
        await send(broker, "P", b"a", b"b", b"c")
        call = await _joined(broker)
        await until(lambda: not len(broker.state.halves))
        await until_async(lambda: _are_readable(broker, 3))
        call.cancel()

        async def resumed(*offsets: int) -> None:
            request = pb.ResumeChecksRequest(offsets=offsets)
            answer = await broker.admin.ResumeChecks(request)
            assert not any(one.HasField("error") for one in answer.results)

        await resumed(0)
        refused = await refusal(broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=[2])))
        assert isinstance(refused, LimitExceeded)
        assert len(broker.state.halves) == 1
        await resumed(1)
        await resumed(2)
        assert len(broker.state.halves) == 3


async def _joined(broker: BrokerClient) -> Call:
    """A producer that is asked, and says nothing."""
    call = broker.stub.CheckTransactions()
    join = pb.CheckTransactionsJoin(producer_group="P", client_id="c")
    await call.write(pb.CheckTransactionsRequest(join=join))
    assert await call.read() == pb.CheckTransactionsResponse()
    return call


async def _are_readable(broker: BrokerClient, count: int) -> bool:
    return (await broker.status(GIVEN_UP_TOPIC, 0)).max_offset == count
