"""Loops of services whose work changes nothing: each ends with an internal error, or waits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import MagicMock, Mock

import pytest

from cometmq.errors import InternalError
from cometmq.member.state.retention import Removed, Retention
from cometmq.messaging.retry import NO_WAIT
from cometmq.turns import TURNS_MAX
from cometmq.v1 import broker_pb2 as pb
from services.broker.delay.recalls import RecallService
from services.broker.delay.schedule import ScheduleService
from services.broker.delay.timers import TimerService
from services.broker.groups.coordinator import GroupCoordinator
from services.broker.pop import receive
from services.broker.pop.receive import ReceiveService
from services.broker.retry.retries import RetryService
from services.broker.sending.produce import ProduceHandler, SystemTopicMissing
from services.broker.sending.send_calls import SendCalls
from services.broker.transactions.giving_up import GivingUp
from tests.support.cluster.broker import refusal, running_broker

FAR = 1 << 40
Loop: TypeAlias = "Callable[[Idle], Coroutine[Any, Any, object]]"


class Idle:
    """A coroutine function that changes nothing."""

    def __init__(self) -> None:
        self.answer: object = None
        self.calls = 0

    async def __call__(self, *_: object, **__: object) -> object:
        self.calls += 1
        assert self.calls <= 10 * TURNS_MAX, "the loop turns for ever"
        return self.answer


def recalling(idle: Idle) -> Coroutine[Any, Any, object]:
    idle.answer = [object()]
    me = Mock(_find_all=idle, _is_stale=lambda _: True)
    return RecallService.recall(me, ["handle"])


def creating_a_group(idle: Idle) -> Coroutine[Any, Any, object]:
    me = Mock(is_there=lambda _: False, _creating={}, _create_group=idle)
    return GroupCoordinator.ensure_group(me, "G", "address")


def making_topics(idle: Idle) -> Coroutine[Any, Any, object]:
    keeper = Mock(has_topic=lambda _: False, create_system_topic=idle)
    settings = MagicMock()
    settings.name = "G"
    made: Any = [(Mock(), NO_WAIT)]
    return RetryService._make_topics(Mock(_keeper=keeper), settings, made)


def giving_up(idle: Idle) -> Coroutine[Any, Any, object]:
    me = Mock(_table=Mock(below=lambda *_: [7]), give_up=idle)
    return GivingUp.leave(me, FAR)


def taking_a_batch(idle: Idle) -> Coroutine[Any, Any, object]:
    me = Mock(append=Mock(side_effect=SystemTopicMissing({"S": 1})), create_missing=idle)
    return ProduceHandler.take(me, b"", [], b"")


def sending(idle: Idle) -> Coroutine[Any, Any, object]:
    me = MagicMock(_append=Mock(side_effect=SystemTopicMissing({"S": 1})))
    me._produce.create_missing = idle
    me._known.return_value = {}
    return SendCalls.send(me, [pb.OutgoingMessage(topic="T")], b"")


def learning_keys(idle: Idle) -> Coroutine[Any, Any, object]:
    turn = Mock(keys=Mock(missing=lambda _: [1, 2]))
    return ReceiveService._learn(MagicMock(), turn, ("T", 0), Mock())


def taking_arrivals(idle: Idle) -> Coroutine[Any, Any, object]:
    me = MagicMock(_is_loaded=True, _load_if_needed=idle, _take_arrivals=idle)
    me._storage.bounds.return_value = 0, 9, 9
    me.table.read = 3
    return TimerService.take_all_arrivals(me)


def rolling(idle: Idle) -> Coroutine[Any, Any, object]:
    idle.answer = True
    me = MagicMock(_roll_some=idle, _place=())
    me._storage.store.queue_offset_at.return_value = 9
    me.table.rolled = 3
    return TimerService.roll_before(me, FAR)


def moving_levels(idle: Idle) -> Coroutine[Any, Any, object]:
    idle.answer = True
    me = MagicMock(_move_some=idle, _queues=lambda: [(Mock(offset=3), ("S", 1))])
    me._storage.store.queue_offset_at.return_value = 9
    return ScheduleService.leave(me, FAR)


def delivering_levels(idle: Idle) -> Coroutine[Any, Any, object]:
    idle.answer = 0.0
    return ScheduleService.run(MagicMock(deliver_due=idle, progress=[(1, Mock(offset=3))]))


def cleaning(idle: Idle) -> Coroutine[Any, Any, object]:
    idle.answer = Mock(remove=True), Removed()
    return Retention.clean(Mock(look=idle, _store=Mock(min_offset=0)))


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle()
    idle.answer = []
    monkeypatch.setattr(receive, "read_offsets", idle)


LOOPS: tuple[Loop, ...] = (
    recalling,
    creating_a_group,
    making_topics,
    giving_up,
    taking_a_batch,
    sending,
    learning_keys,
    taking_arrivals,
    rolling,
    moving_levels,
    delivering_levels,
    cleaning,
)


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_loop_that_does_not_get_on_ends_with_an_error_and_its_stack(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InternalError, match="nothing got on"):
        await loop(Idle())
    [told] = [one for one in caplog.records if "a loop does not get on" in one.getMessage()]
    assert __file__ in vars(told)["fields"]["stack"]


async def test_the_caller_of_such_a_loop_gets_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and the broker serves on."""
    monkeypatch.setattr(GroupCoordinator, "_create_group", Idle())
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        assert isinstance(await refusal(broker.commit("G", ("T", 0, 1, 0))), InternalError)
        await broker.send("T", 0, b"x")
