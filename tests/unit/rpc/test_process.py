"""The frame of a service's main: exit status, signals, the announce file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from cometmq.errors import ConfigInvalid, StoreLocked
from cometmq.flight_recorder import Stage, recorder
from cometmq.rpc import process, recorded_loop
from cometmq.rpc.process import STOP_SIGNALS, TRACE_SIGNAL, Main, StopSignal, announce, run, settle

SIGNALS = (*STOP_SIGNALS, TRACE_SIGNAL)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Puts the signal handlers back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_program_in_order(number: signal.Signals) -> None:
    async def main(stop: StopSignal) -> None:
        os.kill(os.getpid(), number)
        await stop.wait()

    assert run(main) == 0


def test_a_signal_before_the_loop_runs_is_not_lost() -> None:
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_set
    asyncio.run(asyncio.wait_for(stop.wait(), 5))


def test_a_signal_after_the_end_does_not_kill() -> None:
    async def main(stop: StopSignal) -> None:
        """Nothing to do."""

    assert run(main) == 0
    for number in SIGNALS:
        os.kill(os.getpid(), number)


def test_a_signal_for_the_recorder_before_the_loop_runs_keeps_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(recorder, "keep", kept.append)
    # What comes first after the handlers are in place: no loop is there yet.
    monkeypatch.setattr(process, "raise_limit", lambda: os.kill(os.getpid(), TRACE_SIGNAL))

    async def main(stop: StopSignal) -> None:
        """Nothing to do."""

    assert run(main) == 0
    assert kept == ["SIGUSR2"]


def test_each_part_has_a_loop_of_its_own_and_nothing_of_it_goes_on() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    ended: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def second(stop: StopSignal) -> None:
        assert ended == ["task", "thread"], "before the next part begins"
        loops.append(asyncio.get_running_loop())
        assert len(asyncio.all_tasks()) == 1

    async def first(stop: StopSignal) -> Main:
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.create_task(left_behind()))
        begun, go_on = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            go_on.wait()
            ended.append("thread")

        asyncio.get_running_loop().run_in_executor(None, work)
        begun.wait()
        tasks[0].add_done_callback(lambda _: go_on.set())
        return second

    tasks: list[asyncio.Task[None]] = []
    assert run(first) == 0
    assert loops[0] is not loops[1]
    assert loops[0].is_closed()


def test_a_thread_that_a_part_leaves_behind_ends_the_process() -> None:
    go_on = threading.Event()
    left = threading.Thread(target=go_on.wait, name="left behind")

    async def second(stop: StopSignal) -> None:
        raise AssertionError("it never runs")

    async def first(stop: StopSignal) -> Main:
        left.start()
        return second

    try:
        with pytest.raises(AssertionError, match="left behind"):
            run(first)
    finally:
        go_on.set()
        left.join()


def test_a_signal_in_one_part_stops_those_behind_it() -> None:
    async def second(stop: StopSignal) -> None:
        await stop.wait()

    async def first(stop: StopSignal) -> Main:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        return second

    assert run(first) == 0


def test_a_part_that_has_ended_is_freed_although_it_was_settled() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    freed: list[bool] = []

    async def second(stop: StopSignal) -> None:
        freed.append(found[0]() is None)

    async def first(stop: StopSignal) -> Main:
        found.append(weakref.ref(Cycle()))
        settle(0)
        return second

    found: list[weakref.ref[Cycle]] = []
    assert run(first) == 0
    assert freed == [True]


def test_an_error_of_the_catalogue_is_told_with_its_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main(stop: StopSignal) -> None:
        raise ConfigInvalid("option port: 'x'")

    assert run(main) == 1
    assert (
        capsys.readouterr().err == f"CONFIG_INVALID: option port: 'x'\n  {ConfigInvalid.advice}\n"
    )


def test_so_is_one_out_of_a_task_group(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: StopSignal) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [StoreLocked("in use")])])

    assert run(main) == 1
    assert capsys.readouterr().err.startswith("STORE_LOCKED: in use\n")


@pytest.mark.parametrize("error", [KeyError("x"), ExceptionGroup("tasks", [KeyError("x")])])
def test_any_other_error_keeps_its_traceback(error: Exception) -> None:
    async def main(stop: StopSignal) -> None:
        raise error

    with pytest.raises(type(error)):
        run(main)


def test_the_announce_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "announce.json"
    path.write_text("old")
    announce(path, address="127.0.0.1:1", metrics_address="127.0.0.1:2")

    assert json.loads(path.read_text()) == {
        "pid": os.getpid(),
        "address": "127.0.0.1:1",
        "metrics_address": "127.0.0.1:2",
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["announce.json"]


def test_without_a_path_nothing_is_announced() -> None:
    announce(None, address="127.0.0.1:1")


def test_a_long_turn_is_noted_and_a_signal_keeps_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[str] = []

    def keep(why: str) -> None:
        kept.append(why)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(recorder, "keep", keep)
    monkeypatch.setattr(recorded_loop, "NOTED_NS", 0)

    async def main(stop: StopSignal) -> None:
        read_fd, write_fd = os.pipe()
        woken = asyncio.Event()
        asyncio.get_running_loop().add_reader(read_fd, woken.set)
        os.write(write_fd, b"x")
        await woken.wait()
        asyncio.get_running_loop().remove_reader(read_fd)
        os.kill(os.getpid(), signal.SIGUSR2)
        await stop.wait()
        os.close(read_fd)
        os.close(write_fd)

    before = [one for one in recorder.entries() if one.stage is Stage.LOOP_TURN]
    assert run(main) == 0
    assert kept == ["SIGUSR2"]
    assert [one for one in recorder.entries() if one.stage is Stage.LOOP_TURN] > before
