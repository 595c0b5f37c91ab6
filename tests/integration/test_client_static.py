"""Static members: while one is away nobody gets its queues; who is connected, by the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.admin import clients, ops
from cometmq.admin.connection import Connection
from cometmq.client import (
    Message,
    MessageModel,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.names import own_group
from cometmq.errors import ConfigInvalid, InvalidRequest, LimitExceeded
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from services.broker import client_api
from services.broker.groups import coordinator as group_coordinator
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until, until_async

QUEUES, PODS = 12, 4


@asynccontextmanager
async def cluster(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[str, LiveBroker]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **options) as broker,
    ):
        await broker.put_topic("T", QUEUES)
        yield namesrv, broker


async def ignore(messages: list[ReceivedMessage]) -> None:
    """A listener that has nothing to do."""


def pod(namesrv: str, name: str, listener: Any = ignore, **changes: Any) -> PushConsumer:
    options = {"rebalance_delay_ms": 1, "session_ms": 60_000, "client_id": name, **changes}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**options))


class Owners:
    """Who reads each queue, and all changes of that."""

    def __init__(self) -> None:
        self.pods: dict[str, PushConsumer] = {}

    def now(self) -> dict[QueueRef, str]:
        return {q: name for name, pod in self.pods.items() for q in pod.assigned}


async def test_a_deploy_of_all_pods_moves_no_queue_and_repeats_nothing(tmp_path: Path) -> None:
    seen: list[bytes] = []
    sent: set[bytes] = set()
    stop = False

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    async def send(namesrv: str) -> None:
        async with Producer(namesrv) as producer:
            while not stop:
                body = b"%d" % len(sent)
                sent.add(body)
                await producer.send_and_wait(Message("T", body))

    async with cluster(tmp_path) as (namesrv, _), AsyncExitStack() as stack:
        owners, stacks = Owners(), {}

        async def start(name: str) -> None:
            stacks[name] = AsyncExitStack()
            one = await stacks[name].enter_async_context(pod(namesrv, name, listener))
            stack.push_async_callback(stacks[name].aclose)
            await one.subscribe("T")
            owners.pods[name] = one

        names = [f"pod-{n}" for n in range(PODS)]
        for name in names:
            await start(name)
        sending = asyncio.create_task(send(namesrv))
        await until(lambda: len(owners.now()) == QUEUES)
        await until(lambda: {len(one.assigned) for one in owners.pods.values()} == {3})
        before = owners.now()
        for name in names:
            await stacks[name].aclose()
            del owners.pods[name]
            await asyncio.sleep(0.15)  # the others have heard of it
            here = {queue: owner for queue, owner in before.items() if owner != name}
            assert owners.now() == here, "nobody gets the queues of the one that is away"
            await start(name)
            await until(lambda: owners.now() == before)
        stop = True
        await sending
        await until(lambda: set(seen) >= sent)
    assert len(seen) == len(sent) > 100


async def test_when_the_session_is_over_the_queues_move_and_at_once_when_it_leaves_for_good(
    tmp_path: Path,
) -> None:
    async with (
        cluster(tmp_path) as (namesrv, _),
        Connection(namesrv) as connection,
        pod(namesrv, "stays") as stays,
    ):
        await stays.subscribe("T")
        async with pod(namesrv, "goes", session_ms=700) as goes:
            await goes.subscribe("T")
            await until(lambda: len(stays.assigned) == len(goes.assigned) == QUEUES // 2)
        await asyncio.sleep(0.2)
        assert len(stays.assigned) == QUEUES // 2
        members = {one.client_id: one for one in await ops.group_members(connection, "G")}
        assert (members["goes"].is_away, members["goes"].session_ms) == (True, 700)
        assert not members["stays"].is_away
        await until(lambda: len(stays.assigned) == QUEUES)
        async with pod(namesrv, "goes") as goes:
            await goes.subscribe("T")
            await until(lambda: len(stays.assigned) == len(goes.assigned) == QUEUES // 2)
            await goes.leave_for_good()
        async with asyncio.timeout(2.0):
            await until(lambda: len(stays.assigned) == QUEUES)


async def test_pull_consumers_are_static_members_too(tmp_path: Path) -> None:
    def puller(namesrv: str, name: str) -> PullConsumer:
        options = PullConsumerOptions(client_id=name, session_ms=60_000, rebalance_delay_ms=1)
        return PullConsumer(namesrv, "G", options=options)

    async with cluster(tmp_path) as (namesrv, _), puller(namesrv, "a") as one:
        await one.subscribe("T")
        async with puller(namesrv, "b") as other:
            await other.subscribe("T")
            await until(lambda: len(one.assigned) == len(other.assigned) == QUEUES // 2)
            mine = other.assigned
        await asyncio.sleep(0.2)
        assert len(one.assigned) == QUEUES // 2
        async with puller(namesrv, "b") as other:
            await other.subscribe("T")
            await until(lambda: other.assigned == mine)


async def test_an_older_process_of_a_name_does_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as (namesrv, _), pod(namesrv, "pod") as older:
        await older.subscribe("T")
        await until(lambda: len(older.assigned) == QUEUES)
        # Its stream breaks while it is frozen, and a new one of its name takes its place.
        (joined,) = older._share._membership._joined.values()
        assert joined.task is not None
        joined.task.cancel()
        async with pod(namesrv, "pod") as newer:
            await newer.subscribe("T")
            await until(lambda: len(newer.assigned) == QUEUES)
            joined.task = older._tasks.start(
                older._share._membership._stay("g1", joined), "it wakes up"
            )
            await until(lambda: not older.assigned)
            await asyncio.sleep(0.2)
            assert len(newer.assigned) == QUEUES
    assert "CLIENT_ID_IN_USE" in caplog.text


async def test_a_random_name_has_no_session() -> None:
    with pytest.raises(ConfigInvalid, match="client_id"):
        PushConsumer("127.0.0.1:1", "G", ignore, options=PushConsumerOptions(session_ms=1))


# --- at the broker --------------------------------------------------------------------------------


async def join(broker: LiveBroker, name: str, group: str = "G", **more: Any) -> Any:
    """A raw stream of a member that is known by now; raises why it is refused."""
    stream = broker.stub.JoinGroup()
    subscriptions = [pb.Subscription(topic="T")]
    try:
        await stream.write(
            pb.JoinGroupRequest(group=group, client_id=name, subscriptions=subscriptions, **more)
        )
        assert isinstance(await stream.read(), pb.JoinGroupResponse)
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from None
    return stream


async def names(broker: LiveBroker, group: str = "G") -> dict[str, bool]:
    answer = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group=group))
    return {one.client_id: one.is_away for one in answer.members}


async def test_away_members_count_among_those_of_their_address(tmp_path: Path) -> None:
    async with cluster(tmp_path, streams_per_peer_max=3) as (_, broker):
        for number in range(3):
            (await join(broker, f"c{number}", session_ms=1_500)).cancel()
        all_away = {f"c{number}": True for number in range(3)}

        async def are_away() -> bool:
            return await names(broker) == all_away

        await until_async(are_away)
        with pytest.raises(LimitExceeded, match="streams_per_peer_max"):
            await join(broker, "c3")

        async def joined() -> bool:
            try:
                (await join(broker, "c3")).cancel()
            except LimitExceeded:
                return False
            return True

        await until_async(joined)  # their sessions are over
        for wrong in (1_800_001, 2**32 - 1):
            with pytest.raises(InvalidRequest, match="session_ms"):
                await join(broker, "c4", session_ms=wrong)


async def test_clients_are_listed_by_page_with_what_the_broker_knows_of_them(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (namesrv, broker), Connection(namesrv) as connection:
        streams = [await join(broker, f"c{n:02}", f"G{n % 3}") for n in range(20)]
        streams[0].cancel()
        away = await join(broker, "static", "G1", session_ms=60_000)
        away.cancel()
        async with Producer(namesrv) as producer, pod(namesrv, "pod\u00e9") as one:
            await one.subscribe("T")
            await producer.send_and_wait(Message("T", b"."))
            await until(lambda: len(one.assigned) == QUEUES)

            async def settled() -> bool:
                return len(await clients.list_clients(connection, "member", "", 1_000)) == 21

            await until_async(settled)
            found: list[pb.ClientInfo] = []
            token = ""
            while True:
                page = await broker.admin.ListClients(
                    pb.ListClientsRequest(max_count=4, page_token=token)
                )
                assert len(page.clients) <= 4
                found += page.clients
                token = page.next_page_token
                if not token:
                    break
            keys = [(one.group, one.client_id) for one in found]
            assert keys == sorted(keys)
            assert len(keys) == len(set(keys)) == 21
            assert [one.client_id for one in found if one.is_away] == ["static"]
            rows = await clients.list_clients(connection, None, "", 1_000)
            (sending,) = [row for row in rows if row.kind == "producer"]
            (reading,) = [row for row in rows if row.group == "G"]
            for row in (sending, reading):
                assert row.address.startswith("127.0.0.1:")
                assert row.language == "python"
                assert row.version.startswith("cometmq-python ")
                assert row.since_ms > 1_700_000_000_000
            assert reading.client_id == "pod\u00e9"
            of_one = await clients.list_clients(connection, None, "G2", 1_000)
            assert {row.group for row in of_one} == {"G2"}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker.admin.ListClients(pb.ListClientsRequest(max_count=1_001))
        assert isinstance(error_from(refused.value), InvalidRequest)


async def test_a_broadcasting_consumer_goes_on_by_what_the_broker_keeps_of_its_name(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[bytes]] = {"a": [], "b": []}

    def broadcasting(namesrv: str, name: str) -> PushConsumer:
        async def listener(messages: list[ReceivedMessage]) -> None:
            seen[name].extend(message.body for message in messages)

        return pod(
            namesrv,
            name,
            listener,
            session_ms=0,
            message_model=MessageModel.BROADCASTING,
            broadcast_offsets_at_broker=True,
        )

    async with cluster(tmp_path) as (namesrv, broker), Producer(namesrv) as producer:
        sent = [b"%d" % n for n in range(20)]
        for number, body in enumerate(sent):
            if number == 10:
                async with broadcasting(namesrv, "a") as a, broadcasting(namesrv, "b") as b:
                    for one in (a, b):
                        await one.subscribe("T")
                    await until(lambda: len(seen["a"]) == len(seen["b"]) == 10)
            await producer.send_and_wait(Message("T", body))
        async with broadcasting(namesrv, "a") as a:
            await a.subscribe("T")
            await until(lambda: len(seen["a"]) == 20)
        assert sorted(seen["a"]) == sorted(sent)
        groups = (await broker.admin.ListGroups(pb.ListGroupsRequest())).groups
        kept = [group for group in groups if group.startswith("%BROADCAST%G-")]
        assert len(kept) == 2


async def test_offsets_of_broadcasting_clients_are_forgotten_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_coordinator, "BROADCASTERS_MAX", 2)
    monkeypatch.setattr(client_api, "HOUR_S", 0.0)
    monkeypatch.setattr(client_api, "FORGET_S", 2.0)
    async with cluster(tmp_path) as (_, broker):
        await broker.commit("G", ("T", 0, 0, 0))
        for name in ("a", "b"):
            await broker.commit(own_group("G", name), ("T", 0, 0, 0))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker.commit(own_group("G", "c"), ("T", 0, 0, 0))
        assert isinstance(error_from(refused.value), LimitExceeded)

        async def forgotten() -> bool:
            listed = await broker.admin.ListGroups(pb.ListGroupsRequest())
            return list(listed.groups) == ["G"]

        await until_async(forgotten)


@pytest.mark.parametrize(
    "options",
    [
        {"broadcast_offsets_at_broker": True, "client_id": "pod"},
        {"broadcast_offsets_at_broker": True, "message_model": MessageModel.BROADCASTING},
    ],
)
async def test_offsets_at_the_broker_are_for_a_broadcasting_consumer_with_a_name(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ConfigInvalid, match="broadcast_offsets_at_broker"):
        PushConsumer("127.0.0.1:1", "G", ignore, options=PushConsumerOptions(**options))


async def test_who_was_replaced_does_not_join_a_broker_that_does_not_know_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would put out the one that has replaced it."""
    async with cluster(tmp_path) as (namesrv, _), pod(namesrv, "pod") as older:
        await older.subscribe("T")
        await until(lambda: len(older.assigned) == QUEUES)
        async with pod(namesrv, "pod") as newer:
            await newer.subscribe("T")
            await until(lambda: len(newer.assigned) == QUEUES and not older.assigned)
            options = {"broker_group": "g2", "namesrv": (namesrv,)}
            async with running_broker(tmp_path / "2", **options) as broker:
                await broker.put_topic("T", QUEUES)
                await until(lambda: len(newer.assigned) == 2 * QUEUES)
                await until(lambda: "g2" in older._share._membership._joined)
                await asyncio.sleep(0.3)
                assert len(newer.assigned) == 2 * QUEUES
    events = [record.getMessage() for record in caplog.records]
    assert len([event for event in events if event.startswith("no member any more")]) == 1


