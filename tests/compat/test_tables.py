"""``config/*.json``: RocketMQ understands what a real broker of ours exports, we take over what it
wrote, and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import MessageTypeMismatch
from cometmq.format import fastjson
from cometmq.messaging import rocketmq_tables
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.compat.listing import INDEX
from tests.compat.rocketmq import RocketMq, group, offset, put, topic
from tests.support.cluster.broker import SMALL_FILES, BrokerProcess, refusal

pytestmark = pytest.mark.slow

OURS = (rocketmq_tables.TOPICS, rocketmq_tables.GROUPS, rocketmq_tables.OFFSETS)
FLAGS = ("--max_hash_slot_num", str(INDEX.hash_slots), "--max_index_num", str(INDEX.entries))

# What RocketMQ 5 has of it comes and goes with the store; the quota is ours.
POLICY = pb.GroupSettings(
    group="careful",
    consume_orderly=True,
    consume_timeout_min=30,
    retry_policy=pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[1_000, 60_000]),
    read_quota=pb.Quota(messages_per_s=7),
)


@pytest.fixture
def theirs(mq: RocketMq) -> RocketMq:
    """RocketMQ with the file sizes of the brokers in tests."""
    sizes = ("mapped_file_size_commit_log", "mapped_file_size_consume_queue")
    return RocketMq(mq.version, *(SMALL_FILES[size] for size in sizes))


def understood(mq: RocketMq, folder: Path, *commands: Any) -> dict[str, Any]:
    """RocketMQ's tables as it has read them; it then takes the commands and writes them."""
    tables = mq.config(folder, commands)
    return {name: fastjson.loads(text.encode()) for name, text in tables.items()}


def marks(folder: Path) -> list[bool]:
    """Which of the files say that they are ours."""
    tables = [rocketmq_tables.parse((folder / "config" / name).read_bytes()) for name in OURS]
    return [rocketmq_tables.mark_of(table) is not None for table in tables]


