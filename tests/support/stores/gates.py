"""Gates in front of what the store does in threads, so that a test decides when it happens."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cometmq.store.writer import MessageStore


class HeldFlush:
    """Lets ``MessageStore.flush_log`` through, or holds it until :meth:`release`.

    Made before the stores that it holds: a thread that syncs by itself already is not seen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not any(thread.name == "flush" for thread in threading.enumerate())
        self.waiting = 0  # syncs that are held now
        self._gate = threading.Event()
        self._gate.set()
        self._syncing = threading.Lock()
        really_flush = MessageStore.flush_log

        def flush_log(store: MessageStore) -> int:
            while True:
                with self._syncing:
                    if self._gate.is_set():
                        return really_flush(store)
                    self.waiting += 1
                assert self._gate.wait(30), "the test forgot to let the flush go"

        def not_by_itself(store: MessageStore, write_fd: int) -> bool:
            return False  # each sync is asked for, so that each can be held

        monkeypatch.setattr(MessageStore, "flush_log", flush_log)
        monkeypatch.setattr(MessageStore, "flush_log_while_wanted", not_by_itself)

    def hold(self) -> None:
        """What is appended from now on is not synced; a sync that runs is waited for."""
        with self._syncing:
            self._gate.clear()

    def release(self) -> None:
        self.waiting = 0
        self._gate.set()


class ColdDisk:
    """Lets reads through, or says to every read on the loop that the disk has to be asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0  # reads that were sent to a thread
        self.stuck = 0  # threads that wait in a read now
        self.before_cold_read: Callable[[], None] = lambda: None
        self._cold = False
        self._gate = threading.Event()
        self._gate.set()
        really_read = MessageStore.read_units

        def read_units(
            store: MessageStore, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool
        ) -> bytes:
            if self._cold and nowait:
                self.refused += 1
                raise BlockingIOError
            if not nowait:
                self.before_cold_read()
            if not nowait and not self._gate.is_set():
                self.stuck += 1
                assert self._gate.wait(30), "the test forgot to let the read go"
            return really_read(store, topic, queue_id, offset, count, nowait=nowait)

        monkeypatch.setattr(MessageStore, "read_units", read_units)

    def go_cold(self, *, stuck: bool = False) -> None:
        """``stuck``: reads in threads do not end before :meth:`release`."""
        self._cold = True
        if stuck:
            self._gate.clear()

    def release(self) -> None:
        self._gate.set()
