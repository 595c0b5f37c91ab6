"""Messages that are sent again: to their topic or to one group, once, marked, by the command."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cometmq.admin import resends
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.admin.resends import Resending
from cometmq.admin.topic_reader import open_reader
from cometmq.admin.views import MessagesResentView
from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.errors import (
    AlreadyResent,
    CometError,
    DiskFull,
    GroupNotFound,
    LimitExceeded,
    MessageNotFound,
    NoPermission,
    OffsetInvalid,
    QueueNotFound,
    StoreFailed,
    TopicNotFound,
)
from cometmq.format import record
from cometmq.format.relay import OwnRecord
from cometmq.member.read import records
from cometmq.member.state.statelog import load
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.state import STATE_TOPIC, BrokerState
from cometmq.model import QueueRef
from cometmq.rpc.interceptors import from_proto
from cometmq.store.base import BaseStore
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from services.broker.retry import resends as service
from services.broker.statewriter import StateWriter
from tests.support.cluster.broker import (
    BrokerClient,
    LiveBroker,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.waiting import until, until_async

COUNT = 6


@asynccontextmanager
async def stored(tmp_path: Path) -> AsyncIterator[tuple[str, LiveBroker]]:
    """T has messages 0 to 5, in turns in its two queues; the odd ones have the tag odd."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        async with Producer(namesrv) as producer:
            for n in range(COUNT):
                queue = QueueRef("T", n % 2, "g1")
                tag = "odd" if n % 2 else "even"
                message = Message("T", b"%d" % n, tag=tag, keys=(f"k{n}",), queue=queue)
                await producer.send_and_wait(message)
        for queue_id in (0, 1):
            assert len(await broker.read_queue("T", queue_id)) == COUNT // 2
        await broker.commit("G", ("T", 0, 0, 0))
        yield namesrv, broker


def request(*places: tuple[int, int], **fields: Any) -> pb.ResendMessagesRequest:
    items = [
        pb.ResendItem(queue_id=queue_id, position=common.Position(offset=offset))
        for queue_id, offset in places
    ]
    return pb.ResendMessagesRequest(**{"topic": "T", "items": items, **fields})


async def there(broker: BrokerClient, topic: str, count: int) -> bool:
    return (await broker.status(topic, 0)).max_offset == count


async def resend(
    broker: BrokerClient, *places: tuple[int, int], **fields: Any
) -> list[type[CometError] | None]:
    answer = await broker.admin.ResendMessages(request(*places, **fields))
    errors = [from_proto(one.error) if one.HasField("error") else None for one in answer.results]
    return [None if error is None else type(error) for error in errors]