async def test_who_was_replaced_while_it_was_frozen_does_not_join_a_broker_that_is_new(
    tmp_path: Path,
) -> None:
    """A broker that has restarted, or taken over, knows no members of before."""
    async with running_namesrv(tmp_path) as namesrv:
        options: dict[str, Any] = {"namesrv": (namesrv,)}
        async with (
            AsyncExitStack() as before,
            pod(namesrv, "pod") as older,
        ):
            broker = await before.enter_async_context(running_broker(tmp_path, **options))
            await broker.put_topic("T", QUEUES)
            await older.subscribe("T")
            await until(lambda: len(older.assigned) == QUEUES)
            (joined,) = older._share._membership._joined.values()
            assert joined.task is not None
            joined.task.cancel()
            async with pod(namesrv, "pod") as newer:
                await newer.subscribe("T")
                await until(lambda: len(newer.assigned) == QUEUES)
                await before.aclose()
                async with running_broker(tmp_path, **options) as broker:

                    async def is_back() -> bool:
                        return await names(broker) == {"pod": False}

                    await until_async(is_back)
                    joined.task = older._tasks.start(
                        older._share._membership._stay("g1", joined), "it wakes up"
                    )
                    ends = [one._share._membership for one in (older, newer)]
                    await until(lambda: any(one._is_replaced for one in ends))
                    assert [one._is_replaced for one in ends] == [True, False]
                    await until(lambda: not older.assigned)
                    assert len(newer.assigned) == QUEUES
