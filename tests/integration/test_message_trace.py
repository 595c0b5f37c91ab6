"""`cometmq message trace`: one line of time of a message, with trace records and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cometmq.admin import dead_letters, delayed, message_trace
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.admin.views import TraceEventView
from cometmq.client import (
    Later,
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)
from cometmq.clock import SystemClock
from cometmq.errors import MessageNotFound
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until, until_async

TRACED: dict[str, Any] = {"trace_enable": True}


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[str, LiveBroker, Connection]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), trace_topic_enable=True) as broker,
        Connection(namesrv) as connection,
    ):
        await broker.put_topic("T", 1)
        yield namesrv, broker, connection


def told(events: list[TraceEventView]) -> list[tuple[str, str, str]]:
    return [(event.event, event.group, event.result) for event in events]


async def fail_and_give_up(namesrv: str, **options: Any) -> None:
    """A group that sends the message back once, and then gives it up."""
    tries: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        if messages[0].body == b"2":
            return None
        tries.append(messages[0].reconsume_times)
        return Later(delay_level=1 if len(tries) == 1 else -1)

    quick = PushConsumerOptions(rebalance_delay_ms=1, poll_backoff_ms=2, **options)
    async with PushConsumer(namesrv, "G", listener, options=quick) as consumer:
        await consumer.subscribe("T")
        await until(lambda: len(tries) == 2)


async def test_a_traced_message_is_told_from_its_send_to_its_dead_letter(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, _, connection):
        async with Producer(namesrv, options=ProducerOptions(**TRACED)) as producer:
            receipt = await producer.send_and_wait(Message("T", b"1", keys=("k",)))
            await producer.send_and_wait(Message("T", b"2", properties={"TRACE_ON": "false"}))
        await fail_and_give_up(namesrv, **TRACED)
        events = await message_trace.trace_message(connection, receipt.message_id)
        assert told(events) == [
            ("produced", "", "ok"),
            ("stored", "", "ok"),
            ("consumed", "G", "failed"),
            ("sent back", "G", ""),
            ("consumed", "G", "failed"),
            ("dead letter", "G", ""),
            ("group is past it", "G", ""),
        ]
        times = [event.time_ms for event in events[:-1]]
        assert times == sorted(times, key=lambda ms: ms or 0)
        assert all(event.message_id == receipt.unique_id for event in events)
        assert events[0].source == "trace"
        assert events[0].client.startswith("127.0.0.1")
        assert [events[n].detail for n in (2, 4)] == ["try 1", "try 2"]
        assert events[1].detail == f"{receipt.message_id}, queue 0 offset 0"
        # The unique id does as well: the trace knows the topic.
        assert await message_trace.trace_message(connection, receipt.unique_id) == events
        assert await message_trace.trace_key(connection, "T", "k") == events


async def test_a_dead_letter_that_was_sent_again_is_told_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, _, connection):
        async with Producer(namesrv) as producer:
            receipt = await producer.send_and_wait(Message("T", b"1"))
        await fail_and_give_up(namesrv)
        letters = [view async for view, _ in dead_letters.read_dead_letters(connection, "G")]
        await dead_letters.resend(connection, "G", letters)
        events = await message_trace.trace_message(connection, receipt.message_id)
        tries = [(event.event, event.detail.rpartition(", ")[2]) for event in events[2:5]]
        assert tries[0] == ("sent back", "try 2")
        assert tries[1][0] == "dead letter"
        assert tries[2] == ("sent again", "try 1")


async def test_without_trace_records_brokers_tell_what_they_know(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker, connection):
        async with Producer(namesrv) as producer:
            receipt = await producer.send_and_wait(Message("T", b"1"))
        await fail_and_give_up(namesrv)
        await broker.commit("Slow", ("T", 0, 0, 0))
        events = await message_trace.trace_message(connection, receipt.unique_id, "T")
        assert told(events) == [
            ("produced", "", ""),
            ("stored", "", "ok"),
            ("sent back", "G", ""),
            ("dead letter", "G", ""),
            ("group is past it", "G", ""),
            ("group is before it", "Slow", ""),
        ]
        assert {event.source for event in events} == {"store", "offsets"}
        with pytest.raises(MessageNotFound, match="--topic"):
            await message_trace.trace_message(connection, receipt.unique_id)
        with pytest.raises(MessageNotFound):
            await message_trace.trace_key(connection, "T", "absent")


async def test_delayed_messages_and_transactions(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker, connection):
        options = ProducerOptions(**TRACED)

        def check(_: ReceivedMessage) -> TransactionState:
            return TransactionState.COMMIT

        async with TransactionProducer(namesrv, "P", check, options=options) as producer:
            late = await producer.send_and_wait(Message("T", b"late", delay_level=1))
            async with producer.transaction() as one:
                half = await one.send(Message("T", b"half"))

        async def has_two() -> bool:
            return len(await broker.read_queue("T", 0)) == 2

        await until_async(has_two)
        of_late = await message_trace.trace_message(connection, late.unique_id)
        assert [event.event for event in of_late] == ["produced", "delivered"]
        assert of_late[0].detail == "delayed"
        assert (of_late[1].time_ms or 0) - (of_late[0].time_ms or 0) >= 900
        of_half = await message_trace.trace_message(connection, half.unique_id)
        assert sorted(told(of_half)) == [
            ("produced", "", "ok"),
            ("stored", "", "ok"),
            ("transaction ended", "P", "commit"),
        ]


async def test_a_message_that_waits_is_told_where_it_waits_and_how_that_ended(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (namesrv, broker, connection):
        await broker.put_topic("Other", 1)

        def check(_: ReceivedMessage) -> TransactionState:
            return TransactionState.UNKNOWN

        async with TransactionProducer(namesrv, "P", check) as producer:
            due_ms = SystemClock().wall_ms() + 3_600_000
            timer, kept, level = [
                await producer.send_and_wait(message)
                for message in (
                    Message("T", b"timer", keys=("k",), deliver_at_ms=due_ms),
                    Message("Other", b"kept", keys=("k",), deliver_at_ms=due_ms),
                    Message("T", b"level", delay_level=18),
                )
            ]
            one = producer.transaction()
            half = await one.send(Message("T", b"half", keys=("h",)))
            one.leave_open()

        async def told_of(name: str) -> list[tuple[str, str]]:
            events = await message_trace.trace_message(connection, name)
            assert {event.source for event in events} == {"store"}
            return [(event.event, event.detail) for event in events]

        due = datetime.fromtimestamp(due_ms / 1000).isoformat(" ", "milliseconds")
        waits = [("produced", ""), ("delayed", f"{timer.message_id}, due {due}")]
        assert await told_of(timer.unique_id) == await told_of(timer.message_id) == waits
        assert (await told_of(level.unique_id))[1] == ("delayed", f"{level.message_id}, level 18")
        assert (await told_of(half.unique_id))[1] == ("half stored", half.message_id)
        by_key = await message_trace.trace_key(connection, "T", "k")
        assert {event.message_id for event in by_key} == {timer.unique_id}, "not that of Other"
        assert len(await message_trace.trace_key(connection, "T", "h")) == 2

        assert (await delayed.recall(connection, timer.recall_handle)).recalled
        assert [event for event, _ in await told_of(timer.unique_id)] == [
            *("produced", "delayed", "recalled")
        ]
        assert len(await told_of(kept.unique_id)) == 2


async def test_the_command(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, _, _):
        async with Producer(namesrv) as producer:
            receipt = await producer.send_and_wait(Message("T", b"1", keys=("k",)))

        def run(*words: str) -> Any:
            return CliRunner().invoke(cli, ["message", "trace", *words, "--namesrv", namesrv])

        by_id = await asyncio.to_thread(run, receipt.message_id, "--output", "json")
        assert by_id.exit_code == 0, by_id.output
        by_key = await asyncio.to_thread(run, "--topic", "T", "--key", "k", "--output", "json")
        assert json.loads(by_key.output) == json.loads(by_id.output)
        table = await asyncio.to_thread(run, receipt.message_id)
        assert "produced" in table.output
        for words in ([], ["--key", "k"], [receipt.message_id, "--key", "k", "--topic", "T"]):
            wrong = await asyncio.to_thread(run, *words)
            assert wrong.exit_code == 2, wrong.output
