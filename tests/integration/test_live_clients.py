"""Operators ask running clients what they do, where their listener calls are, and to consume a
message, through a real broker.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cometmq.admin import clients
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.admin.views import ClientDescriptionView, ListenerResultView
from cometmq.client import (
    ConsumeMode,
    ConsumeResult,
    Later,
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    SimpleConsumer,
    SimpleConsumerOptions,
)
from cometmq.errors import (
    ClientGone,
    ClientNotFound,
    CometError,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    MessageIdInvalid,
    MessageNotFound,
    QuestionNotFound,
    QuestionTimeout,
    QuestionUnsupported,
    RemoteQuestionsOff,
    Retry,
    TopicNotSubscribed,
)
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2 as pb
from services.broker.groups.coordinator import GroupCoordinator
from tests.support.cluster.broker import (
    LiveBroker,
    batch,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.live_group import live_group
from tests.support.waiting import until, until_async

KNOWN = [pb.CLIENT_QUESTION_KIND_DESCRIBE, pb.CLIENT_QUESTION_KIND_CONSUME]
RETRIES = "%RETRY%G"


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[str, LiveBroker, Connection]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        Connection(namesrv) as connection,
    ):
        await broker.put_topic("T", 2)
        await broker.put_topic("U", 1)
        yield namesrv, broker, connection


def pushing(namesrv: str, listener: Callable[..., Any], **options: Any) -> PushConsumer:
    usual = {"rebalance_delay_ms": 1, "client_id": "member", "commit_interval_ms": 5}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**{**usual, **options}))


async def send(namesrv: str, count: int, topic: str = "T") -> list[str]:
    """To queue 0; the ids."""
    async with Producer(namesrv) as producer:
        return [
            (
                await producer.send_and_wait(
                    Message(topic, b"%d" % n, queue=QueueRef(topic, 0, "g1"))
                )
            ).message_id
            for n in range(count)
        ]


async def pass_by(broker: LiveBroker, count: int) -> None:
    """The group begins behind the first messages of queue 0: members get none of them by
    themselves. A commit counts as far as messages can be read.
    """

    async def is_committed() -> bool:
        [result] = await broker.commit("G", ("T", 0, 1, count))
        return result.position.offset == count

    await until_async(is_committed)


async def described(connection: Connection, client_id: str, **asked: Any) -> ClientDescriptionView:
    [one] = await clients.describe_clients(connection, client_id, **asked)
    return one


async def joined(connection: Connection, client_id: str = "member") -> None:
    """Waits until the client can be asked."""

    async def is_there() -> bool:
        return bool(await clients.list_clients(connection, None, "", 10, client_id))

    await until_async(is_there)


async def verified(connection: Connection, message_id: str, **more: Any) -> ListenerResultView:
    return await clients.verify_message(connection, message_id, "G", "member", **more)


async def command(namesrv: str, *words: str) -> Result:
    """``cometmq`` with these words."""
    invoke = partial(CliRunner().invoke, cli, [*words, "--namesrv", namesrv])
    return await asyncio.to_thread(invoke)


class Gate:
    """A listener that keeps its calls until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        self.begun += 1
        await self.stands_at_the_gate()

    async def stands_at_the_gate(self) -> None:
        await self.open.wait()


