"""Reading the end of a log that damage has come to."""

from __future__ import annotations

import os
from pathlib import Path

from cometmq.format.relay import walk
from tests.support.stores.small_stores import append, open_store


def test_damaged_places_are_passed_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    starts = [append(store, ("A", 0, [b"%d" % n * 700])).log_offset for n in range(40)]
    store.flush_log()
    files = sorted((tmp_path / "commitlog").iterdir())
    assert len(files) > 1
    file_bytes = files[0].stat().st_size

    def found(bytes_max: int, start: int) -> list[int]:
        return [
            offset + at
            for offset, data in store.good_records(bytes_max, start)
            for at, _, _ in walk(data)
        ]

    assert found(1 << 30, starts[3]) == starts[3:]
    far = store.appended_offset - 5_000
    assert found(5_000, 0) == [start for start in starts if start >= far]
    for damaged in (starts[5], starts[-2]):
        with open(files[damaged // file_bytes], "r+b") as file:
            file.seek(damaged % file_bytes)
            file.write(os.urandom(30))
    left = [start for start in starts if start not in (starts[5], starts[-2])]
    assert found(1 << 30, 0) == left
    os.truncate(files[0], file_bytes - 6_000)
    rest = found(1 << 30, 0)
    assert set(rest) <= set(left)
    assert [start for start in rest if start >= file_bytes] == [
        start for start in left if start >= file_bytes
    ]
    store.abandon()
