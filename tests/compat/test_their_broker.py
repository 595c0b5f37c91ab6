"""What waits or was not acknowledged goes to and fro between a broker of RocketMQ 5.5.1 and ours:
timers, also those that it stores again and those that were recalled, delay levels, half messages,
messages received by groups (POP), and trace records.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from cometmq.format import record, trace
from cometmq.format.record import Record
from cometmq.v1 import broker_pb2 as pb
from scripts.maven import JavaMissing
from tests.compat.listing import INDEX, note_compared
from tests.compat.theirbroker import TheirBroker, now_ms, their_broker, their_class_path
from tests.support.cluster.broker import BrokerClient, BrokerProcess
from tests.support.waiting import PROCESSES_S, until_async

pytestmark = pytest.mark.slow

FLAGS = ("--max_hash_slot_num", str(INDEX.hash_slots), "--max_index_num", str(INDEX.entries))
TIMERS = "rmq_sys_wheel_timer"
THEIR_RETRY = "%RETRY%billing_pops"
HOUR_MS = 3_600_000


@pytest.fixture(scope="module", autouse=True)
def _java() -> None:
    try:
        their_class_path()
    except JavaMissing as error:
        pytest.skip(str(error))


# --- ours ---


async def there(broker: BrokerClient, topic: str, *bodies: str) -> list[Record]:
    """All messages of queue 0, when these are among them."""
    found: list[Record] = []

    async def are_there() -> bool:
        found[:] = await broker.read_queue(topic, 0)
        return not set(bodies) - set(texts(found))

    await until_async(are_there)
    return found


def texts(found: Sequence[Record]) -> list[str]:
    return [one.body.decode() for one in found]


async def send(broker: BrokerClient, topic: str, body: str, **fields: object) -> pb.SentMessage:
    message = pb.OutgoingMessage(topic=topic, queue_id=0, body=body.encode(), **fields)  # type: ignore[arg-type]
    [sent] = (await broker.stub.Send(pb.SendRequest(messages=[message]))).sent
    return sent


async def receive(broker: BrokerClient, ms: int = 60_000) -> dict[str, pb.ReceivedRun]:
    """By body, what the group is given."""
    found: dict[str, pb.ReceivedRun] = {}
    request = pb.ReceiveRequest(
        group="billing", subscriptions=[pb.Subscription(topic="pops")], invisible_ms=ms
    )
    while (answer := await broker.stub.Receive(request)).runs:
        found |= {text: run for run in answer.runs for text in _bodies_of(run)}
    return found


def _bodies_of(run: pb.ReceivedRun) -> list[str]:
    return texts(record.decode_all(run.records))


async def acknowledge(broker: BrokerClient, run: pb.ReceivedRun) -> None:
    request = pb.AckMessagesRequest(group="billing", items=[pb.AckItem(handle=run.handle)])
    [result] = (await broker.stub.AckMessages(request)).results
    assert not result.HasField("error"), result.error


async def waiting(broker: BrokerClient) -> Counter[int]:
    """How many messages wait for each time."""
    found = await broker.admin.ListDelayed(pb.ListDelayedRequest(count_max=1_000))
    return Counter(one.place.due_ms for one in found.messages)


# --- trace records ---

TRACES: list[trace.TraceRecord] = [
    trace.Pub(1, "g", "orders", "ID1", "tag", "k1 k2", "1.2.3.4:10911", 7, 3, 0, "OFF1", True),
    trace.SubBefore(2, "readers", "REQ", "ID1", 1, "k1 k2"),
    trace.SubAfter("REQ", "ID1", 5, True, "k1 k2", 0, 4, "readers"),
]


def assert_traces_are_read(theirs: TheirBroker) -> None:
    """RocketMQ's decoder and its view of a message read our trace records, and we read its."""
    body = "".join(map(trace.encode, TRACES))
    answer = theirs.ask("trace", hex=body.encode().hex(), id="ID1")
    pub, before, after = answer["contexts"]
    assert (pub["type"], pub["time"], pub["group"], pub["cost"]) == ("Pub", 1, "g", 3)
    [bean] = pub["beans"]
    assert (bean["topic"], bean["id"], bean["bytes"]) == ("orders", "ID1", 7)
    assert (bean["offset_id"], bean["tags"], bean["keys"]) == ("OFF1", "tag", "k1 k2")
    assert (before["type"], before["group"], before["request"]) == ("SubBefore", "readers", "REQ")
    assert (after["type"], after["request"], after["cost"]) == ("SubAfter", "REQ", 5)
    assert answer["views"]
    # Their encoder writes what it has read; ours reads that.
    assert list(trace.decode("".join(answer["again"])))


