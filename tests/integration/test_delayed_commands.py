"""`cometmq message delayed` and `cometmq message recall` against a broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from cometmq.admin.cli import cli
from cometmq.client import Message, Producer
from tests.integration.test_broker_timers import now_ms
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until_async

HOUR_MS = 3_600_000


async def has(broker: LiveBroker, topic: str, body: bytes) -> bool:
    return body in await broker.bodies(topic, 0)


async def test_what_waits_is_listed_counted_and_recalled(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.put_topic("U", 1)

        async def run(*words: str, exit_code: int = 0) -> Any:
            """The answer as JSON, or the error's name."""
            command = ["message", *words, "--namesrv", namesrv, "--output", "json"]
            result = await asyncio.to_thread(CliRunner().invoke, cli, command)
            assert result.exit_code == exit_code, result.output
            if exit_code == 2:
                return result.stderr
            if exit_code == 1:
                return json.loads(result.stderr)["error"]["name"]
            return json.loads(result.stdout)

        begun_ms = now_ms()
        async with Producer(namesrv) as producer:
            receipts = [
                await producer.send_and_wait(
                    Message("TUT"[n], b"x", deliver_at_ms=begun_ms + HOUR_MS * (3 - n))
                )
                for n in range(3)
            ]
        first, second, third = receipts[::-1]
        found = await run("delayed")
        assert [one["message_id"] for one in found] == [
            one.message_id for one in (first, second, third)
        ]
        assert [one["recall_handle"] for one in found] == [
            one.recall_handle for one in (first, second, third)
        ]
        only = await run("delayed", "--topic", "T", "--begin", str(begun_ms + HOUR_MS + 1))
        assert [one["message_id"] for one in only] == [third.message_id]
        assert len(await run("delayed", "--max", "1")) == 1
        counts = await run("delayed", "--count-by", "topic")
        assert [(one["of"], one["count"]) for one in counts] == [("T", 2), ("U", 1)]
        by_time = await run("delayed", "--count-by", "time")
        spans = {one["of"]: one["count"] for one in by_time}
        assert (spans["within 10 min"], spans["within 6 h"]) == (0, 3)

        assert (await run("recall", first.recall_handle))["recalled"]
        assert (await run("recall", first.recall_handle))["recalled"], "the same answer"
        assert len(await run("delayed")) == 2
        async with Producer(namesrv) as producer:
            late = await producer.send_and_wait(Message("U", b"late", delay_ms=1))
        await until_async(lambda: has(broker, "U", b"late"))
        assert not (await run("recall", late.recall_handle, exit_code=3))["recalled"]
        forged = first.recall_handle[:-4] + third.recall_handle[:4]
        for handle in ("", "hello", forged):
            name = await run("recall", handle, exit_code=1)
            assert name == "RECALL_HANDLE_INVALID"
        # A topic that is none is no topic without messages.
        assert await run("delayed", "--topic", "V", exit_code=1) == "TOPIC_NOT_FOUND"
        assert await run("delayed", "--topic", "a b", exit_code=1) == "TOPIC_NAME_INVALID"
        assert "counts all" in await run(
            *("delayed", "--count-by", "time", "--topic", "T"), exit_code=2
        )