async def test_a_push_consumer_tells_what_it_reads_and_where_its_calls_are(tmp_path: Path) -> None:
    gate = Gate()
    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 5)
        async with pushing(namesrv, gate, concurrency=2) as push:
            await push.subscribe("T")
            await until(lambda: gate.begun == 2)
            told = await described(connection, "member", with_stacks=True)
            assert (told.role, told.group, told.broker_group) == ("push", "G", "g1")
            assert told.language.startswith("python 3.")
            assert told.agent.startswith(f"cometmq-python/{told.version}")
            assert told.start_time_ms <= told.time_ms
            assert told.options["concurrency"] == "2"
            assert [one.topic for one in told.subscriptions] == [RETRIES, "T"]
            queues = {(q.topic, q.queue_id): q for q in told.queues}
            assert told.queue_count == len(queues)
            full, empty = queues["T", 0], queues["T", 1]
            assert (full.cached_count, full.call_count, full.next_offset) == (5, 2, 5)
            assert full.cached_bytes > 5 * 90
            assert (empty.cached_count, empty.call_count, empty.next_offset) == (0, 0, 0)
            assert (full.lock_number, full.is_locked) == (None, False)
            assert full.last_pull_ago_ms is not None
            assert full.last_pull_ago_ms < 60_000
            assert sorted(call.queue_offset for call in told.calls) == [0, 1]
            assert all("in stands_at_the_gate" in call.stack for call in told.calls)
            assert not any(call.is_late for call in told.calls)
            without = await described(connection, "member")
            assert [call.stack for call in without.calls] == ["", ""]

            gate.open.set()

            async def is_committed() -> bool:
                one = await described(connection, "member", group="G", kind="member")
                [queue] = [q for q in one.queues if (q.topic, q.queue_id) == ("T", 0)]
                return queue.committed_offset == 5

            await until_async(is_committed)
            told = await described(connection, "member")
            assert told.calls == []
            [rates] = [rate for rate in told.rates if rate.topic == "T"]
            assert rates.pulled_per_s > 0
            assert rates.done_per_s == rates.pulled_per_s
            assert rates.failed_per_s == 0
            assert rates.process_ms > 0
            push.suspend()
            told = await described(connection, "member")
            assert told.is_suspended
            assert all(queue.is_paused for queue in told.queues)


async def test_a_listener_in_threads_tells_where_its_threads_are(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits_for_a_lock() -> None:
        inside.set()
        go_on.wait(20)

    def listener(messages: list[ReceivedMessage]) -> None:
        waits_for_a_lock()

    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 1)
        async with pushing(namesrv, listener, consume_timeout_ms=20) as push:
            await push.subscribe("T")
            await until(inside.is_set)

            async def is_late() -> bool:
                told = await described(connection, "member", with_stacks=True)
                return any(call.is_late for call in told.calls)

            await until_async(is_late)
            told = await described(connection, "member", with_stacks=True)
            assert "in waits_for_a_lock" in told.calls[0].stack
            assert "in listener" in told.calls[0].stack
            go_on.set()


async def test_a_consumer_in_order_tells_its_locks(tmp_path: Path) -> None:
    gate = Gate()
    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 3)
        async with pushing(namesrv, gate, orderly=True) as push:
            await push.subscribe("T")
            await until(lambda: gate.begun)
            told = await described(connection, "member")
            assert told.role == "push_orderly"
            [queue] = [q for q in told.queues if (q.topic, q.queue_id) == ("T", 0)]
            assert queue.is_locked
            assert queue.lock_number
            assert (queue.cached_count, queue.call_count) == (3, 1)
            gate.open.set()


async def test_a_pull_consumer_tells_what_it_has_fetched(tmp_path: Path) -> None:
    options = PullConsumerOptions(client_id="puller", rebalance_delay_ms=1)
    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 4)
        async with PullConsumer(namesrv, "G", options=options) as pull:
            await pull.subscribe("T")
            got: list[ReceivedMessage] = []
            while not got:
                got = await pull.poll(1_000)
            await pull.commit()
            pull.pause([QueueRef("T", 1, "g1")])
            told = await described(connection, "puller")
            assert told.role == "pull"
            zero, one = told.queues
            assert (zero.committed_offset, zero.next_offset) == (len(got), len(got))
            assert not zero.is_paused
            assert one.is_paused
            assert told.rates[0].pulled_per_s > 0
            await send(namesrv, 2)

            async def has_fetched() -> bool:
                return (await described(connection, "puller")).queues[0].cached_count > 0

            await until_async(has_fetched)
            [message_id] = await send(namesrv, 1)
            with pytest.raises(QuestionUnsupported):
                await clients.verify_message(connection, message_id, "G", "puller")


async def test_a_producer_tells_what_it_sends_also_while_it_sends(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, _, connection):
        options = ProducerOptions(client_id="maker", batch_count_max=2)
        async with Producer(namesrv, options=options) as producer:
            with pytest.raises(ClientNotFound):
                await clients.describe_clients(connection, "maker")
            await producer.send_and_wait(Message("T", b"0"))
            stop = asyncio.Event()

            async def keep_sending() -> int:
                count = 1
                while not stop.is_set():
                    await asyncio.gather(
                        *(producer.send_and_wait(Message("T", b"%d" % n)) for n in range(20))
                    )
                    count += 20
                return count

            sending = asyncio.create_task(keep_sending())
            for _ in range(30):
                told = await described(connection, "maker")
                assert (told.role, told.group) == ("producer", "")
            stop.set()
            count = await sending
            told = await described(connection, "maker", kind="producer")
            [one] = told.sending
            assert (one.broker_group, one.is_connected) == ("g1", True)
            assert (one.stored_count, one.failed_count) == (count, 0)
            assert (one.waiting_count, one.in_flight_count) == (0, 0)
            assert told.rates[0].done_per_s > 0
            [listed] = await clients.list_clients(connection, "producer", "", 10)
            assert listed.client_id == "maker"


