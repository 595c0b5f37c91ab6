"""Files of queues that were exchanged while the store was closed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.format import queueunit, record
from cometmq.store.queues.agreement import Verdict, compare
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import append, open_store

COUNT = 40


def grown(root: Path, *, clean: bool = True, same_size: bool = True) -> None:
    store = open_store(root)
    for number in range(COUNT):
        bodies = [b"%03d" % number + bytes(0 if same_size else 10 * place) for place in range(3)]
        append(
            store,
            ("alpha", 0, [bodies[0]]),
            ("alpha", 1, [bodies[1]]),
            ("betas", 0, [bodies[2]]),
        )
    if clean:
        return store.close()
    store.flush_log()
    store.flush_queues()
    store.abandon()


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap_topics(root: Path) -> None:
    exchange(root / "consumequeue/alpha/0", root / "consumequeue/betas/0")


def swap_queues(root: Path) -> None:
    exchange(root / "consumequeue/alpha/0", root / "consumequeue/alpha/1")


def swap_folders(root: Path) -> None:
    exchange(root / "consumequeue/alpha", root / "consumequeue/betas")


def files_of(root: Path, queue: str) -> list[Path]:
    return sorted((root / "consumequeue" / queue).iterdir())


def swap_middle_files(root: Path) -> None:
    exchange(files_of(root, "alpha/0")[1], files_of(root, "betas/0")[1])


def swap_own_files(root: Path) -> None:
    exchange(files_of(root, "alpha/0")[0], files_of(root, "alpha/0")[1])


def copy_over(root: Path) -> None:
    shutil.copyfile(files_of(root, "alpha/0")[-1], files_of(root, "betas/0")[-1])


EXCHANGES = [swap_topics, swap_queues, swap_folders, swap_middle_files, swap_own_files, copy_over]


def check(store: MessageStore) -> None:
    for topic, queue_id in (("alpha", 0), ("alpha", 1), ("betas", 0)):
        assert store.queue_bounds(topic, queue_id) == (0, COUNT)
        for offset in range(COUNT):
            unit = store.read_units(topic, queue_id, offset, 1)
            place, size, _ = queueunit.unit_at(unit, 0)
            raw = store.read_messages((topic, queue_id), offset, unit, [(place, size)])
            assert record.decode(raw).body.startswith(b"%03d" % offset)


@pytest.mark.parametrize("same_size", [True, False], ids=["records alike", "of other sizes"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("act", EXCHANGES, ids=lambda act: act.__name__)
def test_the_queues_are_built_again(
    tmp_path: Path,
    act: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    *,
    clean: bool,
    same_size: bool,
) -> None:
    grown(tmp_path, clean=clean, same_size=same_size)
    act(tmp_path)
    store = open_store(tmp_path)
    assert "all queues are rebuilt from the log" in caplog.text
    check(store)
    store.close()
    caplog.clear()
    again = open_store(tmp_path)
    assert "rebuilt" not in caplog.text
    check(again)
    again.close()


def test_a_damaged_record_is_no_reason_to_build_queues_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown(tmp_path)
    log = sorted((tmp_path / "commitlog").iterdir())[0]
    content = bytearray(log.read_bytes())
    content[0:4] = b"\xff" * 4  # the first record's size: the first unit of a queue names it
    log.write_bytes(content)
    store = open_store(tmp_path)
    assert "rebuilt" not in caplog.text
    queue = store._dispatcher.find("alpha", 0)
    assert queue is not None
    assert compare(queue, store._log.segments, 0) is Verdict.NOTHING
    assert compare(queue, store._log.segments, 1) is Verdict.MESSAGE
    store.close()
