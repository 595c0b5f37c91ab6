"""What the job does while workers work; the workers are made up."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from examples.roundtrip import traffic as traffic_module
from examples.roundtrip.consuming import GO_ON, HOLD
from examples.roundtrip.sources import SourceFile
from examples.roundtrip.spool import Arrival, pack
from examples.roundtrip.stage import Folder
from examples.roundtrip.traffic import Traffic

LINES = 4


class FakeWorker(SimpleNamespace):
    """A process that does as it is told."""

    def __init__(self) -> None:
        super().__init__(said={}, running=True, signals=[])

    def check(self) -> None: ...

    def signal(self, number: int) -> None:
        self.signals.append(number)

    async def stop(self) -> None:
        self.running = False


@pytest.fixture
def traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(traffic_module, "POLL_S", 0)
    files = [SourceFile("a.py", LINES, 8)]
    console = Console(file=io.StringIO())
    made = Traffic("127.0.0.1:1", "t", "g", files, Folder(tmp_path), console)
    workers: Any = [FakeWorker(), FakeWorker()]
    made._producers, made._consumers = workers[:1], workers[1:]
    return made


def arrive(folder: Path, *numbers: int) -> None:
    with (folder / "consumer-0.spool").open("ab") as spool:
        for number in numbers:
            spool.write(pack(Arrival("a.py", number, b"x\n", 2, 1, 1, "g1", 0, number)))


async def test_what_came_back_was_stored(traffic: Traffic, tmp_path: Path) -> None:
    """Producers tell of acknowledgements now and then, and less than what is here already."""
    traffic._producers[0].said["acked"] = 1
    arrive(tmp_path, 1, 2, 3)
    await traffic.until(lambda: traffic.placer.placed == 3)
    assert traffic.stored == 3
    assert traffic.share_stored == 0.75
    traffic._producers[0].said["acked"] = 4
    assert traffic.stored == 4


async def test_work_beside_is_done_while_lines_are_placed(traffic: Traffic, tmp_path: Path) -> None:
    async def work() -> str:
        arrive(tmp_path, 1)
        while not traffic.placer.placed:  # noqa: ASYNC110  that is the point
            await asyncio.sleep(0)
        return "done"

    assert await traffic.beside(work()) == "done"


async def test_the_error_of_work_beside_is_raised(traffic: Traffic) -> None:
    async def work() -> None:
        raise FileExistsError("no")

    with pytest.raises(FileExistsError):
        await traffic.beside(work())


async def test_a_standstill_is_told_with_what_is_missing(
    traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_module, "STALL_S_MAX", 0)
    arrive(tmp_path, 1)
    with pytest.raises(TimeoutError, match="1 of 4 came back; lines of 1 files are missing"):
        await traffic.finish()


async def test_nothing_is_stalled_when_everything_is_done(
    traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(tmp_path, 1, 2, 3, 4)
    monkeypatch.setattr(traffic._producers[0], "running", False)
    await traffic.finish()
    monkeypatch.setattr(traffic_module, "STALL_S_MAX", 0)
    looks = iter(range(10))
    await traffic.until(lambda: next(looks) == 9)


async def test_consumers_are_held_back_for_a_while(traffic: Traffic, tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    traffic.hold()
    arrive(tmp_path, 2)
    await traffic.until(lambda: traffic.placer.placed == 2)
    traffic.go_on()
    consumer: Any = traffic._consumers[0]
    assert consumer.signals == [HOLD, GO_ON]
    assert traffic.tally.latency_ms(1.0) == 0  # what waited on purpose is not late
    assert traffic.consume_seconds <= traffic.tally.seconds