# --- to and fro ---


async def test_to_us_and_back(tmp_path: Path) -> None:
    folder, log = tmp_path / "store", tmp_path / "theirs.log"
    due: dict[str, int] = {}

    def at(body: str, ms: int) -> int:
        due[body] = now_ms() + ms
        return due[body]

    # --- theirs
    with their_broker(folder, log) as theirs:
        theirs.ask("topic", name="orders", queues=1)
        theirs.ask("topic", name="pops", queues=1)
        theirs.ask("group", name="billing")
        theirs.ask("produce", group="payers")
        half = {"TRAN_MSG": "true", "PGROUP": "payers"}
        theirs.ask("commit", body="half committed")  # when RocketMQ asks about it
        for body in ("half committed", "half checked"):
            theirs.send("orders", body, **half)
        theirs.send("orders", "half open", CHECK_IMMUNITY_TIME_IN_SECONDS=3600, **half)
        for number in range(6):
            theirs.send("pops", f"p{number}")
        assert theirs.ask("pop", group="billing", topic="pops", count=1, ms=1_000)["bodies"] == [
            "p0"
        ]
        theirs.send("orders", "plain")
        theirs.send("orders", "delivered", TIMER_DELIVER_MS=at("delivered", 1_500))
        theirs.send("orders", "far", TIMER_DELIVER_MS=at("far", HOUR_MS))
        theirs.ask("checks", body="half checked", ms=40_000)
        theirs.wait_for(THEIR_RETRY, 1)
        theirs.wait_for("orders", 3)
        theirs.wait_for_body(TIMERS, "far", 2)  # it is stored once more
        popped: set[str] = set()
        while "p4" not in popped:  # one by one, so that nobody has p5
            popped |= set(
                theirs.ask("pop", group="billing", topic="pops", count=1, ms=15_000)["bodies"]
            )
        for body in ("p2", "p3"):
            theirs.ask("ack", body=body)
        theirs.send("orders", "level", DELAY=3)
        due["level"] = now_ms() + 9_900
        theirs.send("orders", "for us", TIMER_DELIVER_MS=at("for us", 9_000))
        sent = theirs.send("orders", "recalled", TIMER_DELIVER_MS=at("recalled", 8_000))
        theirs.ask("recall", topic="orders", handle=sent["handle"])
        assert sorted(theirs.bodies("orders")) == ["delivered", "half committed", "plain"]

    # --- ours
    async with BrokerProcess(tmp_path, *FLAGS) as process:
        broker = process.client
        # On a slow machine it may be delivered already.
        assert await waiting(broker) - Counter({due["for us"]: 1}) == Counter({due["far"]: 1})
        # It is, unless a slow machine has let RocketMQ put all into its retry topic.
        mode = pb.GroupSettings(group="billing", retry_times_max=16, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=mode))
        first = await receive(broker)
        assert "p5" in first
        assert not {"p2", "p3"} & first.keys()
        halves = (await broker.admin.QueryHalves(pb.QueryHalvesRequest())).halves
        assert len(halves) == 2
        assert all(half.check_count for half in halves), "RocketMQ counts the one it spares, too"
        found = await there(broker, "orders", "for us", "level")
        early = [
            text
            for one, text in zip(found, texts(found), strict=True)
            if one.store_time_ms < due.get(text, 0)
        ]
        assert not early
        back: dict[str, pb.ReceivedRun] = {}

        async def all_back() -> bool:
            back.update(await receive(broker))
            return {"p0", "p1", "p4"} <= {*first, *back}

        await until_async(all_back, PROCESSES_S, pause_s_max=0.2)
        assert not {"p2", "p3"} & {*first, *back}
        got = {**first, **back}
        for body in ("p1", "p5"):
            await acknowledge(broker, got[body])

        await send(broker, "orders", "ours delivered", deliver_at_ms=at("ours delivered", 500))
        await send(broker, "orders", "ours far", deliver_at_ms=at("ours far", 60 * HOUR_MS))
        await send(broker, "orders", "ours half", producer_group="payers", check_immunity_s=1)
        await there(broker, "orders", "ours delivered")
        await send(broker, "orders", "ours", deliver_at_ms=at("ours", 8_000))
        await send(broker, "orders", "ours level", delay_level=3)
        due["ours level"] = now_ms() + 9_900
        taken_back = await send(broker, "orders", "recalled", deliver_at_ms=now_ms() + 8_000)
        await broker.stub.Recall(pb.RecallRequest(handles=[taken_back.recall_handle]))
        before = await waiting(broker)
        await process.stop()

    # --- theirs
    with their_broker(folder, log) as theirs:
        theirs.ask("commit", body="ours half")
        theirs.ask("produce", group="payers")
        again = theirs.ask("pop", group="billing", topic="pops", count=32, ms=60_000)["bodies"]
        again += theirs.ask("pop", group="billing", topic="pops", count=32, ms=60_000)["bodies"]
        assert {"p0", "p4"} <= set(again) <= {"p0", "p4", "p5"}
        theirs.wait_for("orders", 9)
        there_now = theirs.messages("orders")
        assert not [body for body, stored_ms in there_now if stored_ms < due.get(body, 0)]
        theirs.ask("sleep", ms=1_500)  # what comes twice, or was recalled, would be there by then
        expected = [
            *("plain", "delivered", "half committed", "for us", "level"),
            *("ours delivered", "ours", "ours level", "ours half"),
        ]
        assert Counter(theirs.bodies("orders")) == Counter(expected)

    # --- ours again
    async with BrokerProcess(tmp_path, *FLAGS) as process:
        broker = process.client
        assert await waiting(broker) == before - Counter({due["ours"]: 1})
        assert Counter(texts(await broker.read_queue("orders", 0))) == Counter(expected)
        await process.stop()
    note_compared("messages that waited or were delivered", len(due))


