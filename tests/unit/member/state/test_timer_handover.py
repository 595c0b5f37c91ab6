"""Which timers a store hands over to RocketMQ 5, and when."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.format import record
from cometmq.format.timerlog import decode_check
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.state import timer_handover
from cometmq.member.state.timer_handover import TimerHandover
from cometmq.messaging.state import BrokerState
from cometmq.messaging.timers import TIME_MS_MAX, Timer, TimerMark
from cometmq.model import TopicConfig
from cometmq.replication.watermarks import DurabilityClass
from tests.support.cluster.broker import config_for
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, START_MS, WallClock
from tests.unit.member.state.test_timer_adoption import left

S = 1_000
DUES_S = [-60, 60, 90, 70, -5]
ALL = ["delivered", "waits", "recalled", "of a topic that is gone", "late"]


def handover(member: Member, folder: Path) -> TimerHandover:
    """Of five messages the first is delivered, and two others are not to be."""
    state = BrokerState()
    state.apply(state.plan_topic(TopicConfig("T")))
    mark = TimerMark(Timer(START_MS - S, TIME_MS_MAX), 4, 1)
    state.timers.restore(mark, [Timer(START_MS + 90 * S, 2)])
    state.timers.drop_older(TIMER_TOPIC, 4)
    queue = [
        left(name, due_s, REAL_TOPIC="gone" if "gone" in name else "T")
        for name, due_s in zip(ALL, DUES_S, strict=True)
    ]
    member.storage.append_relayed(queue, {TIMER_QUEUE[0]: DurabilityClass.ASYNC}, HOST)
    config = config_for(folder, mapped_file_size_timer_log=4_096)
    return TimerHandover(member.store, state, config, WallClock())


def listed(member: Member, folder: Path) -> dict[str, int]:
    """By the unique id of each message in the list: in how many s it is delivered."""
    [file] = (folder / "store" / "timerlog").iterdir()
    content = file.read_bytes()
    assert (file.name, len(content)) == ("0" * 20, 4_096)
    found = {}
    for place in range(0, 4_096 - 52, 52):
        size, _, magic, written, after, log_offset, its_size = struct.unpack_from(
            ">iqiqiqi", content, place
        )
        if size:
            assert magic == 1
            message = record.decode(member.store.read_records([(log_offset, its_size)]))
            found[message.unique_id] = (written + after - START_MS) // S
    return found


async def test_a_stop_lists_what_waits_and_a_start_takes_it_away(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with living_member(folder) as member:
        timers = handover(member, folder)
        root = folder / "store"
        timers.finish()
        assert listed(member, folder) == {"waits": 60, "late": -5}
        check = decode_check((root / "config" / "timercheck").read_bytes())
        assert check == (START_MS - 5 * S, 5, True)

        (root / "timerwheel").write_bytes(b"made by RocketMQ")
        (root / "timerwheel.12").write_bytes(b"a snapshot of it")
        timers.begin()
        assert not [path for path in root.iterdir() if path.name.startswith("timer")]
        check = decode_check((root / "config" / "timercheck").read_bytes())
        assert check == (START_MS - S, 1, True), "from the oldest that may wait on"
        await member.on_disk()


@pytest.mark.parametrize("limit", [3, 4])
async def test_too_many_are_not_listed(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_handover, "LISTED_MAX", limit)
    folder = tmp_path / "store"
    async with living_member(folder) as member:
        handover(member, folder).finish()
        assert (folder / "store" / "timerlog").exists() == (limit == 4)
        await member.on_disk()


async def test_nothing_is_written_without_timers(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with living_member(folder) as member:
        timers = TimerHandover(member.store, BrokerState(), config_for(folder), WallClock())
        timers.begin()
        timers.finish()
        assert timers.check() == {}
        assert not list((folder / "store").glob("**/timer*"))
        await member.on_disk()


async def test_an_end_at_any_call_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either RocketMQ reads the queue from the oldest that waits on, or the list is whole."""
    folder = tmp_path / "store"
    async with living_member(folder) as member:
        timers = handover(member, folder)
        config = folder / "store" / "config"
        config.mkdir(exist_ok=True)
        (config / "timercheck").write_bytes(timers.check()["timercheck"])
        for work in (timers.finish, timers.begin):
            calls = 0
            while not _ends_before_call(calls, work, monkeypatch):
                check = decode_check((config / "timercheck").read_bytes())
                assert check is not None
                assert check.offset == 1 or set(listed(member, folder)) == {"waits", "late"}
                calls += 1
            assert calls >= 4
        await member.on_disk()


def _ends_before_call(
    number: int, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the work comes to its end, which the call of this number to the system prevents."""
    left_calls = number

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **names: object) -> object:
            nonlocal left_calls
            left_calls -= 1
            if left_calls < 0:
                raise OSError("the process is gone")
            return real(*arguments, **names)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "link", "replace", "unlink"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr(shutil, "rmtree", failing(shutil.rmtree))
        try:
            work()
        except OSError:
            return False
    return True