async def test_places_are_looked_up_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 looks into queues that are not in memory would hold everybody up."""
    read_units = BaseStore.read_units

    def as_if_cold(store: BaseStore, topic: str, *place: int, nowait: bool = False) -> bytes:
        if topic == "T" and nowait:
            raise BlockingIOError
        assert topic != "T" or threading.current_thread() is not threading.main_thread()
        return read_units(store, topic, *place, nowait=nowait)

    async with stored(tmp_path) as (_, broker):
        with monkeypatch.context() as patch:
            patch.setattr(BaseStore, "read_units", as_if_cold)
            answers = await resend(broker, (0, 0), (1, 2), (1, 9), group="G")
            assert answers == [None, None, OffsetInvalid]
            position = common.Position(offset=1)
            queue = common.QueueRef(topic="T", queue_id=0)
            back = pb.SendBackItem(queue=queue, position=position, delay_level=1)
            [taken] = (
                await broker.stub.SendBack(pb.SendBackRequest(group="G", items=[back]))
            ).results
            assert not taken.HasField("error")


@pytest.mark.parametrize("group", ["", "G"])
async def test_a_crash_between_a_copy_and_its_mark_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    async with stored(tmp_path) as (_, broker):
        late = pb.OutgoingMessage(topic="T", queue_id=0, body=b"late", delay_level=1)
        await broker.stub.Send(pb.SendRequest(messages=[late]))
        await until_async(lambda: there(broker, "T", COUNT // 2 + 1))

        append = MemberStorage.append_relayed

        def dies(storage: MemberStorage, batch: Sequence[OwnRecord], *rest: Any) -> Any:
            append(storage, [one for one in batch if one.topic != STATE_TOPIC], *rest)
            broker.crash()
            raise StoreFailed("the process dies here")

        with monkeypatch.context() as patch:
            patch.setattr(MemberStorage, "append_relayed", dies)
            await refusal(broker.admin.ResendMessages(request((0, 1), (0, 3), group=group)))
    async with running_broker(tmp_path) as broker:
        assert await resend(broker, (0, 0), (0, 1), (0, 3), group=group) == [
            None,
            AlreadyResent,
            AlreadyResent,
        ]
        # A copy of a message that was delayed is no delivery of its level.
        assert (await broker.bodies("T", 0)).count(b"late") == (1 if group else 2)


async def test_a_copy_is_the_message_again_and_is_sent_once(tmp_path: Path) -> None:
    async with stored(tmp_path) as (_, broker):
        assert await resend(broker, (1, 2), (0, 0), (1, 2), dry_run=True) == [None] * 3
        assert len(await broker.read_queue("T", 0)) == COUNT // 2, "a dry run sends nothing"
        assert await resend(broker, (1, 2), (0, 0), (1, 2)) == [None] * 3
        found = await broker.read_queue("T", 1)
        first, copy = found[2], found[3]
        assert len(found) == COUNT // 2 + 1, "the same place twice is one message"
        assert (copy.body, copy.keys, copy.tag) == (first.body, first.keys, first.tag)
        assert (copy.unique_id, copy.born_time_ms) == (first.unique_id, first.born_time_ms)
        assert copy.prepared_offset == first.log_offset
        assert copy.properties["ORIGIN_MESSAGE_ID"].endswith(f"{first.log_offset:016X}")
        # To its topic and to a group are two things; a copy is not sent again by mistake.
        assert await resend(broker, (1, 2), (1, 3), (1, 1)) == [AlreadyResent, AlreadyResent, None]
        assert await resend(broker, (1, 2), group="G") == [None]
        assert await resend(broker, (1, 2), group="G") == [AlreadyResent]
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await resend(broker, (0, 0), (1, 2), (1, 1)) == [AlreadyResent] * 3
        assert await resend(broker, (1, 2), group="G") == [AlreadyResent]
        assert await resend(broker, (0, 0), (1, 3), again=True) == [None, None]
        assert await broker.bodies("T", 0) == [b"0", b"2", b"4", b"0", b"0"]
        assert await broker.bodies("T", 1) == [b"1", b"3", b"5", b"5", b"3", b"5"]
        await broker.drop_topic("T")
        await broker.put_topic("T", 2)
        await broker.send("T", 0, b"new")
        await broker.read_queue("T", 0)
        assert await resend(broker, (0, 0)) == [None], "marks go with their messages"


async def test_what_goes_to_a_group_comes_to_no_other(tmp_path: Path) -> None:
    got: dict[str, list[ReceivedMessage]] = {"G": [], "H": []}
    options = PushConsumerOptions(rebalance_delay_ms=1)

    def consumer(namesrv: str, group: str) -> PushConsumer:
        async def listener(messages: list[ReceivedMessage]) -> None:
            got[group].extend(messages)

        return PushConsumer(namesrv, group, listener, options=options)

    async with (
        stored(tmp_path) as (namesrv, broker),
        consumer(namesrv, "G") as first,
        consumer(namesrv, "H") as second,
    ):
        await first.subscribe("T")
        await second.subscribe("T")
        await until(lambda: len(got["G"]) >= COUNT and len(got["H"]) >= COUNT)
        assert await resend(broker, (0, 1), group="G") == [None]
        await until(lambda: len(got["G"]) > COUNT)
        again = got["G"][-1]
        assert (again.topic, again.body, again.reconsume_times) == ("T", b"2", 0)
        assert await resend(broker, (0, 2)) == [None]
        await until(lambda: len(got["G"]) == COUNT + 2 and len(got["H"]) == COUNT + 1)
        assert got["H"][-1].body == b"4"


async def test_the_library_chooses_paces_and_leaves_out_what_was_sent(tmp_path: Path) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with stored(tmp_path) as (namesrv, broker), Connection(namesrv) as connection:

        async def run(how: Resending, sql: str = "") -> MessagesResentView:
            reader = await open_reader(connection, "T", sql=sql, to_the_end=True)
            found = resends.read_range(reader)
            return await resends.resend(connection, how, found, sleep=sleep)

        odd = "TAGS = 'odd'"
        dry = await run(Resending("T", dry=True, rate=2.0), odd)
        assert (dry, waits) == (MessagesResentView("T", "", 3, 0, False), [])
        done = await run(Resending("T", rate=2.0), odd)
        assert (done, waits) == (MessagesResentView("T", "", 3, 0, True), [1.0])
        await broker.read_queue("T", 1)
        # The copies are neither found nor sent; the others are.
        assert await run(Resending("T")) == MessagesResentView("T", "", 3, 3, True)
        assert await run(Resending("T", again=True), odd) == MessagesResentView("T", "", 3, 0, True)
        assert await run(Resending("T", group="G")) == MessagesResentView("T", "G", 6, 0, True)
        assert len(await broker.read_queue("%RETRY%G", 0)) == COUNT
        with pytest.raises(GroupNotFound):
            await run(Resending("T", group="nobody"))


async def test_a_range_of_time_and_a_queue(tmp_path: Path) -> None:
    async with stored(tmp_path) as (namesrv, broker), Connection(namesrv) as connection:
        answer = await broker.pull("T", 0, 0, max_count=32)
        times = [one.store_time_ms for one in record.decode_all(answer.records)]
        reader = await open_reader(
            connection,
            "T",
            broker_group="g1",
            queue_id=0,
            begin_ms=times[0] + 1,
            to_the_end=True,
        )
        found = [one async for some in resends.read_range(reader, times[2]) for one in some]
        assert [one.store_time_ms for one in found] == [t for t in times if t > times[0]]
        reader = await open_reader(connection, "T", queue_id=0, to_the_end=True)
        found = [one async for some in resends.read_range(reader, times[0] - 1) for one in some]
        assert not found


async def test_what_cannot_be_sent_again_is_refused_and_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored(tmp_path) as (_, broker):

        def bounds() -> list[tuple[int, int]]:
            return [broker.store.queue_bounds("T", queue_id) for queue_id in (0, 1)]

        before = bounds()
        bad = await resend(broker, (0, -1), (0, 3), (0, 1 << 62), (7, 0), (-1, 0))
        assert bad == [OffsetInvalid] * 3 + [QueueNotFound] * 2
        for fields, error in (
            ({"topic": "unknown"}, TopicNotFound),
            ({"topic": "%DLQ%G"}, NoPermission),
            ({"topic": "rmq_sys_cometmq_state"}, NoPermission),
            ({"group": "nobody"}, GroupNotFound),
            ({"items": [pb.ResendItem()] * 257}, LimitExceeded),
        ):
            request = pb.ResendMessagesRequest(**{"topic": "T", "items": [], **fields})  # type: ignore[arg-type]
            found = await refusal(broker.admin.ResendMessages(request))
            assert isinstance(found, error), fields
        assert bounds() == before
        config = common.TopicConfig(name="T", read_queue_count=2, permission=4)
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        request = pb.ResendMessagesRequest(topic="T", items=[pb.ResendItem()])
        assert isinstance(await refusal(broker.admin.ResendMessages(request)), NoPermission)
        config.permission = 6
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        monkeypatch.setattr("cometmq.messaging.resends.INTERVALS_IN_ALL_MAX", 1)
        monkeypatch.setattr(service, "INTERVALS_IN_ALL_MAX", 1)
        assert await resend(broker, (0, 0)) == [None]
        before = bounds()
        request = pb.ResendMessagesRequest(
            topic="T", items=[pb.ResendItem(position=common.Position(offset=2))]
        )
        assert isinstance(await refusal(broker.admin.ResendMessages(request)), LimitExceeded)
        assert bounds() == before, "what cannot be marked is not sent"


async def test_large_messages_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 messages of 4 MiB would be a gibibyte in memory."""
    sizes: list[int] = []

    async def watched(store: Any, spans: Any, places: Any) -> Any:
        sizes.append(sum(size for _, size in spans))
        return await records.read_each(store, spans, places)

    monkeypatch.setattr(service, "read_each", watched)
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 23) as broker:
        await broker.put_topic("T", 1)
        for _ in range(5):
            await broker.send("T", 0, b"x" * 600_000)
        await broker.read_queue("T", 0)
        assert await resend(broker, *((0, offset) for offset in range(5))) == [None] * 5
        assert len(sizes) == 5
        assert max(sizes) < service.SLICE_BYTES_MAX
        assert len(await broker.read_queue("T", 0)) == 10