async def test_after_a_crash_of_ours_theirs_repeats_and_loses_nothing(tmp_path: Path) -> None:
    folder, log = tmp_path / "store", tmp_path / "theirs.log"
    flags = (*FLAGS, "--flush_consumer_offset_interval", "100")
    async with BrokerProcess(tmp_path, *flags) as process:
        broker = process.client
        await broker.put_topic("orders", 1)
        due_ms = now_ms() + 15_000  # RocketMQ runs before
        await send(broker, "orders", "waits", deliver_at_ms=due_ms)
        await send(broker, "orders", "delivered", deliver_at_ms=now_ms() + 500)
        sent = await send(broker, "orders", "recalled", deliver_at_ms=due_ms)
        await broker.stub.Recall(pb.RecallRequest(handles=[sent.recall_handle]))
        await there(broker, "orders", "delivered")
        check = folder / "config" / "timercheck"
        await until_async(partial(asyncio.to_thread, check.exists))
        await process.kill()
    with their_broker(folder, log) as theirs:
        assert_traces_are_read(theirs)
        theirs.wait_for_body("orders", "delivered", 2)
        theirs.wait_for_body("orders", "waits", 1)
        theirs.ask("sleep", ms=1_500)
        found = Counter(theirs.bodies("orders"))
        # It delivers what was recalled in some of these runs, not in all: docs/compatibility.md.
        assert found.keys() - {"recalled"} == {"delivered", "waits"}
        assert max(found.values()) == 2