async def test_a_consumer_that_receives_tells_what_it_holds(tmp_path: Path) -> None:
    gate = Gate()
    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 6)
        async with pushing(namesrv, gate, consume_mode=ConsumeMode.POP, concurrency=2) as push:
            await push.subscribe("T")
            await until(lambda: gate.begun == 2)
            await joined(connection)
            told = await described(connection, "member", with_stacks=True)
            assert told.role == "push_pop"
            [held] = told.leases
            assert (held.broker_group, held.held_count, held.call_count) == ("g1", 6, 2)
            assert held.held_bytes > 6 * 90
            assert "in stands_at_the_gate" in told.calls[0].stack
            [message_id] = await send(namesrv, 1, "T")
            gate.open.set()
            assert (await verified(connection, message_id)).verdict == "success"


async def test_a_simple_consumer_tells_what_it_has_not_acknowledged(tmp_path: Path) -> None:
    options = SimpleConsumerOptions(client_id="simple")
    async with cluster(tmp_path) as (namesrv, _, connection):
        await send(namesrv, 5)
        async with SimpleConsumer(namesrv, "G", options=options) as consumer:
            await consumer.subscribe("T")
            got: list[ReceivedMessage] = []
            while len(got) < 5:
                got += await consumer.receive()
            await consumer.ack_many(got[:2])
            await joined(connection, "simple")
            told = await described(connection, "simple")
            assert told.role == "simple"
            assert [one.topic for one in told.subscriptions] == ["T"]
            [held] = told.leases
            assert (held.broker_group, held.held_count) == ("g1", 3)
            assert held.last_receive_ago_ms is not None
            assert held.call_count == told.call_count == len(told.calls) > 0
            assert sum(call.message_count for call in told.calls) == 3
            [rates] = told.rates
            assert rates.pulled_per_s > rates.done_per_s > 0


