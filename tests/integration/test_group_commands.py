"""``cometmq group`` and the quota of ``cometmq topic update`` on a real cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cometmq.client import PushConsumer, ReceivedMessage
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient, running_broker, running_namesrv
from tests.support.cluster.commands import Commands
from tests.support.waiting import until


async def nothing(messages: list[ReceivedMessage]) -> None:
    """A listener."""


async def test_a_group_is_made_changed_shown_and_deleted(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        command = Commands(namesrv)
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1")
        [made] = await command("group", "create", "G", "--retry-policy", "10s 1m")
        assert (made["created"], made["retry_policy"]) == (True, "10s 1m")
        assert "group update" in await command("group", "create", "G", code=1)
        assert "GROUP_NOT_FOUND" in await command("group", "update", "H", "--no-notify", code=1)
        changes = [
            "--no-notify",
            "--read-quota",
            "7/9",
            "--dlq-reserve-hours",
            "2",
            "--mode",
            "pop",
        ]
        [changed] = await command("group", "update", "G", *changes, "--orderly")
        assert not changed["created"]
        [shown] = await command("group", "info", "G")
        assert shown == changed
        wanted = {
            "retry_policy": "10s 1m",
            "notify_members_enable": False,
            "read_messages_per_s": 7,
            "read_bytes_per_s": 9,
            "dlq_reserve_time_ms": 7_200_000,
            "mode": "pop",
            "consume_orderly": True,
            "consume_enable": True,
        }
        assert {name: shown[name] for name in wanted} == wanted
        await command("group", "update", "G", "--read-quota", "0")
        async with PushConsumer(namesrv, "G", nothing) as consumer:
            await consumer.subscribe("T")
            await until(lambda: bool(consumer.assigned))
            report = await command("group", "status", "G")
            assert len(report["members"]) == 1
            assert (report["disagreement"], report["group"]) == ("", "G")
            assert report["topics"][-1]["member_count"] == 1
            assert "GROUP_IN_USE" in await command("group", "delete", "G", "--yes", code=1)
            deleted = await command("group", "delete", "--idle-hours", "0.000001", "--yes")
            assert deleted == []  # it has a member
        [gone] = await command("group", "delete", "G", "--yes")
        assert gone["group"] == "G"


async def test_members_that_do_not_agree_end_the_status_with_3(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        for name, tag in (("a", "x"), ("b", "y")):
            stream: Any = broker.stub.JoinGroup()
            wanted = pb.Subscription(topic="T", filter=common.Filter(tags=[tag]))
            await stream.write(
                pb.JoinGroupRequest(group="G", client_id=name, subscriptions=[wanted])
            )
            await stream.read()
        report = await Commands(namesrv)("group", "status", "G", code=3)
        assert report["disagreement"] == "members do not agree on the filter of T"


async def test_idle_groups_go_with_their_retry_topics_and_dead_letters_stay(
    tmp_path: Path,
) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        command = Commands(namesrv)
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1")
        await give_up(broker, "dead", 1, -1)
        await give_up(broker, "quiet", 1)
        listed = {row["group"]: row for row in await command("group", "list")}
        assert listed["dead"]["dead_letter_count"] == 1
        assert listed["quiet"]["dead_letter_count"] == 0
        assert await command("group", "delete", "--idle-hours", "24", "--yes") == []
        idle = ["group", "delete", "--idle-hours", "0.000001", "--yes"]
        gone = {row["group"]: row["topics"] for row in await command(*idle)}
        assert gone == {"dead": ["%RETRY%dead"], "quiet": ["%RETRY%quiet"]}
        [left] = await command("group", "list")
        assert (left["group"], left["dead_letter_count"]) == ("dead", 1)
        [last] = await command(*idle, "--dead-letters")
        assert last["topics"] == ["%DLQ%dead"]
        assert await command("group", "list") == []


async def give_up(broker: BrokerClient, group: str, *delay_levels: int) -> None:
    """The first messages of the topic, each for a level."""
    await broker.commit(group, ("T", 0, 0, 0))
    queue = common.QueueRef(topic="T")
    items = [
        pb.SendBackItem(queue=queue, position=common.Position(offset=n), delay_level=level)
        for n, level in enumerate(delay_levels)
    ]
    answer = await broker.stub.SendBack(pb.SendBackRequest(group=group, items=items))
    assert not any(result.HasField("error") for result in answer.results)


async def test_a_topic_gets_a_quota(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        command = Commands(namesrv)
        [made] = await command("topic", "create", "T", "--send-quota", "5/6")
        assert made["send_quota"] == "5/6"
        [changed] = await command("topic", "update", "T", "--queues", "3")
        assert changed["send_quota"] == "5/6"
        [listed] = await command("topic", "list")
        assert (listed["send_quota"], listed["write_queue_count"]) == ("5/6", 3)
        await command("topic", "update", "T", "--send-quota", "0")
        [listed] = await command("topic", "list")
        assert listed["send_quota"] == ""
        described = await broker.admin.DescribeTopic(pb.DescribeTopicRequest(topic="T"))
        assert described.send_quota == pb.Quota()


async def test_quotas_of_addresses_and_topics_are_set_shown_and_unset(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        command = Commands(namesrv)
        await broker.put_topic("T", 1)
        each = ["quota", "set", "address"]
        [one] = await command(*each, "--send", "100/2000")
        assert one == {
            "scope": "address",
            "name": "",
            "broker_group": "g1",
            "send": "100/2000",
            "read": "",
        }
        [one] = await command(*each, "--read", "5")
        assert (one["send"], one["read"]) == ("100/2000", "5/0"), "what is not given stays"
        await command(*each, "2001:db8::9", "--send", "0")
        await command("quota", "set", "topic", "T", "--read", "7/0")
        assert "TOPIC_NOT_FOUND" in await command(
            "quota", "set", "topic", "U", "--send", "1", code=1
        )
        assert "INVALID_REQUEST" in await command(*each, "10.0.0.0/8", "--send", "1", code=1)
        shown = [(one["scope"], one["name"], one["send"]) for one in await command("quota", "list")]
        assert shown == [
            ("address", "", "100/2000"),
            ("address", "2001:db8::/64", "0/0"),
            ("topic", "T", ""),
        ]
        await command("quota", "unset", "address")
        await command("quota", "unset", "topic", "T")
        assert [one["name"] for one in await command("quota", "list")] == ["2001:db8::/64"]
