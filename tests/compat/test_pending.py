"""What waits when the program changes, goes on in the other one: delayed messages, messages that
groups sent back, dead letters. Nothing is lost, nothing comes early, nothing twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from cometmq.format import record
from cometmq.format.delayed import SCHEDULE_TOPIC, delay_ms, level_of
from cometmq.messaging import rocketmq_tables
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.compat.listing import INDEX, note_compared
from tests.compat.rocketmq import Command, RocketMq, group, put, topic
from tests.support.cluster.broker import SMALL_FILES, BrokerClient, BrokerProcess
from tests.support.waiting import until_async

pytestmark = pytest.mark.slow

FLAGS = ("--max_hash_slot_num", str(INDEX.hash_slots), "--max_index_num", str(INDEX.entries))
RETRY, DLQ = "%RETRY%billing", "%DLQ%billing"
ORIGIN = "7F00000100002A9F" + "0" * 16
ROUND_S = 4.0  # RocketMQ begins to deliver after a second


@pytest.fixture
def theirs(mq: RocketMq) -> RocketMq:
    """RocketMQ with the file sizes of the brokers in tests."""
    sizes = ("mapped_file_size_commit_log", "mapped_file_size_consume_queue")
    return RocketMq(mq.version, *(SMALL_FILES[size] for size in sizes))


def delayed(body: bytes, level: int) -> Command:
    properties = {"DELAY": str(level), "KEYS": body.decode(), "UNIQ_KEY": f"{body.hex():0>34}"}
    return put("orders", 1, body, properties=properties)


def sent_back(body: bytes, level: int, times: int) -> Command:
    """As RocketMQ's broker stores what a group sent back."""
    properties = {
        "DELAY": str(level),
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": ORIGIN,
        "UNIQ_KEY": f"{body.hex():0>34}",
    }
    return put(RETRY, 0, body, properties=properties, reconsume=times)


def dead(body: bytes) -> Command:
    properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": ORIGIN}
    return put(DLQ, 0, body, properties=properties, reconsume=16)


@dataclass(frozen=True)
class Held:
    """All that a folder holds, as RocketMQ reads it."""

    records: list[record.Record]

    def bodies(self, topic_name: str) -> Counter[bytes]:
        return Counter(one.body for one in self.records if one.topic == topic_name)

    def early(self) -> list[bytes]:
        """What came before its time: before its delayed record's store time and the level."""
        due = {
            (one.properties["REAL_TOPIC"], one.body): one.store_time_ms
            + delay_ms(level_of(one.queue_id))
            for one in self.records
            if one.topic == SCHEDULE_TOPIC
        }
        return [
            one.body
            for one in self.records
            if one.store_time_ms < due.get((one.topic, one.body), 0)
        ]


def held(mq: RocketMq, folder: Path) -> Held:
    records = [record.decode(bytes.fromhex(line["raw"])) for line in mq.read(folder).messages]
    note_compared("messages that waited or were delivered", len(records))
    return Held(records)


def reached(folder: Path) -> dict[str, int]:
    """By level, how far the file for RocketMQ says that delivery has come."""
    table = rocketmq_tables.parse((folder / "config" / rocketmq_tables.DELAYS).read_bytes())
    return {str(level): offset for level, offset in table["offsetTable"].items()}


async def arrived(broker: BrokerClient, topic_name: str, queue_id: int, count: int) -> None:
    async def there() -> bool:
        return (await broker.status(topic_name, queue_id)).max_offset >= count

    await until_async(there)