def command(namesrv: str, *words: str) -> Any:
    done = CliRunner().invoke(
        cli, ["message", "resend", *words, "--namesrv", namesrv, "--output", "json"]
    )
    return json.loads(done.stdout) if done.exit_code == 0 else (done.exit_code, done.stderr)


async def test_the_command(tmp_path: Path) -> None:
    async with stored(tmp_path) as (namesrv, broker):
        answer = await broker.pull("T", 0, 0, max_count=32)
        first, second, _ = record.decode_all(answer.records)

        async def run(*words: str) -> Any:
            return await asyncio.to_thread(command, namesrv, *words)

        def view(sent: int, before: int, group: str = "", done: bool = True) -> dict[str, Any]:
            counts = {"resent_count": sent, "resent_before_count": before}
            return {"topic": "T", "group": group, **counts, "done": done}

        by_id = f"g1/{first.log_offset}"
        assert await run(by_id, "--dry-run") == view(1, 0, done=False)
        assert await run(by_id, by_id) == view(1, 0)
        assert await run("--topic", "T", "--unique-id", first.unique_id) == view(0, 1)
        assert await run("--topic", "T", "--key", "k2", "--group", "G") == view(1, 0, "G")
        assert await run("--topic", "T", "--tag", "odd", "--group", "G") == view(3, 0, "G")
        assert await run("--topic", "T", "--all") == view(5, 1)
        assert await run(f"g1/{second.log_offset}", "--again") == view(1, 0)
        code, told = await run("--topic", "T", "--key", "nobody")
        assert (code, json.loads(told)["error"]["name"]) == (1, MessageNotFound.name())
        for words in ((), ("--topic", "T"), (by_id, "--all", "--topic", "T"), ("--all",)):
            code, _ = await run(*words)
            assert code == 2, words


