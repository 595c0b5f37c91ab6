"""The offset file of a broadcasting consumer, also when it is cut, flipped, or not written."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from cometmq.client.reading import offset_file
from cometmq.client.reading.offset_file import OffsetFile
from cometmq.errors import ConfigInvalid
from cometmq.model import Position, QueueRef

ORDERS, BILLS = QueueRef("orders", 1, "g1"), QueueRef("bills", 0, "g2")


def opened(path: Path, group: str = "G") -> OffsetFile:
    file = OffsetFile(str(path), group)
    file.read()
    return file


async def there(path: Path, queue: QueueRef) -> Position | None:
    return (await opened(path).load([queue])).get(queue)


async def test_offsets_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "offsets.json"
    await opened(path).store({ORDERS: Position(3, 7)})
    await opened(path).store({BILLS: Position(1, 2)})
    both = await opened(path).load([BILLS, ORDERS])
    assert both == {ORDERS: Position(3, 7), BILLS: Position(1, 2)}
    with pytest.raises(ConfigInvalid, match="of group 'G', not of 'H'"):
        opened(path, "H")


async def test_each_cut_and_each_flipped_byte_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "offsets.json"
    await opened(path).store({ORDERS: Position(3, 7)})
    good = path.read_bytes()
    damaged = [good[:length] for length in range(len(good) - 1)]
    damaged += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good) - 1)]
    for data in damaged:
        caplog.clear()
        path.write_bytes(data)
        assert await there(path, ORDERS) is None, data
        assert "offset file is damaged" in caplog.text
        assert path.with_name("offsets.json.damaged").read_bytes() == data
        assert not path.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"[" * 100_000,
        b'{"version":1}',
        b'{"version":2,"crc32":0,"body":{}}',
        b'{"version":1,"crc32":' + b"9" * 10_000 + b',"body":{}}',
        b"[1,2]",
        b"\xff\xfe",
    ],
    ids=lambda data: repr(data[:24]),
)
async def test_a_file_of_something_else_is_put_aside(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "offsets.json"
    path.write_bytes(data)
    file = opened(path)
    assert not await file.load([ORDERS])
    await file.store({ORDERS: Position(1, 2)})
    assert await there(path, ORDERS) == Position(1, 2)
    assert path.with_name("offsets.json.damaged").stat().st_size == len(data)


async def test_a_file_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    assert await there(path, ORDERS) is None
    assert path.with_name("offsets.json.damaged").exists()


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="offset_file"):
        opened(tmp_path)


async def test_a_folder_that_takes_no_file_is_told_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """/proc takes none, from no user."""
    file = opened(Path("/proc/offsets.json"))
    for offset in (1, 2):
        await file.store({ORDERS: Position(1, offset)})
        assert await file.load([ORDERS]) == {ORDERS: Position(1, offset)}
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1


async def test_a_damaged_file_that_cannot_be_put_aside_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "offsets.json"
    path.write_bytes(b"{")

    def read_only(source: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", read_only)
    assert await there(path, ORDERS) is None
    assert "offset file is damaged" in caplog.text
    assert path.exists()


async def test_a_file_that_cannot_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "offsets.json"
    file = opened(path)
    await file.store({ORDERS: Position(3, 7)})

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(offset_file, "_replace", full)
        for offset in (8, 9):
            await file.store({ORDERS: Position(3, offset)})
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == 1
    assert await there(path, ORDERS) == Position(3, 7)
    await file.store({BILLS: Position(1, 1)})
    assert await there(path, ORDERS) == Position(3, 9)


async def test_a_write_that_was_cancelled_does_not_meet_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer that closes cancels the loop that commits; its thread goes on."""
    path, replace = tmp_path / "offsets.json", offset_file._replace
    running, go_on = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        if not running.is_set():
            running.set()
            go_on.wait(10)
        replace(path, data)

    monkeypatch.setattr(offset_file, "_replace", slow)
    file = opened(path)
    first = asyncio.create_task(file.store({ORDERS: Position(1, 1)}))
    await asyncio.to_thread(running.wait)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(file.store({ORDERS: Position(1, 2)}))
    await asyncio.sleep(0.1)
    go_on.set()
    await second
    await asyncio.to_thread(file._writing.acquire)  # no thread writes any more
    assert await there(path, ORDERS) == Position(1, 2)
    assert not caplog.records
