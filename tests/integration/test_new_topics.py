"""The durability of new topics over real gRPC: what a request that says nothing gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cometmq.member.config import FlushDiskType
from cometmq.model import ReplicationMode
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient, running_broker
from tests.support.cluster.live_group import live_group

GROUP: dict[str, Any] = {
    "lease_duration_s": 1.0,
    "lease_renew_s": 0.1,
    "lease_poll_s": 0.05,
    "in_sync_lag_s_max": 0.5,
    "auto_create_topic_enable": True,
}


async def put(broker: BrokerClient, name: str, **fields: Any) -> None:
    await broker.admin.PutTopic(pb.PutTopicRequest(topic=common.TopicConfig(name=name, **fields)))


async def modes(broker: BrokerClient) -> dict[str, tuple[str, str]]:
    """Flush and replication mode of each of the users' topics."""
    answer = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
    return {
        one.name: (
            common.FlushMode.Name(one.flush_mode).removeprefix("FLUSH_MODE_"),
            common.ReplicationMode.Name(one.replication_mode).removeprefix("REPLICATION_MODE_"),
        )
        for one in answer.topics
        if "%" not in one.name and not one.name.startswith(("rmq_sys", "RMQ_SYS"))
    }


async def test_with_followers_a_new_topic_waits_for_the_disk_and_for_copies(tmp_path: Path) -> None:
    """Also one that is made while they are away; what a request chooses stays."""
    async with live_group(tmp_path, 2, **GROUP) as group:
        await group.all_in_sync(0, 1)
        broker = group[0].client
        await put(broker, "made")
        await broker.send("first", 0, b"m")
        chosen = {
            "flush_mode": common.FLUSH_MODE_ASYNC,
            "replication_mode": common.REPLICATION_MODE_ASYNC,
        }
        await put(broker, "chosen", **chosen)
        await put(broker, "chosen", read_queue_count=16, write_queue_count=16)
        await group[1].crash()
        await group.all_in_sync(0)
        await put(broker, "lonely")
        safe = ("SYNC", "APPENDED")
        assert await modes(broker) == {
            "made": safe,
            "first": safe,
            "lonely": safe,
            "chosen": ("ASYNC", "ASYNC"),
        }


async def test_alone_a_new_topic_waits_for_the_disk(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_topic_enable=True) as broker:
        await put(broker, "made")
        await broker.send("first", 0, b"m")
        assert await modes(broker) == {"made": ("SYNC", "ASYNC"), "first": ("SYNC", "ASYNC")}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"flush_disk_type": FlushDiskType.ASYNC_FLUSH}, ("ASYNC", "APPENDED")),
        ({"replication_mode": ReplicationMode.FLUSHED}, ("SYNC", "FLUSHED")),
    ],
)
async def test_an_option_sets_another_default(
    tmp_path: Path, option: dict[str, Any], expected: tuple[str, str]
) -> None:
    async with live_group(tmp_path, 1, **GROUP, **option) as group:
        broker = group[0].client
        await put(broker, "made")
        await broker.send("first", 0, b"m")
        assert await modes(broker) == {"made": expected, "first": expected}


async def test_a_topic_waits_for_followers_that_came_later_once_it_is_told_to(
    tmp_path: Path,
) -> None:
    """Its modes were stored when its group had none."""
    alone = {"replication_mode": ReplicationMode.ASYNC}
    async with live_group(tmp_path, 1, **GROUP, **alone) as group:
        await put(group[0].client, "old")
    async with live_group(tmp_path, 2, **GROUP) as group:
        await group.all_in_sync(0, 1)
        broker = group[0].client
        assert await modes(broker) == {"old": ("SYNC", "ASYNC")}
        await put(broker, "old", replication_mode=common.REPLICATION_MODE_APPENDED)
        assert await modes(broker) == {"old": ("SYNC", "APPENDED")}
