"""Half messages of a folder that RocketMQ wrote: what is open, and what it finds later."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from cometmq.clock import SystemClock
from cometmq.format import halves, properties, record, taghash
from cometmq.format.batch import BatchLimits
from cometmq.format.halves import HALF_TOPIC, OP_TOPIC
from cometmq.member.state.opening import Opened, open_writer
from cometmq.messaging.rocketmq_tables import OFFSETS, TOPICS, parse
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import config_for, running_broker

HOST = record.host_bytes("127.0.0.1", 10911)
TABLE = b'{"topicConfigTable":{"orders":{"readQueueNums":2,"writeQueueNums":2,"perm":6}}}'


class Theirs(NamedTuple):
    """A record as RocketMQ writes it."""

    topic: str
    body: bytes
    pairs: dict[str, str]

    @property
    def queue_id(self) -> int:
        return 0

    @property
    def size_bytes(self) -> int:
        return len(self.encode(0, 0, 0, HOST))

    def tags_code(self, store_time_ms: int) -> int:
        return taghash.tags_code(self.pairs.get("TAGS", "").encode())

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        return record.encode(
            self.topic.encode(),
            0,
            self.body,
            properties.encode(self.pairs)[:-1],  # 4.9 drops the last separator
            born_time_ms=1,
            born_host=HOST,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
        )


def half(name: str, **more: str) -> Theirs:
    pairs = {"UNIQ_KEY": name, "TRAN_MSG": "true", "PGROUP": "P", **more}
    return Theirs(HALF_TOPIC, name.encode(), {"REAL_TOPIC": "orders", "REAL_QID": "1", **pairs})


def op(body: bytes) -> Theirs:
    return Theirs(OP_TOPIC, body, {"TAGS": "d"})


def as_rocketmq(directory: Path, records: list[Theirs], floors: tuple[int, int] | None) -> None:
    """A folder with these records, and RocketMQ's offsets of the two queues."""
    config = config_for(directory)
    opened = open_writer(config, BatchLimits(), HOST, SystemClock())
    opened.store.append_relayed(records, HOST)
    opened.store.close()
    folder = config.store_path / "config"
    folder.mkdir()
    (folder / TOPICS).write_bytes(TABLE)
    if floors is not None:
        entries = [
            f'"{topic}@CID_RMQ_SYS_TRANS":{{0:{floor}}}'
            for topic, floor in zip((HALF_TOPIC, OP_TOPIC), floors, strict=True)
        ]
        (folder / OFFSETS).write_text('{"offsetTable":{' + ",".join(entries) + "}}")
    for name in ("cometmq.json", "cometmq.epochs"):
        (config.store_path / name).unlink()


def open_names(opened: Opened) -> list[str]:
    found = []
    for _, (log_offset, size, group), _ in opened.state.halves.open_halves(0, 100):
        one = record.decode(opened.store.read_records([(log_offset, size)]))
        assert group == "P"
        found.append(one.unique_id)
    return found


RECORDS = [
    half("below"),
    half("single"),
    half("a"),
    half("b"),
    half("open"),
    half("checked", TRANSACTION_CHECK_TIMES="14"),
    op(b"1"),  # 4.9's form
    op(b"2,3"),  # 5.x's form
    Theirs(OP_TOPIC, b"4", {"TAGS": "x"}),  # not an op
]


@pytest.mark.parametrize(
    ("floors", "names"),
    [((1, 0), ["open", "checked"]), (None, ["below", "open", "checked"])],
)
def test_what_rocketmq_left_open_is_open(
    tmp_path: Path, floors: tuple[int, int] | None, names: list[str]
) -> None:
    as_rocketmq(tmp_path, RECORDS, floors)
    opened = open_writer(config_for(tmp_path), BatchLimits(), HOST, SystemClock())
    assert open_names(opened) == names
    table = opened.state.halves
    assert table.checks_of(5) == 14
    assert {HALF_TOPIC, OP_TOPIC} <= {config.name for config in opened.state.topics}
    table.validate()
    opened.store.close()
    again = open_writer(config_for(tmp_path), BatchLimits(), HOST, SystemClock())
    assert open_names(again) == names
    assert again.state.halves.checks_of(5) == 14
    again.store.close()