async def test_a_topic_that_was_created_again_has_no_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the deleted one, nor what the log's end tells of its messages."""
    monkeypatch.setattr(StateWriter, "_write_now", lambda _: None)
    async with stored(tmp_path) as (_, broker):
        assert await resend(broker, (0, 0), group="G") == [None]
        await broker.drop_topic("T")
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"new")
        assert await broker.bodies("T", 0) == [b"new"]
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await resend(broker, (0, 0), group="G") == [None]


async def test_a_group_that_asks_for_more_queues_than_its_topic_has_gets_all(
    tmp_path: Path,
) -> None:
    """RocketMQ's tables may be so, and ours after a crash."""
    async with stored(tmp_path) as (_, broker):
        assert await resend(broker, (0, 0), group="G") == [None]
        broker.state.groups["G"] = replace(broker.state.groups["G"], retry_queue_count=8)
        assert await resend(broker, (0, 1), (0, 2), (1, 2), group="G") == [None] * 3
        assert await broker.bodies("%RETRY%G", 0) == [b"0", b"2", b"4", b"5"]


async def test_a_topic_that_is_deleted_while_its_messages_are_read_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored(tmp_path) as (_, broker):

        async def read_each(*arguments: Any) -> Any:
            found = await records.read_each(*arguments)
            await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))
            return found

        monkeypatch.setattr(service, "read_each", read_each)
        error = await refusal(broker.admin.ResendMessages(request((0, 0), group="G")))
        assert isinstance(error, GroupNotFound | TopicNotFound)
        assert "%RETRY%G" not in broker.state.topics
        assert not list(broker.state.resent)


async def test_messages_and_their_marks_are_stored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in between cannot take the messages and refuse the marks."""

    def refuse(*_: object, **__: object) -> int:
        raise DiskFull("no room for a record of its own")

    async with stored(tmp_path) as (_, broker):
        await resend(broker, (0, 1), group="G")
        with monkeypatch.context() as patch:
            patch.setattr(MemberStorage, "append", refuse)
            assert await resend(broker, (0, 0), (1, 0), group="G") == [None] * 2
            told = load(broker.store, BrokerState)
        assert list(told.resent) == list(broker.state.resent)
        assert await resend(broker, (0, 0), (1, 0), group="G") == [AlreadyResent] * 2
        assert len(await broker.bodies("%RETRY%G", 0)) == 3