async def test_there_and_back(theirs: RocketMq, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with BrokerProcess(tmp_path, *FLAGS) as broker:
        client = broker.client
        for name, queue_count in (("orders", 4), ("bills", 2), ("gone", 1)):
            await client.put_topic(name, queue_count)
            await client.send(name, 0, b"a", b"b", b"c")
        generation = (await client.status("orders", 0)).generation
        await client.commit("billing", ("orders", 0, generation, 2), ("bills", 0, 0, 1))
        policy = (await client.admin.PutGroup(pb.PutGroupRequest(settings=POLICY))).settings
        await broker.stop()

        # --- RocketMQ reads our tables, works in the folder and writes them
        assert marks(folder) == [True] * 3
        changes = [
            *(topic("orders", 6), topic("new", 2)),
            *(group("billing", 5), group("fresh")),
            *(offset("billing", "orders", 0, 3), offset("fresh", "new", 1, 1)),
        ]
        read = understood(theirs, folder, *changes)
        counts = {
            name: (config["readQueueNums"], config["writeQueueNums"], config["perm"])
            for name, config in read[rocketmq_tables.TOPICS]["topicConfigTable"].items()
        }
        assert counts == {"orders": (4, 4, 6), "bills": (2, 2, 6), "gone": (1, 1, 6)}
        assert read[rocketmq_tables.OFFSETS]["offsetTable"] == {
            "orders@billing": {"0": 2},
            "bills@billing": {"0": 1},
        }
        table = read[rocketmq_tables.GROUPS]["subscriptionGroupTable"]
        assert "billing" in table
        if "consumeMessageOrderly" in table["billing"]:  # RocketMQ 5
            careful = table["careful"]
            assert (careful["consumeMessageOrderly"], careful["consumeTimeoutMinute"]) == (True, 30)
            steps = careful["groupRetryPolicy"]["customizedRetryPolicy"]["next"]
            assert steps == [1_000, 1_000, 1_000, 60_000]
        else:
            assert theirs.version == "v4"
        theirs.write(folder, [put("new", 1, b"n"), put("new", 1, b"m"), put("orders", 5, b"d")])
        assert marks(folder) == [False] * 3, "it drops our field"

        # --- we take over its tables
        client = await broker.start()
        described = await client.admin.DescribeGroup(pb.DescribeGroupRequest(group="careful"))
        assert described.settings == policy, "4.9 writes less, and ours stays"
        assert await client.bodies("orders", 0) == [b"a", b"b", b"c"]
        assert await client.bodies("orders", 5) == [b"d"]
        assert await client.bodies("new", 1) == [b"n", b"m"]
        raised = (await client.status("orders", 0)).generation
        assert raised > generation
        committed = await client.committed("billing", "orders", 0)
        assert committed is not None
        assert (committed.generation, committed.offset) == (raised, 3)
        kept = await client.committed("billing", "bills", 0)
        assert kept is not None
        assert kept.offset == 1
        answer = await client.pull("orders", 0, 1, generation)
        assert answer.count == 2, "a position of before is good as far as the messages are the same"
        assert marks(folder) == [True] * 3, "at once: a crash must not take them over again"
        await client.commit("fresh", ("new", 1, 0, 2))
        await broker.kill()

        # --- once more after a crash, and back
        client = await broker.start()
        assert await client.bodies("new", 1) == [b"n", b"m"]
        await broker.stop()
        read = understood(theirs, folder)
        assert read[rocketmq_tables.OFFSETS]["offsetTable"]["orders@billing"] == {"0": 3}
        table = read[rocketmq_tables.GROUPS]["subscriptionGroupTable"]
        assert table["billing"]["retryMaxTimes"] == 5
        assert "fresh" in table
        listing = theirs.read(folder)
        assert listing.bounds["new", 1] == (0, 2)
        assert listing.bounds["orders", 5] == (0, 1)


async def test_types_order_and_attributes_there_and_back(
    theirs: RocketMq, mq: RocketMq, tmp_path: Path
) -> None:
    """4.9 knows no attributes and rewrites the file without them: the types stay all the same."""
    folder, has_types = tmp_path / "store", mq.version != "v4"
    async with BrokerProcess(tmp_path, *FLAGS) as broker:
        for name, kind, is_ordered in (
            ("fifo", common.MESSAGE_TYPE_FIFO, True),
            ("late", common.MESSAGE_TYPE_DELAY, False),
            ("any", common.MESSAGE_TYPE_ANY, False),
        ):
            config = common.TopicConfig(name=name, message_type=kind, is_ordered=is_ordered)
            await broker.client.admin.PutTopic(pb.PutTopicRequest(topic=config))
        await broker.stop()

        attributes = {"+message.type": "TRANSACTION", "+cleanup.policy": "DELETE"}
        changes = [topic("new", 2, is_ordered=True, attributes=attributes if has_types else {})]
        read = understood(theirs, folder, *changes)[rocketmq_tables.TOPICS]["topicConfigTable"]
        assert {name: read[name]["order"] for name in read} == {
            "fifo": True,
            "late": False,
            "any": False,
        }
        if has_types:
            types = {name: read[name]["attributes"] for name in read}
            assert types["fifo"] == {"message.type": "FIFO"}
            assert types["late"] == {"message.type": "DELAY"}
            assert types["any"] == {}

        client = await broker.start()
        listed = await client.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        found = {one.name: (one.message_type, one.is_ordered) for one in listed.topics}
        assert found["fifo"] == (common.MESSAGE_TYPE_FIFO, True)
        assert found["late"] == (common.MESSAGE_TYPE_DELAY, False)
        assert found["any"] == (common.MESSAGE_TYPE_ANY, False)
        new = common.MESSAGE_TYPE_TRANSACTION if has_types else common.MESSAGE_TYPE_ANY
        assert found["new"] == (new, True)
        refused = await refusal(client.send("late", 0, b"at once"))
        assert isinstance(refused, MessageTypeMismatch)
        await broker.stop()
        read = understood(theirs, folder)[rocketmq_tables.TOPICS]["topicConfigTable"]
        if has_types:
            kept = {"message.type": "TRANSACTION", "cleanup.policy": "DELETE"}
            assert read["new"]["attributes"] == kept
        assert read["new"]["order"]


async def test_a_folder_that_was_always_rocketmqs(theirs: RocketMq, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    messages = [put("orders", n % 4, b"%d" % n) for n in range(40)]
    theirs.write(folder, [*messages, put("lost", 2, b"no settings")])
    changes = [topic("orders"), topic("empty", 1, 4), topic("TBW102", 8, 7), group("billing")]
    theirs.config(folder, [*changes, offset("billing", "orders", 1, 7)])
    theirs.config(folder)
    (folder / "config" / rocketmq_tables.OFFSETS).write_bytes(b'{"offsetTable":{')  # a torn write
    async with BrokerProcess(tmp_path, *FLAGS) as broker:
        client = broker.client
        assert len(await client.bodies("orders", 1)) == 10
        committed = await client.committed("billing", "orders", 1)
        assert committed is not None
        assert committed.offset == 7, "RocketMQ's .bak has it"
        await client.send("orders", 1, b"ours")
        assert (await client.bodies("orders", 1))[-1] == b"ours"
        await broker.stop()
    listing = theirs.read(folder)
    assert listing.bounds["orders", 1] == (0, 11)