def test_a_half_that_a_crash_of_rocketmq_left_twice_is_open_once(tmp_path: Path) -> None:
    """It appends a half again to ask about it, and writes its offsets each 5 s."""
    records = [half("a"), half("b"), half("a", TRANSACTION_CHECK_TIMES="1")]
    as_rocketmq(tmp_path, records, (0, 0))
    opened = open_writer(config_for(tmp_path), BatchLimits(), HOST, SystemClock())
    assert open_names(opened) == ["b", "a"]
    opened.store.close()
    again = open_writer(config_for(tmp_path), BatchLimits(), HOST, SystemClock())
    assert open_names(again) == ["b", "a"], "an op record lists the other one"
    again.store.close()


async def test_a_clean_stop_leaves_what_rocketmq_reads(tmp_path: Path) -> None:
    """By its own offsets, and by op records of one offset, which alone RocketMQ 4.9 reads."""
    as_rocketmq(tmp_path, RECORDS, (1, 0))
    async with running_broker(tmp_path) as broker:
        table = broker.state.halves
        [(first, _, _), (last, _, _)] = table.open_halves(0, 10)
        assert (first, last) == (4, 5)
    tables = parse((tmp_path / "store" / "config" / OFFSETS).read_bytes())["offsetTable"]
    half_floor = tables[f"{HALF_TOPIC}@CID_RMQ_SYS_TRANS"]["0"]
    op_floor = tables[f"{OP_TOPIC}@CID_RMQ_SYS_TRANS"]["0"]
    assert half_floor == 4
    async with running_broker(tmp_path) as broker:
        message = pb.OutgoingMessage(topic="orders", queue_id=0, body=b"x", producer_group="P")
        answer = await broker.stub.Send(pb.SendRequest(messages=[message] * 3))
        ends = [
            pb.TransactionEnd(half=one.half, resolution=pb.TRANSACTION_RESOLUTION_COMMIT)
            for one in answer.sent
        ]
        await broker.stub.EndTransactions(pb.EndTransactionsRequest(producer_group="P", ends=ends))
    opened = open_writer(config_for(tmp_path), BatchLimits(), HOST, SystemClock())
    _, end = opened.store.queue_bounds(OP_TOPIC, 0)
    single = set()
    for offset in range(op_floor, end):
        unit = opened.store.read_units(OP_TOPIC, 0, offset, 1)
        place = int.from_bytes(unit[:8], "big"), int.from_bytes(unit[8:12], "big")
        body = record.decode(opened.store.read_records([place])).body
        if body.isdigit():
            single |= set(halves.ended_halves(body))
    assert {6, 7, 8} <= single
    assert open_names(opened) == ["open", "checked"]
    opened.store.close()


async def test_a_half_of_rocketmq_without_a_group_can_be_dropped(tmp_path: Path) -> None:
    """No producer can be asked about it, so it was open until it was given up."""
    pairs = {"REAL_TOPIC": "orders", "REAL_QID": "1", "UNIQ_KEY": "a", "TRAN_MSG": "true"}
    records = [Theirs(HALF_TOPIC, b"a", pairs), half("b")]
    as_rocketmq(tmp_path, records, (0, 0))
    async with running_broker(tmp_path) as broker:
        assert [one[1][2] for one in broker.state.halves.open_halves(0, 10)] == ["", "P"]
        request = pb.DropHalvesRequest(half_offsets=[0, 1, 9])
        answer = await broker.admin.DropHalves(request)
        assert [one.error.name for one in answer.results] == ["", "", "TRANSACTION_NOT_FOUND"]
        assert len(broker.state.halves) == 0
