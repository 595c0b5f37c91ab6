"""Files as messages, receipts that cannot be overlooked, and a pace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cometmq.client import SendReceipt
from cometmq.errors import SendTimeout
from cometmq.model import Message
from examples.roundtrip import producing
from examples.roundtrip.producing import Pace, Receipts, messages_of
from examples.roundtrip.sources import SourceFile

Receipt = asyncio.Future[SendReceipt]


def test_a_line_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_bytes(b"one\r\ntwo")
    assert list(messages_of("t", tmp_path, SourceFile("a%20b.py", 2, 8))) == [
        Message("t", b"one\r\n", "py", ("a%20b.py",), {"file": "a%20b.py", "line": "1"}),
        Message("t", b"two", "py", ("a%20b.py",), {"file": "a%20b.py", "line": "2"}),
    ]


def test_an_empty_file_is_line_zero(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (message,) = messages_of("t", tmp_path, SourceFile("empty", 0, 0))
    assert message == Message("t", b"", "", ("empty",), {"file": "empty", "line": "0"})


def test_a_file_that_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n")
    with pytest.raises(RuntimeError, match="a has changed"):
        list(messages_of("t", tmp_path, SourceFile("a", 2, 8)))


def futures(count: int) -> list[Receipt]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_only_acknowledged_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "UNCONFIRMED_MAX", 2)
    receipts, (first, second, third) = Receipts(), futures(3)
    for future in (first, second):
        await receipts.add(future)
    first.set_result(None)  # type: ignore[arg-type]  # nobody looks inside
    await receipts.add(third)  # above the limit: waits for the first
    assert receipts.acked == 1
    third.set_result(None)  # type: ignore[arg-type]
    await receipts.take_finished()
    assert receipts.acked == 1  # the second still stands before it
    second.set_result(None)  # type: ignore[arg-type]
    await receipts.take_all()
    assert receipts.acked == 3


async def test_a_lost_message_raises_and_the_rest_stays_quiet() -> None:
    receipts, (first, second) = Receipts(), futures(2)
    for future in (first, second):
        future.set_exception(SendTimeout("gone"))
        await receipts.add(future)
    with pytest.raises(SendTimeout):
        await receipts.take_all()
    receipts.give_up()


async def waits_of(pace: Pace, count: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long ``count`` messages wait, on a clock that only their waits move."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("examples.roundtrip.producing.asyncio.sleep", sleep)
    now_s = "examples.roundtrip.producing.time.monotonic"
    monkeypatch.setattr(now_s, lambda: pace._started_s + sum(waits))
    for _ in range(count):
        await pace.next()
    return waits


async def test_a_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = await waits_of(Pace(100), 50, monkeypatch)
    assert sum(waits) == pytest.approx(0.5)


async def test_without_a_pace_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await waits_of(Pace(0), 50, monkeypatch) == []
