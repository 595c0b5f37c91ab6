"""Folders that Apache RocketMQ 4.9.8 and 5.5.1 wrote, stopped in order and killed: they must open
for ever, and read as RocketMQ itself read them.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import ConfigInvalid
from cometmq.format import delayed, record
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.state.opening import Opened, open_copy, open_writer
from cometmq.model import FlushMode, Position
from cometmq.store.repair.verify import verify
from tests.compat.golden import GOLDEN, LISTING, LOG_FILE_BYTES, STORES
from tests.compat.listing import INDEX, QUEUE_FILE_BYTES, assert_same, content_of
from tests.compat.rocketmq import Listing

HOST = record.host_bytes("127.0.0.1", 10911)
pytestmark = pytest.mark.parametrize("name", STORES)


@pytest.fixture
def config(name: str, tmp_path: Path) -> MemberConfig:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return MemberConfig(
        store_path=tmp_path / "store",
        mapped_file_size_commit_log=LOG_FILE_BYTES,
        mapped_file_size_consume_queue=QUEUE_FILE_BYTES,
        max_hash_slot_num=INDEX.hash_slots,
        max_index_num=INDEX.entries,
    )


@pytest.fixture
def listing(config: MemberConfig, tmp_path: Path) -> Listing:
    return Listing(json.loads((tmp_path / LISTING).read_text()))


def open_it(config: MemberConfig) -> Opened:
    return open_writer(config, BatchLimits(), HOST, SystemClock())


def test_every_message_reads_as_rocketmq_read_it(
    config: MemberConfig, listing: Listing, name: str
) -> None:
    opened = open_it(config)
    try:
        ours = content_of(opened.store)
        mine = ours.units.pop(("rmq_sys_cometmq_state", 0))
        del ours.bounds["rmq_sys_cometmq_state", 0]
        assert len(mine) == 1, "the epoch's state snapshot"
        assert assert_same(listing, ours, whole_index=name.endswith("stopped")) > 60
    finally:
        opened.store.close()


def test_verification_finds_no_fault(config: MemberConfig, name: str) -> None:
    report = verify(config.store_path, index_sizes=INDEX)
    assert report.faults == []
    assert not (config.store_path / "cometmq.json").exists(), "and changes nothing"


def test_its_tables_become_ours(config: MemberConfig, listing: Listing, name: str) -> None:
    opened = open_it(config)
    state = opened.state
    known = {config.name: config for config in state.topics}
    transactions = {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"}
    users = {"SCHEDULE_TOPIC_XXXX", "orders", "many", "packed", "wide"}
    moved_to = {"rmq_sys_wheel_timer", "TRANS_CHECK_MAX_TIME_TOPIC"}  # when a log file goes
    assert known.keys() == users | transactions | moved_to
    assert len(state.halves) == 0
    assert state.halves.floors == (1, 1), "its only half message has ended"
    assert (known["many"].read_queue_count, known["many"].permission) == (20, 4)
    assert known["orders"].flush_mode is FlushMode.ASYNC
    assert state.groups["billing"].retry_times_max == 5
    generation = state.generations.of("orders", 0).current
    assert state.offsets.of_group("billing") == {
        ("orders", 0): Position(generation, 7),
        ("orders", 1): Position(generation, 2),
    }
    assert [start for _, start in opened.store.epochs] == [0, listing.log[1]]
    assert opened.store.adoption is None
    opened.store.close()
    again = open_it(config)
    assert again.store.clean_start, "it is ours now"
    assert again.state.generations.of("orders", 0).current == generation
    again.store.close()


def test_a_follower_leaves_the_tables_to_the_writer(config: MemberConfig, name: str) -> None:
    copy = open_copy(config, SystemClock())
    assert copy.store.adoption is not None
    assert len(list(copy.state.state.topics)) == 0
    copy.store.close()
    opened = open_it(config)
    assert "orders" in opened.state.topics
    opened.store.close()


def test_levels_in_which_its_messages_wait_have_to_be_there(
    config: MemberConfig, listing: Listing, name: str
) -> None:
    """And a refusal changes nothing that counts: the next start takes it over."""
    waiting = [
        delayed.level_of(queue_id)
        for (topic, queue_id), (low, high) in listing.bounds.items()
        if topic == delayed.SCHEDULE_TOPIC and low < high
    ]
    assert max(waiting) > 1
    try:
        delayed.use_levels((1,))
        with pytest.raises(ConfigInvalid, match=f"level {min(n for n in waiting if n > 1)}"):
            open_it(config)
    finally:
        delayed.use_levels(delayed.parse_levels(delayed.DEFAULT_LEVELS))
    opened = open_it(config)
    assert opened.state.groups["billing"].retry_times_max == 5
    opened.store.close()
