from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import StoreDamaged, StoreFailed
from cometmq.format import record
from cometmq.format.batch import BatchLimits
from cometmq.member.config import FlushDiskType, MemberConfig
from cometmq.member.state.adoption import read
from cometmq.member.state.exports import Exporter
from cometmq.member.state.opening import Opened, open_writer
from cometmq.messaging.rocketmq_tables import OFFSETS, TOPICS, mark_of, parse
from cometmq.model import FlushMode, ReplicationMode
from tests.support.cluster.broker import config_for
from tests.support.stores.small_stores import append

HOST = record.host_bytes("127.0.0.1", 10911)
ORDERS = b'{"topicConfigTable":{"orders":{"readQueueNums":2,"writeQueueNums":2,"perm":6}}}'
COMMITS = b'{"offsetTable":{"orders@billing":{0:1}}}'


@pytest.fixture
def config(tmp_path: Path) -> MemberConfig:
    return config_for(tmp_path)


def open_it(config: MemberConfig) -> Opened:
    return open_writer(config, BatchLimits(), HOST, SystemClock())


def as_rocketmq(config: MemberConfig, *, forget_us: bool) -> None:
    """Messages and tables as if RocketMQ had written them."""
    opened = open_it(config)
    append(opened.store, ("orders", 0, [b"a", b"b"]), ("deleted", 0, [b"c"]))
    opened.store.close()
    folder = config.store_path / "config"
    folder.mkdir()
    (folder / TOPICS).write_bytes(ORDERS)
    (folder / OFFSETS).write_bytes(COMMITS)
    if forget_us:
        for name in ("cometmq.json", "cometmq.epochs"):
            (config.store_path / name).unlink()


def test_a_table_that_does_not_read_counts_as_its_backup() -> None:
    assert read({TOPICS: [b"{torn", ORDERS]}).topics == read({TOPICS: [ORDERS]}).topics
    with pytest.raises(StoreDamaged, match=r"topics\.json"):
        read({TOPICS: [b"{torn", b"{torn too"]})


def test_the_tables_are_in_the_log_and_the_files_before_anything_is_served(
    config: MemberConfig,
) -> None:
    as_rocketmq(config, forget_us=False)
    opened = open_it(config)
    assert {topic for topic, _ in opened.store.queues()} == {"orders", "rmq_sys_cometmq_state"}
    assert mark_of(parse((config.store_path / "config" / TOPICS).read_bytes()))
    opened.store.abandon()  # a crash right behind
    again = open_it(config)
    assert again.store.adoption is None
    assert again.state.topics.find("orders") == opened.state.topics.find("orders")
    assert list(again.state.offsets) == list(opened.state.offsets) != []
    again.store.abandon()


@pytest.mark.parametrize(
    ("options", "flush"),
    [
        ({}, FlushMode.ASYNC),
        ({"flush_disk_type": FlushDiskType.SYNC_FLUSH}, FlushMode.SYNC),
        ({"flush_disk_type": FlushDiskType.ASYNC_FLUSH}, FlushMode.ASYNC),
    ],
)
def test_topics_of_rocketmq_keep_what_it_gives(
    tmp_path: Path, options: dict[str, Any], flush: FlushMode
) -> None:
    """The flush mode of its broker, which is asynchronous unless an option names it; no copies."""
    config = config_for(tmp_path, lease="file:///lease", **options)
    as_rocketmq(config, forget_us=True)
    opened = open_it(config)
    orders = opened.state.topics.get("orders")
    assert (orders.flush_mode, orders.replication_mode) == (flush, ReplicationMode.ASYNC)
    opened.store.close()


def test_files_that_cannot_be_written_keep_the_store_shut(
    config: MemberConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rocketmq(config, forget_us=True)

    def full(self: Exporter, files: Mapping[str, bytes]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Exporter, "write", full)
        with pytest.raises(StoreFailed, match="No space"):
            open_it(config)
    opened = open_it(config)
    commits = [(commit.group, commit.position.offset) for commit in opened.state.offsets]
    assert commits == [("billing", 1)], "taken over once more"
    opened.store.close()


def test_generations_are_never_given_twice(config: MemberConfig) -> None:
    """The records that tell of them may have gone with log files that RocketMQ removed."""
    as_rocketmq(config, forget_us=False)
    before = open_it(config)
    given = before.state.generations.last
    files = config.mapped_file_size_commit_log
    while before.store.appended_offset < 2 * files:
        append(before.store, ("orders", 0, [bytes(20_000)] * 5))
    before.store.close()
    first, *_ = sorted((config.store_path / "commitlog").iterdir())
    first.unlink()
    (config.store_path / "config" / TOPICS).write_bytes(ORDERS)
    opened = open_it(config)
    assert opened.state.generations.of("orders", 0).current > given
    opened.store.close()
