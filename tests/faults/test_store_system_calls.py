"""Real files whose system calls do less than they were asked for, or fail."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed
from cometmq.store.disk.files import Buffer
from tests.support.stores.small_stores import append, bodies, open_store


def test_every_write_writes_a_part(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_write = os.pwrite

    def write_some(fd: int, data: Buffer, offset: int) -> int:
        return really_write(fd, memoryview(data)[: rng.randint(1, len(data))], offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    sent = [bytes([number]) * rng.randint(0, 2000) for number in range(60)]
    store = open_store(tmp_path)
    for body in sent:
        append(store, ("A", 0, [body]))
    store.abandon()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0) == sent
    store.close()
    store = open_store(tmp_path)
    assert store.clean_start
    assert bodies(store, "A", 0) == sent
    store.close()


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_after_eio_no_call_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"kept"]))
    store.flush_log()
    calls: list[str] = []

    def failing(name: str) -> Callable[..., int]:
        def fail(*_: object) -> int:
            calls.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return fail

    def append_and_flush() -> None:
        append(store, ("A", 0, [b"lost"]))
        store.flush_log()

    monkeypatch.setattr(os, call, failing(call))
    with pytest.raises(StoreFailed, match="Input/output error"):
        append_and_flush()
    monkeypatch.setattr(os, "pwrite", failing("pwrite"))
    monkeypatch.setattr(os, "fdatasync", failing("fdatasync"))
    before = len(calls)
    for again in (append_and_flush, store.flush_log, store.flush_queues, store.prepare_next_file):
        with pytest.raises(StoreFailed, match="Input/output error"):
            again()
    with pytest.raises(StoreFailed):
        store.close()
    assert len(calls) == before
    monkeypatch.undo()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0)[0] == b"kept"
    store.close()
