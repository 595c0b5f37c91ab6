"""Settings of consumer groups over real gRPC, each with what it does; and lists of delay levels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import ConsumeFrom, Message, Producer, PushConsumer, ReceivedMessage
from cometmq.client.options import PushConsumerOptions
from cometmq.errors import (
    CometError,
    ConfigInvalid,
    DelayLevelInvalid,
    GroupInUse,
    GroupNameInvalid,
    GroupNotFound,
    InvalidRequest,
)
from cometmq.format import delayed
from cometmq.format.timers import TIMER_TOPIC
from cometmq.messaging.quotas import Way
from cometmq.model import MessageType
from cometmq.rpc.interceptors import error_from, from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from services.broker.groups.membership import NOTICE_S
from tests.support.cluster.broker import BrokerClient, refusal, running_broker, running_namesrv
from tests.support.waiting import until, until_async

RETRY, DLQ, SCHEDULE = "%RETRY%G", "%DLQ%G", delayed.SCHEDULE_TOPIC
CUSTOMIZED = pb.RETRY_POLICY_KIND_CUSTOMIZED


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """A broker's list of levels is the process's."""
    yield
    delayed.use_levels(delayed.parse_levels(delayed.DEFAULT_LEVELS))


async def put(broker: BrokerClient, group: str = "G", **settings: Any) -> pb.PutGroupResponse:
    request = pb.PutGroupRequest(settings=pb.GroupSettings(group=group, **settings))
    return await broker.admin.PutGroup(request)


async def send_back(broker: BrokerClient, offset: int, **fields: Any) -> int | CometError:
    """The level after which the message comes again; 0: for no level, or it is a dead letter."""
    item = pb.SendBackItem(
        queue=common.QueueRef(topic="T"), position=common.Position(offset=offset), **fields
    )
    answer = await broker.stub.SendBack(pb.SendBackRequest(group="G", items=[item]))
    [result] = answer.results
    return from_proto(result.error) if result.HasField("error") else result.delay_level


async def topic_of(broker: BrokerClient, name: str) -> common.TopicConfig:
    return (await broker.admin.DescribeTopic(pb.DescribeTopicRequest(topic=name))).topic


async def topics_of(broker: BrokerClient) -> set[str]:
    listed = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
    return {topic.name for topic in listed.topics}


async def test_settings_are_kept_through_a_crash_and_what_is_not_said_stays(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as broker:
        first = await put(
            broker,
            retry_policy=pb.RetryPolicy(kind=CUSTOMIZED, steps_ms=[1_000, 60_000]),
            consume_from_min_enable=False,
            consume_orderly=True,
            consume_timeout_min=30,
            mode=pb.CONSUME_MODE_POP,
            read_quota=pb.Quota(messages_per_s=5),
            dlq_reserve_time_ms=3_600_000,
            broker_id_when_slow=3,
        )
        assert first.created
        second = await put(broker, notify_members_enable=False)
        assert not second.created
        broker.crash()
    async with running_broker(tmp_path) as broker:
        request = pb.DescribeGroupRequest(group="G")
        found = (await broker.admin.DescribeGroup(request)).settings
        assert found == second.settings
        first.settings.notify_members_enable = False
        assert found == first.settings
        back = pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_DELAY_LEVELS)
        assert (await put(broker, retry_policy=back)).settings.retry_policy == back


WRONG: list[dict[str, Any]] = [
    {"retry_policy": pb.RetryPolicy(kind=CUSTOMIZED)},
    {"retry_policy": pb.RetryPolicy(kind=CUSTOMIZED, steps_ms=[40 * 86_400_000 + 1])},
    {"retry_policy": pb.RetryPolicy(kind=CUSTOMIZED, steps_ms=[-1])},
    {"retry_policy": pb.RetryPolicy(kind=CUSTOMIZED, steps_ms=[1] * 63)},
    {"retry_policy": pb.RetryPolicy(kind=9)},  # type: ignore[arg-type]
    {"mode": 9},
    {"read_quota": pb.Quota(messages_per_s=-1)},
    {"consume_timeout_min": 0},
    {"dlq_reserve_time_ms": 100 * 3_600_000},  # longer than the log is kept
    {"retry_queue_count": 1_025},
    {"retry_times_max": 1_000_001},
    {"broker_id": -1},
]
WRONG_NAMES = ["", "g" * 256, "a b", "a/b", "a.b", "ä", "a\0", "a\n", "$g"]


async def test_wrong_settings_make_no_group(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        for wrong in WRONG:
            assert isinstance(await refusal(put(broker, **wrong)), InvalidRequest), wrong
        assert not (await broker.admin.ListGroups(pb.ListGroupsRequest())).groups


async def test_names_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        for name in WRONG_NAMES:
            assert isinstance(await refusal(put(broker, name)), GroupNameInvalid), name
            delete = broker.admin.DeleteGroup(pb.DeleteGroupRequest(group=name))
            assert isinstance(await refusal(delete), GroupNameInvalid), name


async def test_retries_follow_the_groups_steps_now(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1", b"2")
        await put(broker, retry_policy=pb.RetryPolicy(kind=CUSTOMIZED, steps_ms=[900, 31_000]))
        began_s = time.monotonic()
        assert await send_back(broker, 0) == 0  # no level has this time

        async def is_back() -> bool:
            return (await broker.status(RETRY, 0)).max_offset == 1

        await until_async(is_back)
        assert time.monotonic() - began_s >= 0.9
        exponential = pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_EXPONENTIAL)
        await put(broker, retry_policy=exponential)
        assert await send_back(broker, 1) == 2  # 5 s
        assert await send_back(broker, 2, delay_level=7) == 7


async def test_retry_queues_follow_the_setting_and_dead_letters_their_time(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *(b"%d" % n for n in range(8)))
        await put(broker, retry_queue_count=2, dlq_reserve_time_ms=60_000)
        assert await send_back(broker, 0, delay_level=1) == 1
        assert (await topic_of(broker, RETRY)).write_queue_count == 2
        assert DLQ not in await topics_of(broker), "a group without dead letters has none"
        assert await send_back(broker, 1, delay_level=-1) == 0
        assert (await topic_of(broker, DLQ)).reserve_time_ms == 60_000
        await put(broker, retry_queue_count=4, dlq_reserve_time_ms=0)
        assert (await topic_of(broker, RETRY)).read_queue_count == 4
        assert (await topic_of(broker, DLQ)).reserve_time_ms == 0
        assert await send_back(broker, 3, delay_level=1) == 1

        async def is_in(queue_id: int, count: int) -> bool:
            return (await broker.status(RETRY, queue_id)).max_offset == count

        await until_async(lambda: is_in(3, 1))
        await put(broker, retry_queue_count=1)
        retrying = await topic_of(broker, RETRY)
        assert (retrying.read_queue_count, retrying.write_queue_count) == (4, 1)
        assert [one.body for one in await broker.read_queue(RETRY, 3)] == [b"3"]
        assert await send_back(broker, 7, delay_level=1) == 1
        await until_async(lambda: is_in(0, 2))


async def test_dead_letters_with_a_time_of_their_own_are_not_shown_after_it(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, clean_resource_interval=50) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        await put(broker)
        assert await send_back(broker, 0, delay_level=-1) == 0
        assert [one.body for one in await broker.read_queue(DLQ, 0)] == [b"0"]
        await put(broker, dlq_reserve_time_ms=1)

        async def is_hidden() -> bool:
            return (await broker.status(DLQ, 0)).min_offset == 1

        await until_async(is_hidden)
        assert [one.body for one in await broker.read_queue("T", 0)] == [b"0"]


async def test_the_member_that_joined_last_says_how_many_tries_all_have(tmp_path: Path) -> None:
    async def joined(broker: BrokerClient, name: str, tries: int | None) -> Any:
        stream = broker.stub.JoinGroup()
        await stream.write(
            pb.JoinGroupRequest(
                group="G",
                client_id=name,
                retry_times_max=tries,
                subscriptions=[pb.Subscription(topic="T")],
            )
        )
        await stream.read()
        return stream

    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *(b"%d" % n for n in range(5)))
        await joined(broker, "a", 0)
        assert await send_back(broker, 0, retry_times_max=9) == 0
        last = await joined(broker, "b", 3)
        await joined(broker, "c", None)
        assert await send_back(broker, 1, retry_times_max=0) == 3
        last.cancel()

        async def a_counts_again() -> bool:
            return len((await describe(broker)).members) == 2

        await until_async(a_counts_again)
        assert await send_back(broker, 2, retry_times_max=9) == 0
        wrong = joined(broker, "d", -1)
        assert isinstance(await refusal(wrong), InvalidRequest)


async def test_a_consumers_tries_count_for_all_members(tmp_path: Path) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None:
        pass

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        options = PushConsumerOptions(retry_times_max=0)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: bool(consumer.assigned))
            assert await send_back(broker, 0) == 0


async def describe(broker: BrokerClient) -> pb.DescribeGroupResponse:
    return await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="G"))


async def test_members_without_notice_hear_of_each_other_later(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        loop = asyncio.get_running_loop()
        for notified in (True, False):
            await put(broker, notify_members_enable=notified)
            one: Any = broker.stub.JoinGroup()
            await one.write(pb.JoinGroupRequest(group="G", client_id="a"))
            assert len((await one.read()).members) == 1
            began_s = loop.time()
            other: Any = broker.stub.JoinGroup()
            await other.write(pb.JoinGroupRequest(group="G", client_id="b"))
            assert len((await other.read()).members) == 2  # its own view is there at once
            assert len((await one.read()).members) == 2
            waited_s = loop.time() - began_s
            assert (waited_s < NOTICE_S / 2) == notified, waited_s
            if not notified:
                await put(broker, consume_enable=False)  # settings are told at once
                began_s = loop.time()
                assert (await one.read()).consume_disabled
                assert loop.time() - began_s < NOTICE_S / 2
            one.cancel()
            other.cancel()

            async def empty() -> bool:
                return not (await describe(broker)).members

            await until_async(empty)


async def test_a_group_that_may_not_begin_at_first_messages_begins_at_the_end(
    tmp_path: Path,
) -> None:
    seen: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"old")
        await put(broker, consume_from_min_enable=False)
        options = PushConsumerOptions(consume_from=ConsumeFrom.FIRST)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: bool(consumer.assigned))

            async def has_begun() -> bool:
                return await broker.committed("G", "T", 0) is not None

            await until_async(has_begun)
            await broker.send("T", 0, b"new")
            await until(lambda: bool(seen))
        assert seen == [b"new"]


async def test_a_group_goes_with_its_topics_and_its_dead_letters_on_word(tmp_path: Path) -> None:
    async def delete(dead_letters: bool = False) -> list[str]:
        request = pb.DeleteGroupRequest(group="G", dead_letters=dead_letters)
        return [*(await broker.admin.DeleteGroup(request)).topics]

    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1", b"2")
        await put(broker)
        assert await send_back(broker, 0, delay_level=-1) == 0
        assert await send_back(broker, 2, delay_level=18) == 18
        member = broker.stub.JoinGroup()
        await member.write(pb.JoinGroupRequest(group="G", client_id="a"))
        await member.read()
        assert isinstance(await refusal(delete(dead_letters=True)), GroupInUse)
        member.cancel()

        async def nobody() -> bool:
            return not (await describe(broker)).members

        await until_async(nobody)
        assert await delete() == [RETRY]
        assert await topics_of(broker) == {"T", DLQ, SCHEDULE, TIMER_TOPIC}
        listed = await broker.admin.ListGroups(pb.ListGroupsRequest())
        [left] = listed.summaries  # the dead letters of a group that is gone
        assert (left.group, left.dead_letter_count, left.queue_count) == ("G", 1, 0)
        refused = await refusal(delete())
        assert isinstance(refused, GroupNotFound)
        assert "1 dead letters" in refused.message
        assert await delete(dead_letters=True) == [DLQ]
        assert isinstance(await refusal(delete()), GroupNotFound)
        await put(broker)
        assert await send_back(broker, 1, delay_level=1) == 1
        assert await delete() == [RETRY]  # no dead letters


async def test_many_member_names_leave_nothing_behind_and_groups_have_a_limit(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, groups_max=50) as broker:
        for first in range(0, 500, 20):
            streams: list[Any] = [broker.stub.JoinGroup() for _ in range(20)]
            for n, stream in enumerate(streams):
                request = pb.JoinGroupRequest(group="G", client_id=f"member-{first + n}")
                await stream.write(request)
                await stream.read()
            for stream in streams:
                stream.cancel()

        async def nobody() -> bool:
            return not (await describe(broker)).members

        await until_async(nobody)
        refused = 0
        for n in range(60):
            try:
                await put(broker, f"group-{n}")
            except grpc.aio.AioRpcError as error:
                refused += error_from(error).name() == "LIMIT_EXCEEDED"
        assert refused == 60 - 49


async def test_a_list_of_levels_of_ones_own(tmp_path: Path) -> None:
    outgoing = pb.OutgoingMessage(topic="T", queue_id=0, body=b"x", delay_level=20)
    request = pb.SendRequest(messages=[outgoing])
    longer = delayed.DEFAULT_LEVELS + " 1s 3s"
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        assert isinstance(await refusal(broker.stub.Send(request)), DelayLevelInvalid)
        outgoing = pb.OutgoingMessage(topic="T", queue_id=0, body=b"x", delay_level=1)
        await broker.stub.Send(pb.SendRequest(messages=[outgoing]))
        assert (await topic_of(broker, SCHEDULE)).write_queue_count == 18
    async with running_broker(tmp_path, message_delay_level=longer) as broker:
        assert (await topic_of(broker, SCHEDULE)).write_queue_count == 20
        await broker.stub.Send(request)
        await broker.send("T", 0, b"retried")
        await put(broker)
        assert isinstance(await send_back(broker, 0, delay_level=21), DelayLevelInvalid)
        began_s = time.monotonic()
        await broker.stub.Send(request)
    # While messages wait in them, levels stay.
    with pytest.raises(ConfigInvalid, match="level 20"):
        async with running_broker(tmp_path):
            pass
    async with running_broker(tmp_path, message_delay_level=longer) as broker:

        async def all_there() -> bool:
            return (await broker.status("T", 0)).max_offset == 4

        await until_async(all_there)
        assert time.monotonic() - began_s >= 2.0
    # A list that got shorter and then longer again repeats nothing.
    async with running_broker(tmp_path) as broker:
        assert (await broker.status("T", 0)).max_offset == 4
    async with running_broker(tmp_path, message_delay_level=longer) as broker:
        await asyncio.sleep(0.5)
        assert (await broker.status("T", 0)).max_offset == 4


async def test_the_sdk_sends_levels_that_the_broker_has(tmp_path: Path) -> None:
    async def send(namesrv: str, level: int) -> None:
        async with Producer(namesrv) as producer:
            await producer.send_and_wait(Message("T", b"%d" % level, delay_level=level))

    levels = delayed.DEFAULT_LEVELS + " 1s"
    async with running_namesrv(tmp_path) as namesrv:
        options = {"namesrv": (namesrv,)}
        async with running_broker(tmp_path, message_delay_level=levels, **options) as broker:
            await broker.put_topic("T", 1)
            await send(namesrv, 19)
            with pytest.raises(DelayLevelInvalid):
                await send(namesrv, 20)

            async def is_there() -> bool:
                return (await broker.status("T", 0)).max_offset == 1

            await until_async(is_there)
            assert await broker.bodies("T", 0) == [b"19"]
    with pytest.raises(DelayLevelInvalid):
        Message("T", b"", delay_level=65)


async def test_settings_that_are_changed_at_once_all_count(tmp_path: Path) -> None:
    """Also while clients make the group that they need."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        await broker.read_queue("T", 0)

        async def topic(quota: pb.Quota | None = None, **settings: Any) -> None:
            config = common.TopicConfig(name="T", **settings)
            await broker.admin.PutTopic(pb.PutTopicRequest(topic=config, send_quota=quota))

        await asyncio.gather(
            topic(read_queue_count=3),
            topic(quota=pb.Quota(messages_per_s=1_000)),
            topic(write_queue_count=2),
            topic(message_type=common.MESSAGE_TYPE_DELAY),
            broker.commit("G", ("T", 0, 0, 0)),
            put(broker, retry_times_max=5),
            put(broker, retry_queue_count=2),
            put(broker, consume_broadcast_enable=False),
            broker.commit("G", ("T", 0, 0, 0)),
        )
        config, settings = broker.state.topics.get("T"), broker.state.groups["G"]
        assert (config.read_queue_count, config.write_queue_count) == (3, 2)
        assert config.message_type is MessageType.DELAY
        assert broker.state.quotas.of_clients[Way.SEND]["T"].messages_per_s == 1_000
        assert (settings.retry_times_max, settings.retry_queue_count) == (5, 2)
        assert not settings.consume_broadcast_enable
