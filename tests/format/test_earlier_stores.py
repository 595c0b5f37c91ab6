"""Folders that an earlier release of CometMQ wrote open, and nothing in them is lost: closed in
order, killed, a follower's, adopted from RocketMQ 5.5.1.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cometmq.clock import SystemClock
from cometmq.format import queueunit, record
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.state.opening import open_writer
from cometmq.store.base import BaseStore
from tests.compat.golden import GOLDEN
from tests.support.cluster.broker import SMALL_FILES

HOST = record.host_bytes("127.0.0.1", 10911)


def bodies(store: BaseStore, topic: str, queue_id: int) -> list[str]:
    low, high = store.queue_bounds(topic, queue_id)
    units = (store.read_units(topic, queue_id, offset, 1) for offset in range(low, high))
    places = (queueunit.unit_at(unit, 0)[0] for unit in units)
    found = (record.decode(store.read_record(place)) for place in places)
    return [one.body.decode("latin-1") for one in found]


@pytest.mark.parametrize("kind", ["clean", "crashed", "follower", "adopted"])
def test_a_store_of_an_earlier_release_opens_with_all_that_it_had(
    tmp_path: Path, kind: str
) -> None:
    with tarfile.open(GOLDEN / f"cometmq-0.1-{kind}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected: dict[str, Any] = json.loads((tmp_path / "expected.json").read_text())
    sizes = {
        "mapped_file_size_commit_log": "log_file_bytes",
        "mapped_file_size_consume_queue": "queue_file_bytes",
        "max_hash_slot_num": "hash_slots",
        "max_index_num": "entries",
    }
    options = {name: expected.get(key, SMALL_FILES[name]) for name, key in sizes.items()}
    config = MemberConfig(store_path=tmp_path / "store", **options)
    for start in ("the first", "the next"):
        opened = open_writer(config, BatchLimits(), HOST, SystemClock())
        try:
            for queue, wanted in expected["bodies"].items():
                topic, _, queue_id = queue.rpartition("/")
                assert bodies(opened.store, topic, int(queue_id)) == wanted, (start, queue)
            for queue, kept in expected["offsets"].items():
                topic, _, queue_id = queue.rpartition("/")
                committed = opened.state.offsets.get("g", (topic, int(queue_id)))
                assert committed is not None
                assert [committed.generation, committed.offset] == kept
            opened.state.validate()
        finally:
            opened.store.close()