async def test_a_client_that_is_just_joining_is_asked_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group is being stored, which may take long; it is listed already."""
    ensure_group, stored = GroupCoordinator.ensure_group, asyncio.Event()

    async def stored_late(*arguments: Any) -> None:
        await stored.wait()
        await ensure_group(*arguments)

    monkeypatch.setattr(GroupCoordinator, "ensure_group", stored_late)
    async with (
        cluster(tmp_path) as (namesrv, _, connection),
        pushing(namesrv, lambda _: None) as consumer,
    ):
        subscribing = asyncio.create_task(consumer.subscribe("T"))
        await joined(connection)
        asking = asyncio.create_task(described(connection, "member"))
        await asyncio.wait([asking], timeout=0.1)
        stored.set()
        assert (await asking).client_id == "member"
        await subscribing


async def test_a_simple_consumer_tells_where_its_messages_are_in_work(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def works_slowly(consumer: SimpleConsumer) -> None:
        messages = await consumer.receive()
        await gate.wait()
        await consumer.ack_many(messages)

    options = SimpleConsumerOptions(client_id="simple")
    async with (
        cluster(tmp_path) as (namesrv, _, connection),
        SimpleConsumer(namesrv, "G", options=options) as consumer,
    ):
        await consumer.subscribe("T")
        await joined(connection, "simple")
        working = asyncio.create_task(works_slowly(consumer))
        await send(namesrv, 1)
        await until(lambda: list(consumer._held.parts(0.0)))
        shown = await command(namesrv, "client", "stacks", "simple")
        assert "simple of group G: 1 receive has messages in work" in shown.output
        assert "in works_slowly" in shown.output
        shown = await command(namesrv, "client", "info", "simple", "--stacks")
        assert "receives in work" in shown.output
        assert "in works_slowly" in shown.output
        gate.set()
        await working
        shown = await command(namesrv, "client", "stacks", "simple")
        assert "simple of group G: 0 receives have messages in work" in shown.output


# --- consume a message ----------------------------------------------------------------------------


async def test_a_listener_consumes_a_message_that_it_is_asked_to(tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []
    answers: dict[bytes, object] = {b"1": ConsumeResult.LATER, b"2": Later(delay_level=3)}

    async def finds_no_customer(messages: list[ReceivedMessage]) -> object:
        got.append((messages[0].topic, messages[0].body))
        if messages[0].body == b"3":
            raise ValueError("no such customer")
        return answers.get(messages[0].body)

    async with cluster(tmp_path) as (namesrv, broker, connection):
        first = await send(namesrv, 4)
        await pass_by(broker, 4)
        async with pushing(namesrv, finds_no_customer) as push:
            await push.subscribe("T")
            await joined(connection)
            results = [await verified(connection, message_id) for message_id in first]
            assert [one.verdict for one in results] == ["success", "later", "later", "exception"]
            assert results[0].text == ""
            assert "ConsumeResult.LATER" in results[1].text
            assert "delay_level=3" in results[2].text
            assert results[3].text.endswith("ValueError: no such customer")
            assert "in finds_no_customer" in results[3].text
            assert "listener.py" not in results[3].text
            assert not any(one.is_orderly for one in results)
            assert got == [("T", b"%d" % n) for n in range(4)]
            told = await described(connection, "member")
            assert [rate for rate in told.rates if rate.done_per_s or rate.failed_per_s] == []
            position = await broker.committed("G", "T", 0)
            assert position is not None
            assert position.offset == 4
            [elsewhere] = await send(namesrv, 1, "U")
            with pytest.raises(TopicNotSubscribed):
                await verified(connection, elsewhere)


async def test_a_listener_in_order_and_one_in_threads_are_asked_alike(tmp_path: Path) -> None:
    def plain(messages: list[ReceivedMessage]) -> None:
        assert messages[0].body == b"0", "another message"

    async with cluster(tmp_path) as (namesrv, broker, connection):
        good, bad = await send(namesrv, 2)
        await pass_by(broker, 2)
        async with pushing(namesrv, plain, orderly=True) as push:
            await push.subscribe("T")
            await joined(connection)
            result = await verified(connection, good)
            assert (result.verdict, result.is_orderly) == ("success", True)
            result = await verified(connection, bad)
            assert result.verdict == "exception"
            assert "in plain" in result.text
            assert "AssertionError: another message" in result.text


async def test_a_slow_listener_is_not_waited_for_and_goes_on(tmp_path: Path) -> None:
    go_on, ended = asyncio.Event(), asyncio.Event()

    async def slow(messages: list[ReceivedMessage]) -> None:
        await go_on.wait()
        ended.set()

    async with cluster(tmp_path) as (namesrv, broker, connection):
        [message_id] = await send(namesrv, 1)
        await pass_by(broker, 1)
        async with pushing(namesrv, slow) as push:
            await push.subscribe("T")
            await joined(connection)
            with pytest.raises(QuestionTimeout):
                await verified(connection, message_id, timeout_ms=30)
            assert not ended.is_set()
            assert (await described(connection, "member")).role == "push"
            go_on.set()
            await ended.wait()


async def test_what_a_client_has_switched_off_is_refused(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.append(messages[0].body)

    async with cluster(tmp_path) as (namesrv, broker, connection):
        [message_id] = await send(namesrv, 1)
        await pass_by(broker, 1)
        async with pushing(namesrv, listener, remote_verify_enable=False) as push:
            await push.subscribe("T")
            await joined(connection)
            assert (await described(connection, "member")).role == "push"
            with pytest.raises(RemoteQuestionsOff):
                await verified(connection, message_id)
        # Under another name: the broker may know the first one for a moment more.
        off = {"remote_questions_enable": False, "client_id": "off"}
        async with pushing(namesrv, listener, **off) as push:
            await push.subscribe("T")
            await joined(connection, "off")
            for asked in (
                described(connection, "off"),
                clients.verify_message(connection, message_id, "G", "off"),
            ):
                with pytest.raises(RemoteQuestionsOff):
                    await asked
    assert got == []


# --- clients of other programs, and hostile ones --------------------------------------------------


class RawMember:
    """A membership stream of a stub."""

    def __init__(self, broker: LiveBroker, client_id: str) -> None:
        self._broker = broker
        self.client_id = client_id
        self.stream = broker.stub.JoinGroup()

    async def join(self, known: list[Any]) -> None:
        subscription = pb.Subscription(topic="T")
        request = pb.JoinGroupRequest(
            group="G",
            client_id=self.client_id,
            subscriptions=[subscription],
            known_questions=known,
        )
        await self.stream.write(request)
        response = await self.stream.read()
        assert isinstance(response, pb.JoinGroupResponse)
        assert response.members

    async def question(self) -> pb.ClientQuestion:
        while True:
            response = await self.stream.read()
            assert isinstance(response, pb.JoinGroupResponse), "the stream has ended"
            if response.HasField("question"):
                assert not response.members
                return response.question

    async def answer(self, question: pb.ClientQuestion, **answer: Any) -> None:
        request = {"client_id": self.client_id, "question_id": question.question_id, **answer}
        await self._broker.stub.AnswerQuestion(pb.AnswerQuestionRequest(**request))


def asking(connection: Connection, client_id: str) -> asyncio.Task[ClientDescriptionView]:
    return asyncio.create_task(described(connection, client_id))


async def test_a_client_that_names_no_kinds_is_asked_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker, connection):
        old = RawMember(broker, "old")
        await old.join([])
        with pytest.raises(QuestionUnsupported):
            await described(connection, "old")
        lane = await broker.lane()
        await lane.send(("T", 0, [b"x"]))
        with pytest.raises(InvalidRequest):  # a producer without a name has none to be asked by
            await described(connection, "", kind="producer")
        old.stream.cancel()
        [message_id] = await send(namesrv, 1)
        with pytest.raises(ClientNotFound):
            await clients.verify_message(connection, message_id, "G", "nobody")


async def test_nobody_but_the_client_that_was_asked_can_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, broker, connection):
        asked, other = RawMember(broker, "asked"), RawMember(broker, "other")
        await asked.join(KNOWN)
        await other.join(KNOWN)
        task = asking(connection, "asked")
        question = await asked.question()
        said = pb.ClientDescription(version="7")
        for wrong, error in (
            (other.answer(question, description=said), QuestionNotFound),
            (asked.answer(question), InvalidRequest),
            (asked.answer(question, result=pb.ListenerResult()), InvalidRequest),
            (asked.answer(question, question_id=b"x", description=said), QuestionNotFound),
            (
                asked.answer(question, description=pb.ClientDescription(version="x" * (1 << 20))),
                LimitExceeded,
            ),
        ):
            assert isinstance(await refusal(wrong), error)
        await asked.answer(question, description=said)
        assert (await task).version == "7"
        assert isinstance(await refusal(asked.answer(question, description=said)), QuestionNotFound)

        task = asking(connection, "asked")
        # An error of the broker's own: a client cannot raise it in the broker's name.
        hostile = to_proto(LimitExceeded("x"))
        await asked.answer(await asked.question(), refused=hostile)
        with pytest.raises(InternalError):
            await task
        for stream in (asked.stream, other.stream):
            stream.cancel()


async def test_a_client_that_dies_before_it_answers_is_not_waited_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, broker, connection):
        dying = RawMember(broker, "dying")
        await dying.join(KNOWN)
        task = asking(connection, "dying")
        await dying.question()
        dying.stream.cancel()
        with pytest.raises(ClientGone) as gone:
            await task
        assert gone.value.retry is Retry.LATER

        lane = await broker.lane()
        records, segments = batch(("T", 0, [b"x"]))
        request = pb.SendStreamRequest(
            batch_id=1,
            records=records,
            segments=segments,
            client_id="maker",
            known_questions=KNOWN[:1],
        )
        await lane.call.write(request)
        await lane.result()
        task = asking(connection, "maker")
        response = await lane.call.read()
        assert isinstance(response, pb.SendStreamResponse)
        assert response.WhichOneof("kind") == "question"
        lane.call.cancel()
        with pytest.raises(ClientGone):
            await task


async def test_bad_requests_are_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker, connection):
        [message_id] = await send(namesrv, 1)
        for request, name in (
            (pb.DescribeClientRequest(client_id=""), "INVALID_REQUEST"),
            (pb.DescribeClientRequest(client_id="x\n"), "INVALID_REQUEST"),
            (pb.DescribeClientRequest(client_id="x", group="a b"), "GROUP_NAME_INVALID"),
            (pb.DescribeClientRequest(client_id="x", group="G"), "CLIENT_NOT_FOUND"),
            (pb.DescribeClientRequest(client_id="x"), "CLIENT_NOT_FOUND"),
        ):
            error = await refusal(broker.admin.DescribeClient(request))
            assert error.name() == name, request
        member = RawMember(broker, "c")
        await member.join(KNOWN)
        too_long = pb.DescribeClientRequest(group="G", client_id="c", timeout_ms=60_001)
        assert (await refusal(broker.admin.DescribeClient(too_long))).name() == "INVALID_REQUEST"
        member.stream.cancel()
        for verify, name in (
            (pb.VerifyMessageRequest(client_id="c", message_id=message_id), "GROUP_NAME_INVALID"),
            (pb.VerifyMessageRequest(group="G", message_id=message_id), "INVALID_REQUEST"),
            (pb.VerifyMessageRequest(group="G", client_id="c"), "MESSAGE_ID_INVALID"),
        ):
            assert (await refusal(broker.admin.VerifyMessage(verify))).name() == name, verify
        with pytest.raises(MessageIdInvalid):
            await clients.verify_message(connection, "nonsense", "G", "c")
        with pytest.raises(MessageNotFound):
            await clients.verify_message(connection, "g1/999999999", "G", "c")


async def test_a_fail_over_fails_the_question_and_the_new_writer_is_asked(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,)) as group,
        Connection(namesrv) as connection,
    ):
        await group.all_in_sync(0, 1)
        await group[0].client.put_topic("T", 1)
        async with pushing(namesrv, gate) as push:
            await push.subscribe("T")
            await joined(connection)
            [message_id] = await send(namesrv, 1)
            await until(lambda: gate.begun)
            asked = asyncio.create_task(verified(connection, message_id))
            await until(lambda: gate.begun == 2)
            await group[0].retire()
            with pytest.raises(CometError) as refused:
                await asked
            assert refused.value.retry is not Retry.NEVER

            refusals: list[CometError] = []

            async def is_known() -> bool:
                try:
                    return (await described(connection, "member")).role == "push"
                except CometError as error:
                    refusals.append(error)
                    return False

            await until_async(is_known)
            assert all(error.retry is not Retry.NEVER for error in refusals), refusals
            gate.open.set()


# --- the command ----------------------------------------------------------------------------------


async def test_the_command_shows_what_a_client_says(tmp_path: Path) -> None:
    gate = Gate()
    async with cluster(tmp_path) as (namesrv, _, connection):
        run = partial(command, namesrv)
        [message_id] = await send(namesrv, 1)
        async with pushing(namesrv, gate) as push:
            await push.subscribe("T")
            await until(lambda: gate.begun)
            await joined(connection)
            shown = await run("client", "info", "member")
            assert shown.exit_code == 0, shown.output
            for words in (
                "client                member",
                "push",
                "queues",
                "listener calls that run",
            ):
                assert words in shown.output
            assert "in stands_at_the_gate" not in shown.output
            assert "consume_timeout_ms" not in shown.output.replace(" ", "_")
            shown = await run("client", "info", "member", "--wide", "--stacks")
            assert "in stands_at_the_gate" in shown.output
            assert "concurrency" in shown.output
            shown = await run("client", "info", "member", "--output", "json")
            assert json.loads(shown.output)[0]["client_id"] == "member"
            shown = await run("client", "stacks", "member")
            assert "member of group G: 1 listener call runs" in shown.output
            assert "in stands_at_the_gate" in shown.output
            shown = await run("client", "info", "nobody")
            assert shown.exit_code == 1
            assert "CLIENT_NOT_FOUND" in shown.stderr

            verify = ("message", "verify", message_id, "--group", "G", "--client", "member")
            shown = await run(*verify, "--timeout", "0.05")
            assert shown.exit_code == 1
            assert "QUESTION_TIMEOUT" in shown.stderr
            gate.open.set()
            shown = await run(*verify)
            assert shown.exit_code == 0
            assert "success" in shown.output

        async def fails(messages: list[ReceivedMessage]) -> None:
            raise ValueError("no such customer")

        async with pushing(namesrv, fails, client_id="failing") as push:
            await push.subscribe("T")
            await joined(connection, "failing")
            shown = await run(*verify[:-1], "failing")
            assert shown.exit_code == 3
            assert "ValueError: no such customer" in shown.output
