"""Reading from followers: real members, name servers, pullholds and clients in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq import errors
from cometmq.client import (
    Message,
    Position,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.member.read import replica_selector
from cometmq.rpc import registrar
from cometmq.rpc.channels import open_channel
from cometmq.rpc.registrar import Registrar
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2, namesrv_pb2, namesrv_pb2_grpc
from services.pullhold import broker_link
from tests.support.cluster.broker import SYNC, refusal, running_namesrv
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.cluster.pullhold import running_pullhold, sample
from tests.support.waiting import until, until_async

QUEUE = QueueRef("T", 0, "g1")
QUICK: dict[str, Any] = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 20}
FAR_BYTES = 40_000
KILOBYTE = bytes(1_000)


class Stage:
    """A group of a writer and a follower with topic T of one queue."""

    def __init__(self, stack: AsyncExitStack, namesrv: str, group: LiveGroup) -> None:
        self.stack = stack
        self.namesrv = namesrv
        self.group = group

    @property
    def writer(self) -> LiveMember:
        return self.group[0]

    @property
    def follower(self) -> LiveMember:
        return self.group[1]

    async def send(self, *messages: bytes) -> None:
        """And wait until both members show them."""
        await self.writer.client.send("T", 0, *messages)
        end = (await self.writer.client.status("T", 0)).appended_offset

        async def shown() -> bool:
            maxima = [await self.end_at(member) for member in (self.writer, self.follower)]
            return maxima == [end, end]

        await until_async(shown)

    async def end_at(self, member: LiveMember) -> int:
        return (await member.client.status("T", 0)).max_offset

    async def kill_writer(self) -> None:
        """No good-bye is said."""
        with mock.patch.object(Registrar, "unregister", mock.AsyncMock()):
            await self.writer.crash()

    async def hide_writer(self) -> None:
        """Name servers believe that the group has none; it lives, and says so when that changes."""
        self.stack.enter_context(mock.patch.object(registrar, "AGAIN_S", 3_600.0))
        epoch = (await self.writer.client.admin.DescribeBroker(pb.DescribeBrokerRequest())).epoch
        request = namesrv_pb2.UnregisterMemberRequest(
            cluster="DefaultCluster",
            broker_group="g1",
            member_id=0,
            epoch=epoch,
            store_id=self.writer.opened.store_id,
        )
        async with open_channel(self.namesrv) as channel:
            stub = namesrv_pb2_grpc.NameServiceStub(channel)
            await stub.UnregisterMember(request)
            answer = await stub.DescribeCluster(namesrv_pb2.DescribeClusterRequest())
        roles = [status.member.role for status in answer.members]
        assert roles == [common_pb2.MEMBER_ROLE_FOLLOWER]


@asynccontextmanager
async def stage(tmp_path: Path, **options: Any) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        given = {"namesrv": (namesrv,), "lease_duration_s": 60.0, **options}
        group = await stack.enter_async_context(live_group(tmp_path, **given))
        await group[0].client.put_topic("T", 1, SYNC)
        on = Stage(stack, namesrv, group)
        await until_async(lambda: has_topic(on.follower))
        yield on


async def has_topic(member: LiveMember) -> bool:
    listed = await member.client.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
    return "T" in {topic.name for topic in listed.topics}


class Listener:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        await self.gate.wait()
        self.bodies += [message.body for message in messages]


async def pushing(on: Stage, **options: Any) -> tuple[PushConsumer, Listener]:
    listener = Listener()
    given = {**QUICK, "rebalance_delay_ms": 1, "commit_interval_ms": 20, **options}
    made = PushConsumer(on.namesrv, "G", listener, options=PushConsumerOptions(**given))
    consumer = await on.stack.enter_async_context(made)
    await consumer.subscribe("T")
    return consumer, listener


# --- suggestions ----------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 % of its memory are FAR_BYTES."""
    monkeypatch.setattr(replica_selector, "machine_memory_bytes", lambda: FAR_BYTES * 10 // 4)


def suggested(answer: pb.PullResponse) -> int | None:
    return answer.suggested_member_id if answer.HasField("suggested_member_id") else None


@pytest.mark.usefixtures("small_machine")
async def test_both_members_suggest_the_follower_as_long_as_the_end_is_far(tmp_path: Path) -> None:
    async with stage(tmp_path, slave_read_enable=True) as on:
        await on.send(*[KILOBYTE] * 100)
        for member in (on.writer, on.follower):
            far = await member.client.pull("T", 0, 0, max_count=1)
            near = await member.client.pull("T", 0, 80, max_count=1)
            nothing = await member.client.pull("T", 0, 100)
            assert [suggested(answer) for answer in (far, near, nothing)] == [1, None, None]
            others = common_pb2.Filter(tags=["other"])
            skipped = [await member.client.pull("T", 0, n, filter=others) for n in (0, 80)]
            assert [suggested(answer) for answer in skipped] == [1, None]
            assert {a.status for a in skipped} == {pb.PULL_STATUS_NO_MATCHED_MESSAGE}
        far_away = await on.writer.client.pull("T", 0, 0, max_count=10, max_bytes=1)
        assert far_away.count == 1, "the smallest answer tells it too"
        assert suggested(far_away) == 1


@pytest.mark.usefixtures("small_machine")
async def test_without_the_option_nobody_is_sent_to_a_follower(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send(*[KILOBYTE] * 100)
        for member in (on.writer, on.follower):
            assert suggested(await member.client.pull("T", 0, 0, max_count=1)) is None


@pytest.mark.usefixtures("small_machine")
async def test_a_consumer_reads_its_backlog_from_the_follower_and_the_end_from_the_writer(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path, slave_read_enable=True) as on:
        await on.send(*[b"%03d" % n + KILOBYTE for n in range(200)])
        options = PullConsumerOptions(**QUICK, pull_count_max=8)
        async with PullConsumer(on.namesrv, "G", options=options) as consumer:
            await consumer.assign(await consumer.queues("T"))
            got: list[bytes] = []
            while len(got) < 200:
                got += [message.body[:3] for message in await consumer.poll()]
            kept = (await consumer.commit())[QUEUE]
            assert kept is not None
            assert kept.offset == 200
        assert got == [b"%03d" % n for n in range(200)]
        by_follower = await messages_out(on.follower)
        assert 100 <= by_follower <= 192
        assert await messages_out(on.writer) == 200 - by_follower
        assert await sample(on.writer.metrics_address, "cometmq_pulls_suggested_total") >= 1


async def messages_out(member: LiveMember) -> int:
    name = "rocketmq_messages_out_total"
    return int(await sample(member.metrics_address, name, 'topic="T"'))


# --- a follower has the last word on nothing that it lacks ----------------------------------------


async def test_a_follower_moves_nobody(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send(b"0", b"1")
        generation = (await on.writer.client.status("T", 0)).generation
        beyond = await on.follower.client.pull("T", 0, 50, generation)
        assert beyond.status == pb.PULL_STATUS_NOT_FOUND
        assert beyond.next_position.offset == 50, "its writer may have shown more than it has"
        error = await refusal(on.follower.client.pull("T", 0, 0, generation + 1))
        assert isinstance(error, errors.NotWriter)
        moved = await on.writer.client.pull("T", 0, 50, generation)
        assert moved.status == pb.PULL_STATUS_OFFSET_MOVED


# --- without a writer -----------------------------------------------------------------------------


async def test_a_consumer_reads_on_while_its_group_has_no_writer(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send(b"first")
        consumer, listener = await pushing(on, queue_count_max=1)
        await until(lambda: listener.bodies)
        listener.gate.clear()
        await on.send(*(b"%d" % n for n in range(50)))
        await on.writer.stop()
        listener.gate.set()
        await until(lambda: len(listener.bodies) == 51)
        assert on.follower.role == "follower", "nobody has taken over yet"
        assert consumer.assigned == [QUEUE]
        await on.writer.start("writer")

        async def committed() -> bool:
            kept = await on.writer.client.committed("G", "T", 0)
            return kept is not None and kept.offset == 51

        await until_async(committed)
        await on.send(b"last")
        await until(lambda: b"last" in listener.bodies)
    assert listener.bodies == [b"first", *(b"%d" % n for n in range(50)), b"last"]


async def test_a_writer_that_crashed_is_still_listed_and_passed_over(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send(b"first")
        _, listener = await pushing(on, queue_count_max=1)
        await until(lambda: listener.bodies)
        listener.gate.clear()
        await on.send(b"second", b"third")
        await on.kill_writer()
        listener.gate.set()
        await until(lambda: len(listener.bodies) == 3)
        assert on.follower.role == "follower", "nobody has taken over yet"
        await on.writer.start("writer")
        await on.send(b"last")
        await until(lambda: len(listener.bodies) == 4)


async def test_holds_wait_at_a_follower_while_there_is_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_link, "BETTER_MEMBER_INTERVAL_S", 0.05)
    async with stage(tmp_path) as on:
        await on.send(b"first")
        pullhold = await on.stack.enter_async_context(running_pullhold(on.namesrv))
        _, listener = await pushing(on)
        await until(lambda: listener.bodies)
        await until(lambda: pullhold.waiting == 1)
        await on.hide_writer()
        await until(lambda: pullhold_watches(pullhold, on.follower))
        await on.send(b"told by the follower")
        await until(lambda: len(listener.bodies) == 2)
        await on.writer.client.put_topic("U", 1, SYNC)  # of which name servers are told
        await until(lambda: pullhold_watches(pullhold, on.writer))
        await on.send(b"told by the writer")
        await until(lambda: len(listener.bodies) == 3)
        assert pullhold.safety_finds == 0


def pullhold_watches(pullhold: Any, member: LiveMember) -> bool:
    link = pullhold.app._brokers._links.get("g1")
    return link is not None and link.address == member.client.address


async def test_a_new_reader_waits_for_the_writer_to_tell_where_it_stands(tmp_path: Path) -> None:
    """A follower may know an older commit, or none: messages would come again, or be skipped."""
    async with stage(tmp_path) as on:
        await on.send(b"0", b"1", b"2")
        async with PullConsumer(on.namesrv, "G", options=PullConsumerOptions(**QUICK)) as consumer:
            await consumer.commit({QUEUE: Position(0, 2)})
            await on.hide_writer()
            await until(lambda: consumer._routes.writer("g1") is None)
            await consumer.assign([QUEUE])
            assert await consumer.poll(timeout_ms=50) == []
            await on.writer.client.put_topic("U", 1, SYNC)
            assert [message.body for message in await consumer.poll()] == [b"2"]


async def test_a_take_over_carries_producers_and_consumers_on(tmp_path: Path) -> None:
    """The old writer is still listed; the new one is at another address, in a newer epoch."""
    bodies = [b"%d" % n for n in range(40)]
    async with stage(tmp_path, lease_duration_s=1.0) as on:
        pullhold = await on.stack.enter_async_context(running_pullhold(on.namesrv))
        _, listener = await pushing(on)
        async with Producer(on.namesrv) as producer:
            for body in bodies[:20]:
                await producer.send_and_wait(Message("T", body))
            await until(lambda: set(bodies[:20]) <= set(listener.bodies))
            await on.group.all_in_sync(0, 1)
            await on.kill_writer()
            for body in bodies[20:30]:
                await producer.send_and_wait(Message("T", body))
            assert on.follower.role == "writer"
            await on.writer.start("follower")
            for body in bodies[30:]:
                await producer.send_and_wait(Message("T", body))
        await until(lambda: set(bodies) <= set(listener.bodies))
        assert pullhold.safety_finds == 0

        async def committed() -> bool:
            kept = await on.follower.client.committed("G", "T", 0)
            return kept is not None and kept.offset >= len(bodies)

        await until_async(committed)
    assert sorted(set(listener.bodies)) == sorted(bodies)


async def test_a_follower_keeps_clients_to_their_quota_of_reads(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send(*[b"x"] * 20)
        settings = pb.GroupSettings(group="G", read_quota=pb.Quota(messages_per_s=2))
        await on.writer.client.admin.PutGroup(pb.PutGroupRequest(settings=settings))

        async def knows_the_group() -> bool:
            listed = await on.follower.client.admin.ListGroups(pb.ListGroupsRequest())
            return [*listed.groups] == ["G"]

        await until_async(knows_the_group)

        def pull() -> Any:
            queue = common_pb2.QueueRef(topic="T")
            request = pb.PullRequest(group="G", client_id="a", queue=queue, max_count=10)
            return on.follower.client.stub.Pull(request)

        assert (await pull()).count == 10
        refused = await refusal(pull())
        assert isinstance(refused, errors.FlowControl)
        assert refused.retry_after_ms is not None
        assert 3_000 < refused.retry_after_ms <= 4_000
