"""Single messages beside the lines, which meet the killed writer half-way: a dead letter, a
delayed and a recalled message, a transaction whose producer dies, a received job, a request.

Each case opens its clients, does its first part just before the kill, waits for that, and goes on
with the new writer. All topics are
in the broker group whose writer is killed. All clients write traces.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cometmq.admin import dead_letters, groups, message_trace, ops
from cometmq.admin.connection import Connection, until
from cometmq.admin.message_trace import (
    CHECKED,
    CONSUMED,
    DEAD_LETTER,
    DELIVERED,
    PRODUCED,
    RECALLED,
    RESENT,
    RETRIED,
    STORED,
    TRACE,
)
from cometmq.admin.views import DeadLetterView
from cometmq.client import (
    Message,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SimpleConsumer,
    TransactionProducer,
    TransactionState,
)
from cometmq.errors import CometError, MessageNotFound, TopicNotFound
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import broker_pb2
from examples.roundtrip.checker import Report, WriterChange
from examples.roundtrip.process import MODULE, Worker, WorkerFailed, now_ms
from examples.roundtrip.stage import CONSUMER, PRODUCER, RECEIVER, WAIT_S_MAX, Calls, Stage, reading
from examples.roundtrip.timeline import Outcome, clock_text

RETRY_TIMES_MAX, RETRY_STEP_MS = 2, 2_000  # of the group whose listener fails
DELAY_MS = 8_000  # longer than the kill and the fail-over take, as a rule
TRACE_S_MAX = 60.0  # until the index has the last records
OK, FAILED = "ok", "failed"


# --- the cases ----------------------------------------------------------------------------------


async def dead_letter(stage: Stage, outcome: Outcome) -> None:
    """Its listener always fails; once it is mended, the dead letter is sent again, twice."""
    group, calls = "order_workers", Calls(is_mended=False)
    outcome.expected = (
        f"{RETRY_TIMES_MAX} retries, then %DLQ%{group}; its listener is mended, and gets it again"
    )
    policy = broker_pb2.RetryPolicy(
        kind=broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[RETRY_STEP_MS]
    )
    settings = broker_pb2.GroupSettings(
        group=group, retry_times_max=RETRY_TIMES_MAX, retry_policy=policy
    )
    await groups.put_group(stage.connection, settings)
    letters: list[DeadLetterView] = []

    async def listed() -> bool:
        """What ``cometmq dlq list`` shows."""
        try:
            read = dead_letters.read_dead_letters(stage.connection, group)
            letters[:] = [view async for view, _ in read]
        except TopicNotFound:
            letters.clear()
        return bool(letters)

    async def has_failed() -> bool:
        return bool(calls.failed)

    async with reading(stage, group, outcome.topic, calls):
        async with Producer(stage.namesrv, options=PRODUCER) as producer:
            await stage.begun.wait()
            message = Message(outcome.topic, b"an order that cannot be done yet")
            outcome.unique_id = (await producer.send_and_wait(message)).unique_id
        await stage.until(has_failed, "the first try")
        await stage.through_the_kill(outcome.name)
        await stage.until(listed, "the dead letter")
        found = [(one.unique_id, one.resent) for one in letters]
        outcome.expect(found == [(outcome.unique_id, False)], f"dead letters: {found}")
        calls.is_mended = True
        first = await dead_letters.resend(stage.connection, group, letters)
        second = await dead_letters.resend(stage.connection, group, letters)
        counts = (first.resent_count, second.resent_count)
        outcome.expect(counts == (1, 0), f"{counts} dead letters were sent again, not (1, 0)")
        await stage.until(calls.any_done, "the dead letter that was sent again")
    await listed()
    marks = [one.resent for one in letters]
    outcome.expect(marks == [True], f"dead letters that are marked as sent again: {marks}")
    # Once more when the commit was lost with the killed writer: it stays one dead letter.
    outcome.expect(len(calls.failed) > RETRY_TIMES_MAX, f"it failed {len(calls.failed)} times")
    outcome.expect(len(calls.done) == 1, f"it was done {len(calls.done)} times")
    outcome.happened = (
        f"it failed {len(calls.failed)} times and became a dead letter; it was listed, sent again, "
        "and done"
    )


async def delayed(stage: Stage, outcome: Outcome) -> None:
    """Due after the fail-over, as a rule; else the new writer delivers it when it is there."""
    calls = Calls()
    async with reading(stage, "reminder_readers", outcome.topic, calls):
        async with Producer(stage.namesrv, options=PRODUCER) as producer:
            await stage.begun.wait()
            due_ms = now_ms() + DELAY_MS
            outcome.expected = f"delivered at {clock_text(due_ms)}, not before"
            message = Message(outcome.topic, b"a reminder", deliver_at_ms=due_ms)
            outcome.unique_id = (await producer.send_and_wait(message)).unique_id
        change = await stage.through_the_kill(outcome.name)
        await stage.until(calls.any_done, "the delayed message")
    [stored_ms] = {message.store_time_ms for message in calls.messages}
    late_ms = stored_ms - due_ms
    outcome.expect(late_ms >= 0, f"it was delivered {-late_ms} ms too early")
    outcome.expect(calls.done[0] >= due_ms, "it was consumed before it was due")
    calls.expect_once(outcome, change)
    why = " (no writer when it was due)" if change.from_ms <= due_ms < change.to_ms else ""
    outcome.happened = (
        f"delivered {late_ms} ms after that time{why}, consumed {calls.done[0] - due_ms} ms after"
    )


async def recalled(stage: Stage, outcome: Outcome) -> None:
    """Another message of the same queue is due after it, and is consumed: it is not to come any
    more then.
    """
    calls = Calls()
    async with reading(stage, "guests", outcome.topic, calls):
        async with Producer(stage.namesrv, options=PRODUCER) as producer:
            await stage.begun.wait()
            due_ms = now_ms() + DELAY_MS
            outcome.expected = f"due at {clock_text(due_ms)}, recalled before, and seen by nobody"
            message = Message(outcome.topic, b"the wrong invitation", deliver_at_ms=due_ms)
            receipt = await producer.send_and_wait(message)
            outcome.unique_id = receipt.unique_id
            right = Message(outcome.topic, b"the right invitation", deliver_at_ms=due_ms + 1)
            await producer.send_and_wait(right)
            is_in_time = await producer.recall(receipt.recall_handle)
        outcome.expect(is_in_time, "the recall came too late")
        change = await stage.through_the_kill(outcome.name)
        await stage.until(calls.any_done, "the message behind the recalled one")
    bodies = {message.body for message in calls.messages}
    outcome.expect(bodies == {right.body}, f"the group got {bodies}")
    calls.expect_once(outcome, change)
    outcome.happened = "recalled in time; the group got only the message that was due after it"


async def transaction(stage: Stage, outcome: Outcome) -> None:
    """A process stores a half message, does its work, and is killed before the commit."""
    outcome.expected = "its producer is killed before the commit; a member of its group commits"
    group, calls, asked = "cashiers", Calls(), list[str]()
    done = stage.folder / "payment.done"  # by the producer that dies

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.unique_id)
        return TransactionState.COMMIT if done.exists() else TransactionState.ROLLBACK

    words = ("--namesrv", stage.namesrv, "--topic", outcome.topic, "--group", group)
    dying = Worker(stage.folder, "cashier", MODULE, "pay", *words, "--done", str(done))

    async def is_waiting() -> bool:
        return dying.running and bool(dying.latest())

    async def has_paid() -> bool:
        return dying.running and bool(dying.latest()["unique_id"])

    try:
        await stage.until(is_waiting, "the producer that is to die")
        await stage.begun.wait()
        dying.signal(signal.SIGUSR1)
        await stage.until(has_paid, "the half message")
        outcome.unique_id = dying.latest()["unique_id"]
        await stage.until(lambda: is_traced(stage, outcome), "the trace of the half message")
    finally:
        dying.kill()  # with SIGKILL
    outcome.note("its producer is killed")
    async with (
        TransactionProducer(stage.namesrv, group, check, topics=[outcome.topic], options=PRODUCER),
        reading(stage, "bookkeepers", outcome.topic, calls),
    ):
        change = await stage.through_the_kill(outcome.name)
        await stage.until(calls.any_done, "the committed message")
    outcome.expect(set(asked) == {outcome.unique_id}, f"the group was asked about {asked}")
    calls.expect_once(outcome, change)
    outcome.happened = f"the other member was asked, committed, and it was consumed {times(calls)}"


def times(calls: Calls) -> str:
    return "once" if len(calls.done) == 1 else f"{len(calls.done)} times"


async def is_traced(stage: Stage, outcome: Outcome) -> bool:
    """What the process that dies has told of its send is stored."""
    try:
        events = await message_trace.trace_message(
            stage.connection, outcome.unique_id, outcome.topic
        )
    except MessageNotFound:
        return False
    return any((event.event, event.source) == (PRODUCED, TRACE) for event in events)


async def received(stage: Stage, outcome: Outcome) -> None:
    """With a group of mode POP: taken before the kill, acknowledged after it."""
    outcome.expected = "received before the kill, acknowledged after it, nothing left to do"
    group = "job_workers"
    async with SimpleConsumer(stage.namesrv, group, options=RECEIVER) as consumer:
        await consumer.subscribe(outcome.topic)
        async with Producer(stage.namesrv, options=PRODUCER) as producer:
            await stage.begun.wait()
            message = Message(outcome.topic, b"a job")
            outcome.unique_id = (await producer.send_and_wait(message)).unique_id
        got = await consumer.receive(1, invisible_ms=round(WAIT_S_MAX * 1_000))
        if not got:
            raise TimeoutError("the message was not received")
        before = await ops.group_progress(stage.connection, group)
        await stage.through_the_kill(outcome.name)
        await consumer.ack(got[0])
        again = await consumer.receive(wait_ms=0)
    after = await ops.group_progress(stage.connection, group)
    outcome.expect(got[0].unique_id == outcome.unique_id, "another message was received")
    outcome.expect(not again, f"{len(again)} messages came after the acknowledgement")
    lags = (before.lag_count, after.lag_count)
    outcome.expect(lags == (1, 0), f"the group's lag was {lags} before and after, not (1, 0)")
    outcome.happened = f"the new writer took the acknowledgement; the group's lag is {lags[1]}"


async def request(stage: Stage, outcome: Outcome) -> None:
    """Asked before the kill; the consumer replies after it."""
    outcome.expected = "asked before the kill, replied to after it, the reply comes"
    asked: list[ReceivedMessage] = []

    async def answer(messages: list[ReceivedMessage]) -> None:
        asked.extend(messages)
        await stage.killed.wait()
        for message in messages:
            await consumer.reply(message, b"42")

    async def has_asked() -> bool:
        return bool(asked)

    consumer = PushConsumer(stage.namesrv, "price_service", answer, options=CONSUMER)
    async with consumer, Producer(stage.namesrv, options=PRODUCER) as producer:
        await consumer.subscribe(outcome.topic)
        await stage.begun.wait()
        message = Message(outcome.topic, b"the price?")
        replying = asyncio.create_task(producer.request(message, WAIT_S_MAX))
        try:
            await stage.until(has_asked, "the request")
            outcome.unique_id = asked[0].unique_id
            change = await stage.through_the_kill(outcome.name)
            reply = await replying
        finally:
            await stop_all([replying])
        came_ms = now_ms()
        outcome.note("the reply has come")
    outcome.expect(reply.body == b"42", f"the reply is {reply.body!r}")
    outcome.happened = f"the reply came {max(came_ms - change.to_ms, 0)} ms after the new writer"


# --- all of them --------------------------------------------------------------------------------

Case = Callable[[Stage, Outcome], Awaitable[None]]
# What runs, its topic, the events that its trace has to have, and those that it must not have.
CASES: dict[str, tuple[Case, str, tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "dead letter": (
        dead_letter,
        "orders",
        (
            (PRODUCED, OK),
            (STORED, OK),
            *((CONSUMED, FAILED),) * (RETRY_TIMES_MAX + 1),
            *((RETRIED, ""),) * RETRY_TIMES_MAX,
            (DEAD_LETTER, ""),
            (RESENT, ""),
            (CONSUMED, OK),
        ),
        (),
    ),
    "delayed": (delayed, "reminders", ((PRODUCED, OK), (DELIVERED, OK), (CONSUMED, OK)), ()),
    "recalled": (
        recalled,
        "invitations",
        ((PRODUCED, OK), (RECALLED, OK)),
        (STORED, DELIVERED, CONSUMED),
    ),
    "transaction": (
        transaction,
        "payments",
        ((PRODUCED, OK), (CHECKED, "commit"), (STORED, OK), (CONSUMED, OK)),
        (),
    ),
    "received": (received, "jobs", ((PRODUCED, OK), (STORED, OK), (CONSUMED, OK)), ()),
    "request": (request, "questions", ((PRODUCED, OK), (STORED, OK), (CONSUMED, OK)), ()),
}


class Running:
    """All cases, each in a task of its own."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._change: WriterChange | None = None
        self._outcomes: list[Outcome] = []
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """The cases open their clients; nothing is sent yet."""
        for name, (case, topic, wanted, unwanted) in CASES.items():
            outcome = Outcome(name, topic, wanted, unwanted)
            self._outcomes.append(outcome)
            self._tasks.append(asyncio.create_task(_play(case, self._stage, outcome), name=name))

    async def begin(self) -> None:
        """Returns when each case has done its first part, or has failed."""
        self._stage.begun.set()
        await self._stage.ready.wait()

    def killed(self) -> None:
        self._stage.killed.set()

    def go_on(self, change: WriterChange) -> None:
        """There is a new writer."""
        self._change = change
        self._stage.go_on(change)

    async def end(self, report: Report) -> None:
        """Waits for the cases, and reports what became of them."""
        await asyncio.gather(*self._tasks)
        for outcome in self._outcomes:
            report.cases.append(outcome.block(self._change))
            report.complaints += [f"{outcome.name}: {complaint}" for complaint in outcome.wrong]

    async def stop(self) -> None:
        await stop_all(self._tasks)


@asynccontextmanager
async def prepared(
    connection: Connection, namesrv: str, folder: Path, broker_group: str
) -> AsyncIterator[Running]:
    """With the topics of the cases. What still runs at the end of the block is stopped."""
    for _, topic, _, _ in CASES.values():
        await ops.create_topic(
            connection,
            topic,
            read_queue_count=1,
            write_queue_count=1,
            broker_groups=(broker_group,),
        )
    running = Running(Stage(connection, namesrv, folder, CASES))
    try:
        yield running
    finally:
        await running.stop()


async def _play(case: Case, stage: Stage, outcome: Outcome) -> None:
    """What goes wrong is part of the outcome: the other cases go on."""
    try:
        await case(stage, outcome)
    except (CometError, WorkerFailed, TimeoutError) as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        stage.is_ready(outcome.name)
    await until(lambda: _has_all(stage, outcome), TRACE_S_MAX)
    outcome.expect_events()


async def _has_all(stage: Stage, outcome: Outcome) -> bool:
    """Whether the trace has what is wanted; its clients have ended."""
    with suppress(CometError):  # not there yet, or its broker does not answer
        outcome.events = await message_trace.trace_message(
            stage.connection, outcome.unique_id, outcome.topic
        )
    return not outcome.missing()
