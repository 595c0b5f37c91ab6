"""The newest messages vanish from a log that no mark speaks of yet.

After the death of a process the units of the queues tell of them, and nothing goes in silence.
After a loss of power the log may end anywhere behind its mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged
from cometmq.format import queueunit
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.repair.verify import verify
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    SMALL,
    Deletions,
    FaultyFiles,
    append,
    bodies,
    open_store,
)

MESSAGES = 50
MARKED = 20
PADDING = bytes(900)
TOPIC = "orders"


def killed(root: Path, files: FaultyFiles | None = None) -> list[int]:
    """All is synced, nothing behind the first messages is marked; where records start and end."""
    store = open_store(root, files=files)
    starts = []
    for number in range(MESSAGES):
        run = (TOPIC, number % 2, [b"%d " % number + PADDING])
        starts.append(append(store, run).log_offset)
        store.flush_log()
        if number == MARKED:
            store.flush_queues()
    starts.append(store.appended_offset)
    store.abandon()
    return starts


def numbers_of(store: MessageStore) -> list[int]:
    return sorted(int(body.split()[0]) for queue in (0, 1) for body in bodies(store, TOPIC, queue))


def log_file(root: Path, offset: int) -> Path:
    return root / "commitlog" / f"{offset - offset % LOG_FILE_BYTES:020d}"


def zeroed(root: Path, start: int, end: int) -> None:
    """Bytes of the log; nothing where a file ends before."""
    for at in range(start - start % LOG_FILE_BYTES, end, LOG_FILE_BYTES):
        content = bytearray(log_file(root, at).read_bytes())
        first, stop = max(start - at, 0), min(end - at, LOG_FILE_BYTES)
        content[first:stop] = bytes(stop - first)
        log_file(root, at).write_bytes(content)


def zeroed_tail(count: int) -> Callable[[Path, list[int]], int]:
    def damage(root: Path, starts: list[int]) -> int:
        zeroed(root, starts[-1 - count], starts[-1])
        return MESSAGES - count

    return damage


def torn_last(root: Path, starts: list[int]) -> int:
    zeroed(root, starts[-1] - 100, starts[-1])
    return MESSAGES - 1


def deleted_last_file(root: Path, starts: list[int]) -> int:
    last = log_file(root, starts[-2])
    last.unlink()
    return sum(start < int(last.name) for start in starts[:-1])


TAILS = [zeroed_tail(1), zeroed_tail(10), zeroed_tail(25), torn_last, deleted_last_file]


def as_told(text: str) -> set[tuple[int, int]]:
    """(queue, queue offset) of each message that a text names."""
    found = re.findall(rf"messages? (\d+)(?: to (\d+))? of queue (\d) of {TOPIC}", text)
    return {
        (int(queue), offset)
        for first, last, queue in found
        for offset in range(int(first), int(last or first) + 1)
    }


@pytest.mark.parametrize("damage", TAILS)
def test_what_was_synced_does_not_vanish_with_a_process(
    tmp_path: Path, damage: Callable[[Path, list[int]], int]
) -> None:
    kept = damage(tmp_path, killed(tmp_path))
    lost = {(number % 2, number // 2) for number in range(kept, MESSAGES)}
    [fault] = [fault for fault in verify(tmp_path).faults if fault.area == "log"]
    assert as_told(fault.what) == lost
    with pytest.raises(StoreDamaged) as refused:
        repair(tmp_path, Accepted())
    assert as_told(str(refused.value)) == lost
    with pytest.raises(StoreDamaged, match=r"store repair /.* --accept-end") as at_start:
        open_store(tmp_path)
    assert as_told(str(at_start.value)) == lost
    option = re.search(r"--accept-end (\d+)", str(refused.value))
    assert option is not None
    repair(tmp_path, Accepted(end=int(option[1])))
    store = open_store(tmp_path)
    assert numbers_of(store) == list(range(kept))
    store.close()
    assert not verify(tmp_path).faults


@pytest.mark.parametrize("damage", TAILS)
def test_after_a_loss_of_power_a_log_may_end_anywhere_behind_its_mark(
    tmp_path: Path, damage: Callable[[Path, list[int]], int]
) -> None:
    kept = damage(tmp_path, killed(tmp_path, FaultyFiles(boot="boot-1")))
    assert not verify(tmp_path).faults
    store = open_store(tmp_path, files=FaultyFiles(boot="boot-2"))
    assert numbers_of(store) == list(range(kept))
    store.close()


def test_zeros_in_the_middle_cost_what_stood_there(tmp_path: Path) -> None:
    """Of what comes behind them the queues know as well."""
    starts = killed(tmp_path)
    zeroed(tmp_path, starts[-11], starts[-9] - 1)
    assert [fault.area for fault in verify(tmp_path).faults].count("log") == 1
    store = open_store(tmp_path)
    assert [loss[:4] for loss in store._opened.losses] == [(TOPIC, 0, 20, 1), (TOPIC, 1, 20, 1)]
    store.close()


def unit_path(root: Path, queue: int) -> Path:
    [path] = sorted((root / "consumequeue" / TOPIC / str(queue)).iterdir())[-1:]
    return path


@pytest.mark.parametrize("where", [0, 3])
def test_a_damaged_unit_is_no_witness(tmp_path: Path, where: int) -> None:
    """Each record is there: that a unit points behind them is its own fault."""
    killed(tmp_path)
    path = unit_path(tmp_path, 0)
    content = bytearray(path.read_bytes())
    count = len(content.rstrip(b"\0")) // queueunit.UNIT_BYTES
    content[count * queueunit.UNIT_BYTES + where] ^= 1  # of the last unit's log offset
    path.write_bytes(content)
    store = open_store(tmp_path)
    assert numbers_of(store) == list(range(MESSAGES))
    store.close()


def test_what_was_in_private_memory_has_units_without_records(tmp_path: Path) -> None:
    options = replace(SMALL, transient_bytes_max=LOG_FILE_BYTES)
    store = open_store(tmp_path, options)
    append(store, (TOPIC, 0, [b"0 "]))
    store.flush_log()
    append(store, (TOPIC, 0, [b"1 "]))
    store.abandon()
    assert not verify(tmp_path).faults
    store = open_store(tmp_path, options)
    assert numbers_of(store) == [0]
    store.close()


def test_a_disk_that_refused_may_have_kept_units_without_records(tmp_path: Path) -> None:
    starts = killed(tmp_path)
    (tmp_path / "abort").write_text("failed 4711")
    zeroed(tmp_path, starts[-2], starts[-1])
    store = open_store(tmp_path)
    assert numbers_of(store) == list(range(MESSAGES - 1))
    store.close()


def test_a_topic_that_was_deleted_has_lost_nothing(tmp_path: Path) -> None:
    """Killed between the deletion's record and that of its folder, and with a successor."""
    store = open_store(tmp_path)
    append(store, (TOPIC, 0, [b"%d " % number for number in range(9)]))
    append(store, ("S", 0, [TOPIC.encode()]))
    store.abandon()
    store = open_store(tmp_path, observer=Deletions())
    assert numbers_of(store) == []
    append(store, (TOPIC, 0, [b"9 "]))
    store.abandon()
    store = open_store(tmp_path, observer=Deletions())
    assert numbers_of(store) == [9]
    store.close()