@pytest.mark.parametrize("crashes", [False, True], ids=["restarted", "crashed"])
async def test_what_waits_goes_on_in_the_other_program(
    theirs: RocketMq, tmp_path: Path, crashes: bool
) -> None:
    """Restarted: ours dies and is started again before it is stopped. Crashed: it is not."""
    folder = tmp_path / "store"
    tables = [topic("orders", 4), topic(RETRY, 1), topic(DLQ, 1), group("billing")]
    theirs.config(folder, [*tables])
    theirs.write(
        folder,
        [
            put("orders", 0, b"plain"),
            *(delayed(b"theirs %d" % n, 1) for n in range(3)),
            sent_back(b"failed at theirs", 1, 1),
            dead(b"died at theirs"),
        ],
    )
    theirs.deliver(folder, ROUND_S)  # and tell so in delayOffset.json
    assert reached(folder)["1"] == 4
    pending = [
        *(delayed(b"for us %d" % n, 1) for n in range(3)),
        delayed(b"for us later", 2),
        sent_back(b"fails again", 2, 2),
        delayed(b"much later", 17),
        sent_back(b"fails for long", 18, 3),
    ]
    theirs.write(folder, pending)

    # --- ours: what was delivered does not come again, what waits comes, and more begins to wait
    async with BrokerProcess(tmp_path, *FLAGS) as broker:
        client = broker.client
        await arrived(client, "orders", 1, 7)
        await arrived(client, RETRY, 0, 2)
        assert await client.bodies(DLQ, 0) == [b"died at theirs"]
        again = record.decode_all((await client.pull(RETRY, 0, 1, max_count=1)).records)[0]
        assert (again.body, again.reconsume_times) == (b"fails again", 2)
        assert again.properties["RETRY_TOPIC"] == "orders"

        async def back(offset: int, topic_name: str, queue_id: int, level: int) -> None:
            item = pb.SendBackItem(
                queue=common.QueueRef(topic=topic_name, queue_id=queue_id),
                position=common.Position(offset=offset),
                delay_level=level,
            )
            request = pb.SendBackRequest(group="billing", items=[item])
            assert not (await client.stub.SendBack(request)).results[0].HasField("error")

        message = pb.OutgoingMessage(topic="orders", queue_id=1, body=b"ours", delay_level=3)
        await client.stub.Send(pb.SendRequest(messages=[message]))
        await back(0, "orders", 0, 3)  # plain
        await back(1, RETRY, 0, -1)
        await arrived(client, DLQ, 0, 2)
        await broker.kill()
        if not crashes:
            client = await broker.start()
            assert (await client.status("orders", 1)).appended_offset == 7, "nothing comes again"
            await broker.stop()

    # --- theirs: exactly what still waits is delivered
    before = reached(folder)
    if not crashes:
        assert before["1"] == 7
    assert before.get("17", 0) == before.get("18", 0) == 0
    theirs.deliver(folder, ROUND_S + 9)
    there = held(theirs, folder)
    for_us = [b"for us 0", b"for us 1", b"for us 2", b"for us later"]
    of_orders = [b"plain", b"theirs 0", b"theirs 1", b"theirs 2", *for_us, b"ours"]
    of_group = [b"failed at theirs", b"fails again", b"plain"]
    found = there.bodies("orders"), there.bodies(RETRY)
    if crashes:
        # What ours delivered since it wrote the file for RocketMQ may come twice; nothing else.
        assert found[0] - Counter(for_us) <= Counter(of_orders)
        assert found[1] - Counter([b"fails again"]) <= Counter(of_group)
        assert (set(found[0]), set(found[1])) == (set(of_orders), set(of_group))
    else:
        assert found == (Counter(of_orders), Counter(of_group))
        assert reached(folder)["3"] == before.get("3", 0) + 2
    assert there.bodies(DLQ) == Counter([b"died at theirs", b"fails again"])
    # 4.9 gives what it dispatches while it recovers no time, and delivers it at once.
    assert not there.early() or (crashes, theirs.version) == (True, "v4")
    tried = next(one for one in there.records if one.topic == RETRY and one.body == b"plain")
    assert tried.reconsume_times == 1
    assert tried.properties["RETRY_TOPIC"] == "orders"

    # --- and ours again: nothing twice, what was sent for long still waits
    async with BrokerProcess(tmp_path, *FLAGS) as broker:
        client = broker.client
        counts = {
            ("orders", 1): sum(found[0].values()) - 1,
            (RETRY, 0): sum(found[1].values()),
            (DLQ, 0): 2,
        }
        for (topic_name, queue_id), count in counts.items():
            await arrived(client, topic_name, queue_id, count)
        await asyncio.sleep(1)  # a second delivery would be there by then
        for (topic_name, queue_id), count in counts.items():
            assert (await client.status(topic_name, queue_id)).appended_offset == count
        await broker.stop()
    assert reached(folder).get("17", 0) == reached(folder).get("18", 0) == 0
    assert sum(there.bodies(SCHEDULE_TOPIC).values()) == len(pending) + 4 + 2
