"""Log files that held the state are missing: what is told is obeyed with the real command until the
store is open. Then all messages are there but those that were told, topics and groups are back, and
a position of before names no other message.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cometmq.admin.store_cli import store_group
from cometmq.errors import PositionFenced, StoreDamaged, StoreForeignFile
from cometmq.format import queueunit, record
from cometmq.format.batch import BatchLimits
from cometmq.member.state.opening import Opened, open_copy, open_writer
from cometmq.model import FlushMode, Position
from cometmq.store.layout import offset_name
from tests.faults.test_refused_starts import FILE_BYTES, MESSAGES, config_of, grown, log_files
from tests.support.stores.refusals import fingerprint
from tests.support.stores.small_stores import HOST, WallClock

STEPS_MAX = 6
OPTION = re.compile(r"--(write-off) (\d+-\d+)|--(accept-end) (\d+)|--(rebuild-tables)")
Told = set[tuple[int, int]]  # queue and offset of messages of the topic orders


def started(root: Path) -> Opened:
    return open_writer(config_of(root), BatchLimits(), HOST, WallClock())


def obeyed(root: Path) -> tuple[Opened, Told]:
    """The store, open at last, and the messages that repairs have told as lost."""
    told: Told = set()
    for _ in range(STEPS_MAX):
        before = fingerprint(root)
        try:
            return started(root), told
        except (StoreDamaged, StoreForeignFile) as error:
            said = str(error)
        assert fingerprint(root) == before
        assert "cometmq store repair" in said
        _repaired(root, said, told)
    raise AssertionError("not open")


def _repaired(root: Path, said: str, told: Told) -> None:
    for _ in range(STEPS_MAX):
        options = {f"--{' '.join(filter(None, found))}" for found in OPTION.findall(said)}
        words = [word for option in sorted(options) for word in option.split()]
        done = CliRunner().invoke(store_group, ["repair", str(root), "--output", "json", *words])
        said = done.output
        if not done.exit_code:
            for loss in json.loads(done.stdout)["losses"]:
                if loss["topic"] == "orders":
                    first, count = loss["first_queue_offset"], loss["message_count"]
                    told |= {(loss["queue_id"], first + number) for number in range(count)}
            return
    raise AssertionError(said)


def left_in(opened: Opened) -> dict[tuple[int, int], bytes]:
    """The messages that can be read, by queue and offset."""
    found: dict[tuple[int, int], bytes] = {}
    for queue in range(3):
        low, high = opened.store.queue_bounds("orders", queue)
        for offset in range(low, high):
            unit = opened.store.read_units("orders", queue, offset, 1)
            position, size, _ = queueunit.unit_at(unit, 0)
            if size != queueunit.LOST_SIZE:
                data = opened.store.read_records([(position, size)])
                found[queue, offset] = record.decode(data).body[:6]
    return found


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "missing", [[0], [2], [4], [0, 2], [0, 1, 2, 3, 4]], ids=lambda found: "-".join(map(str, found))
)
async def test_what_is_left_is_there_and_what_is_lost_was_told(
    tmp_path: Path, missing: list[int], *, clean: bool
) -> None:
    root = tmp_path / "store"
    await grown(root, clean=clean)
    for path in log_files(root):
        if int(path.name) // FILE_BYTES in missing:
            path.unlink()
    opened, told = obeyed(root)
    try:
        left = left_in(opened)
        stored = {(n % 3, n // 3): b"%06d" % n for n in range(MESSAGES)}
        assert left.items() <= stored.items()
        assert stored.keys() - left.keys() <= told
        orders = opened.state.topics.get("orders")
        assert orders.read_queue_count == 3
        assert opened.state.generations.of("orders", 0).current > 1
        assert opened.store.state_lost is None
    finally:
        opened.store.close()
    again = started(root)
    assert left_in(again) == left
    again.store.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
async def test_with_the_first_file_of_another_log_nothing_goes_in_silence(
    tmp_path: Path, *, clean: bool
) -> None:
    root, other = tmp_path / "store", tmp_path / "other"
    await grown(root, clean=clean)
    await grown(other, clean=True, topic="audit")
    shutil.copyfile(log_files(other)[0], log_files(root)[0])
    opened, told = obeyed(root)
    left = left_in(opened)
    stored = {(n % 3, n // 3): b"%06d" % n for n in range(MESSAGES)}
    assert left.items() <= stored.items()
    assert stored.keys() - left.keys() == told
    opened.store.close()


async def test_a_log_without_a_state_is_refused_where_one_was(tmp_path: Path) -> None:
    root = tmp_path / "store"
    await grown(root, clean=False)
    for path in log_files(root):
        path.write_bytes(bytes(path.stat().st_size))
    shutil.rmtree(root / "consumequeue")
    (root / "checkpoint").unlink()
    with pytest.raises(StoreDamaged, match="lost its snapshots of the state"):
        started(root)
    opened, _ = obeyed(root)
    opened.store.close()


async def test_exports_tell_what_the_log_does_not(tmp_path: Path) -> None:
    root = tmp_path / "store"
    await grown(root, clean=True)
    opened = started(root)
    opened.store.close()
    (root / "config").mkdir(exist_ok=True)
    mark = {"epoch": 1, "position": 5}
    tables = {
        "topics": {"topicConfigTable": {"orders": {"readQueueNums": 8, "writeQueueNums": 8}}},
        "subscriptionGroup": {"subscriptionGroupTable": {"g": {"retryMaxTimes": 5}}},
        "consumerOffset": {"offsetTable": {"orders@g": {"1": 7}}},
    }
    for name, table in tables.items():
        (root / "config" / f"{name}.json").write_text(json.dumps({**table, "cometmq": mark}))
    for path in log_files(root):
        if path.name in (offset_name(0), offset_name(4 * FILE_BYTES)):
            path.unlink()
    opened, _ = obeyed(root)
    state = opened.state
    orders = state.topics.get("orders")
    assert (orders.read_queue_count, orders.write_queue_count) == (8, 8)
    assert orders.flush_mode is FlushMode.SYNC, "as a new topic"
    assert state.groups["g"].retry_times_max == 5
    offsets = {queue: found.offset for queue, found in state.offsets.of_group("g").items()}
    assert offsets == {("orders", 0): 3, ("orders", 1): 7}, "the log's and the export's"
    for offset in (1, 12, 19):
        with pytest.raises(PositionFenced):
            state.generations.of("orders", 0).validate(Position(1, offset))
    opened.store.close()


async def test_a_follower_keeps_what_it_has(tmp_path: Path) -> None:
    """Nobody else may have it: it is not copied anew unasked."""
    root = tmp_path / "store"
    await grown(root, clean=True)
    shutil.copytree(root, tmp_path / "other")
    log_files(root)[2].unlink()
    with pytest.raises(StoreForeignFile):
        open_copy(config_of(root), WallClock())
    opened, _ = obeyed(root)
    end = opened.store.appended_offset
    opened.store.close()
    copy = open_copy(config_of(root), WallClock())
    assert copy.store.appended_offset == end
    copy.store.close()
