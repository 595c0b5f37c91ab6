"""Calls of ``Send`` that come again: stored once, answered as the first time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import InvalidRequest, TopicNotFound
from cometmq.v1 import broker_pb2 as pb
from tests.integration.test_failover import replicated
from tests.support.cluster.broker import BrokerClient, refusal, running_broker
from tests.support.cluster.send_shapes import REPLY_TOPIC, send_shapes
from tests.support.waiting import until_async

NUMBERED = "01" + "AB" * 12


def message(number: int, **fields: Any) -> pb.OutgoingMessage:
    """A message with an id that RocketMQ's clients give: they leave gaps."""
    made = pb.OutgoingMessage(topic="T", body=b"%d" % number, **fields)
    made.properties["UNIQ_KEY"] = f"{NUMBERED}{3 * number:08X}"
    return made


async def send(broker: BrokerClient, *messages: pb.OutgoingMessage) -> pb.SendResponse:
    return await broker.stub.Send(pb.SendRequest(messages=messages))


def facts(answer: pb.SendResponse) -> tuple[Any, ...]:
    """All of an answer but the generation: a crash raises it."""
    places = [
        (s.message_id, s.queue.queue_id, s.position.offset, s.HasField("position"))
        for s in answer.sent
    ]
    return places, answer.store_time_ms, answer.status


async def bodies(broker: BrokerClient) -> list[bytes]:
    return sorted([body for queue in range(4) for body in await broker.bodies("T", queue)])


async def test_a_call_that_comes_again_has_its_answer(tmp_path: Path) -> None:
    """At once, after a crash, after a stop; with gaps between the ids; delayed messages too."""
    calls = [
        [message(0), message(1, tag="A", keys=["k"], properties={"p": "v"})],
        [message(2, queue_id=3, flag=7)],
        [message(3, delay_level=18), message(4)],
    ]
    text = pb.OutgoingMessage(topic="T", body=b"5")
    text.properties["UNIQ_KEY"] = "order-5"
    calls.append([text])
    answers: list[list[pb.SendResponse]] = []
    for crashes in (True, False, False):
        async with running_broker(tmp_path) as broker:
            if not answers:
                await broker.put_topic("T", 4)
            for _ in range(2):
                answers.append([await send(broker, *call) for call in calls])
            assert await bodies(broker) == [b"0", b"1", b"2", b"4", b"5"]
            if crashes:
                broker.crash()
    assert all(list(map(facts, answer)) == list(map(facts, answers[0])) for answer in answers)


async def test_of_a_call_that_is_partly_known_the_rest_is_stored(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 4)
        first = await send(broker, message(1), message(3))
        whole = await send(broker, *map(message, range(5)))
        assert [whole.sent[n].message_id for n in (1, 3)] == [s.message_id for s in first.sent]
        assert whole == await send(broker, *map(message, range(5)))
        assert await bodies(broker) == [b"%d" % n for n in range(5)]


async def test_calls_that_come_together_are_stored_once(tmp_path: Path) -> None:
    """They meet while their topic is made."""
    async with running_broker(tmp_path, auto_create_topic_enable=True) as broker:
        answers = await asyncio.gather(*[send(broker, message(0), message(1)) for _ in range(8)])
        assert all(answer == answers[0] for answer in answers)
        assert await bodies(broker) == [b"0", b"1"]


async def test_other_messages_with_a_known_id_are_stored(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 4)
        first = await send(broker, message(0, queue_id=1))
        others = [
            message(0, queue_id=2),
            message(0, tag="A"),
            message(0, properties={"p": "v"}),
            message(0, delay_level=18),
            message(0, no_wait_store=True),
        ]
        others[1].body = b"other"
        for other in others:
            assert (await send(broker, other)).sent != first.sent
        assert len(await bodies(broker)) == 5


async def test_one_id_twice_in_a_call_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 4)
        error = await refusal(send(broker, message(0), message(1), message(1)))
        assert isinstance(error, InvalidRequest)
        assert error.segment == 2
        assert await bodies(broker) == []


@pytest.mark.parametrize("switched", [False, True])
async def test_without_an_id_or_with_the_switch_off_a_call_is_stored_again(
    tmp_path: Path, switched: bool
) -> None:
    async with running_broker(tmp_path, message_dedup_enable=switched) as broker:
        await broker.put_topic("T", 4)
        plain = pb.OutgoingMessage(topic="T", body=b"0")
        for _ in range(2):
            await send(broker, plain if switched else message(0))
        assert await bodies(broker) == [b"0", b"0"]


async def test_a_call_that_comes_again_to_the_next_writer_has_its_answer(tmp_path: Path) -> None:
    shapes = send_shapes().values()
    async with replicated(tmp_path) as group:
        await group[0].client.put_topic("T", 4)
        await group[0].client.put_topic(REPLY_TOPIC, 1)
        first = await send(group[0].client, *shapes)
        await group.in_step()
        await group[0].crash()
        await group[1].until_role("writer")

        async def same() -> bool:
            again = await send(group[1].client, *shapes)
            return facts(again) == facts(first)

        await until_async(same)
        waits = 7  # of the messages, so many wait for a time or an end
        assert len(await bodies(group[1].client)) == len(shapes) - waits


async def test_messages_of_a_deleted_topic_are_not_known(tmp_path: Path) -> None:
    """Neither while it is gone nor when it was created again."""
    call = [message(0), message(1, delay_level=18)]
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 4)
        await send(broker, *call)
        await broker.drop_topic("T")
        assert isinstance(await refusal(send(broker, *call)), TopicNotFound)
        await broker.put_topic("T", 4)
        answers = [await send(broker, *call) for _ in range(2)]
        assert facts(answers[0]) == facts(answers[1])
        assert await bodies(broker) == [b"0"]
