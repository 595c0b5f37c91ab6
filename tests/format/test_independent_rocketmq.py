"""Folders that Apache RocketMQ 4.9.8 and 5.5.1 wrote, and what is in them once a broker of ours has
taken them over, read by a reader that knows only ``docs/format``. It must read what RocketMQ read.
"""

from __future__ import annotations

import json
import os
import tarfile
from functools import partial
from pathlib import Path

import pytest

from tests.compat.golden import GOLDEN, LISTING, LOG_FILE_BYTES, STORES
from tests.compat.rocketmq import Listing
from tests.support.cluster.broker import BrokerClient, running_broker
from tests.support.independent.files import Row, read_checkpoint
from tests.support.independent.index import IndexFile, Shape, key_hash
from tests.support.independent.log import UNIT, Log, Queues
from tests.support.independent.reader import Store
from tests.support.independent.record import QueueKey, decode
from tests.support.independent.state import STATE_QUEUE
from tests.support.waiting import until_async

pytestmark = pytest.mark.parametrize("name", STORES)

SHAPE = Shape(slots=100, entries=400)
QUEUE_FILE_BYTES = 400
SIZES = {
    "mapped_file_size_commit_log": LOG_FILE_BYTES,
    "mapped_file_size_consume_queue": QUEUE_FILE_BYTES,
    "max_hash_slot_num": SHAPE.slots,
    "max_index_num": SHAPE.entries,
    "file_reserved_time": 1_000_000,  # the messages are old, and it may be the hour of retention
}

# By topic, queue id and queue offset: log offset, size, tag hash, the record.
Units = dict[tuple[str, int, int], tuple[int, int, int, bytes]]


@pytest.fixture
def listing(name: str, tmp_path: Path) -> Listing:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return Listing(json.loads((tmp_path / LISTING).read_text()))


@pytest.fixture
def store(listing: Listing, tmp_path: Path) -> Path:
    return tmp_path / "store"


def units_of(log: Log, key: QueueKey) -> Units:
    queue = log.queues[key]
    units = enumerate(UNIT.iter_unpack(queue.units), queue.first)
    return {
        (*key, number): (at, size, code, log.row.read(at, at + size))
        for number, (at, size, code) in units
    }


def as_rocketmq_read(listing: Listing) -> Units:
    return {
        (line["topic"], line["queue_id"], line["queue_offset"]): (
            line["log_offset"],
            line["size"],
            line["tags_code"],
            bytes.fromhex(line["raw"]),
        )
        for line in listing.messages
    }


def test_a_folder_of_rocketmqs(listing: Listing, store: Path) -> None:
    log = Log(Row(store / "commitlog"), exact=True, epochs=())
    queues = Queues(store / "consumequeue", log, exact=True)
    queues.expect_log()
    found: Units = {}
    for key in log.queues:
        found |= units_of(log, key)
    assert found == as_rocketmq_read(listing)
    assert len(found) > 60
    assert (log.row.start, log.end) == listing.log
    assert read_checkpoint(store / "checkpoint").mark is None
    queues.close()
    log.row.close()


def test_its_index(name: str, store: Path) -> None:
    log = Log(Row(store / "commitlog"), exact=True, epochs=())
    files = [IndexFile(path, SHAPE) for path in sorted((store / "index").iterdir())]
    found = [place for file in files for place in file.found]
    plain = [place for place in found if not is_of_a_tag(log, *place)]
    assert plain == [key[:2] for key in log.keys]
    assert plain
    assert (found == plain) == ("4.9" in name), "5.5 enters tags, too"
    log.row.close()


def is_of_a_tag(log: Log, code: int, log_offset: int) -> bool:
    message = decode(*log.row.at(log_offset), log_offset)
    return bool(message.tag) and code == key_hash(message.topic, f"T#{message.tag}")


async def holds(broker: BrokerClient, end: int) -> bool:
    return (await broker.status("orders", 2)).max_offset == end


async def test_a_folder_that_was_taken_over(listing: Listing, store: Path) -> None:
    pending = listing.bounds["orders", 2][1]  # delayed messages of long ago follow
    for body in (b"first", b"second"):
        async with running_broker(store.parent, **SIZES) as broker:
            await broker.send("orders", 0, body)
            await until_async(partial(holds, broker, pending + 2))
    with Store(store, SHAPE) as read:
        assert [epoch.start for epoch in read.epochs][:2] == list(listing.log)
        theirs = as_rocketmq_read(listing)
        found: Units = {}
        for key in read.queues():
            found |= units_of(read.log, key) if key != STATE_QUEUE else {}
        ours = {place: found[place] for place in found.keys() - theirs.keys()}
        assert {place: found[place] for place in theirs} == theirs
        end = listing.bounds["orders", 0][1]
        places = [("orders", 0, end + n) for n in range(2)]
        places += [("orders", 2, pending + n) for n in range(2)]
        assert ours.keys() == set(places), "what was delayed comes once"
        bodies = [
            decode(*read.log.row.at(at), at).body for at in (ours[place][0] for place in places)
        ]
        assert bodies == [b"first", b"second", b"delayed", b"delayed"]
        assert read.state is not None
        assert read.state.topics.keys() == {
            "RMQ_SYS_TRANS_HALF_TOPIC",
            "RMQ_SYS_TRANS_OP_HALF_TOPIC",
            "SCHEDULE_TOPIC_XXXX",
            "TRANS_CHECK_MAX_TIME_TOPIC",  # where halves and delayed messages move to
            "rmq_sys_wheel_timer",
            "orders",
            "many",
            "packed",
            "wide",
        }
        assert {key: kept.offset for key, kept in read.state.offsets.items()} == {
            ("billing", "orders", 0): 7,
            ("billing", "orders", 1): 2,
        }


async def test_a_folder_that_was_taken_over_when_its_old_files_go(
    listing: Listing, store: Path
) -> None:
    options = SIZES | {
        "file_reserved_time": 72,
        "delete_when": tuple(map(str, range(24))),
        "clean_resource_interval": 20,
        "delete_commit_log_files_interval": 0,
    }
    async with running_broker(store.parent, **options) as broker:
        await broker.send("orders", 0, b"first")
        await until_async(partial(has_lost, store / "commitlog", f"{listing.log[0]:020}"))
    with Store(store, SHAPE) as read:
        assert read.log.row.start > listing.log[0]
        assert [message.body for message in read.messages("orders", 0)][-1] == b"first"


async def has_lost(folder: Path, name: str) -> bool:
    return name not in os.listdir(folder)
