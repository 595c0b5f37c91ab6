from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed
from cometmq.member.storage import index_thread
from cometmq.member.storage.index_thread import IndexThread
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import FaultyFiles, append_keyed, open_store
from tests.support.waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = open_store(tmp_path)
    yield store
    store.abandon()


async def test_the_index_follows_what_is_on_the_disk(store: MessageStore) -> None:
    thread = IndexThread(store)
    running = asyncio.create_task(thread.run())
    for _ in range(5):
        end = append_keyed(store, "T", 0, "k", "j k").end_offset
        store.flush_log()
        await until(lambda: store.index.status.position == store.appended_offset)
        assert store.index.status.position == end
    assert store.index.status.entry_count == 15
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    thread.close()


async def test_a_disk_that_fails_ends_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append_keyed(store, "T", 0, "k")
    store.flush_log()

    def refused(path: object) -> None:
        raise StoreFailed(f"cannot sync {path}")

    files.sync_directory = refused  # type: ignore[method-assign]
    thread = IndexThread(store)
    with pytest.raises(StoreFailed, match="sync"):
        await thread.run()
    thread.close()
    store.abandon()


class Rests(threading.Event):
    """Notes how long was rested."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.lengths_s.append(timeout)
        return self.is_set()


@pytest.mark.parametrize("sending", [False, True])
def test_it_rests_while_somebody_sends(
    store: MessageStore, sending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_thread, "REST_S_PER_KEY", 0.001)
    thread = IndexThread(store)
    thread._closing = rests = Rests()
    append_keyed(store, "T", 0, "k j", "k i")
    store.flush_log()
    index_some = store.index_some

    def step() -> bool:
        done = index_some()
        if sending:
            append_keyed(store, "T", 0, "k")
        return done

    monkeypatch.setattr(store, "index_some", step)
    assert thread._step()
    assert rests.lengths_s == ([0.004] if sending else [])
    thread.close()


def test_closing_waits_for_one_step_only(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = IndexThread(store)
    steps = []

    def step() -> bool:
        steps.append("one")
        thread._closing.set()
        return True

    monkeypatch.setattr(store, "index_some", step)
    assert not thread._some_steps()
    assert steps == ["one"]
    thread.close()
