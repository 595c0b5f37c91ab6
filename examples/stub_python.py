"""CometMQ with bare stubs: grpcio and the generated ``cometmq.v1``, nothing else of CometMQ.

    python -m examples.stub_python --namesrv 127.0.0.1:9876 --topic Hello

Finds the topic's route, sends, reads, holds where nothing is left until a second task sends more,
commits, reads the commit back, reads in order under a lock, goes on where the group is reset to,
sends one message back until it is a dead letter, receives and acknowledges (POP), sends messages
for later and takes one back, ends transactions, one of them when the broker asks about it, and
shows what a refusal says. The topic has to exist (``cometmq topic create Hello``).
``stub_node.mjs`` is the same for Node.js; the contract is ``proto/cometmq/v1``, and
docs/protocol.md tells what its messages share. In a project of your own generate the stubs with
``python -m grpc_tools.protoc`` from those files.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from cometmq.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    hold_pb2,
    hold_pb2_grpc,
    namesrv_pb2,
    namesrv_pb2_grpc,
)

TIMEOUT_S = 3.0  # of a call; without one a call waits for ever
HOLD_MS = 10_000
POLL_S = 0.5  # between two pulls where no pullhold can be asked
# gRPC's own limit, 4 MiB, is too small for an answer with one large message: it would be asked for
# again and again.
OPTIONS = [("grpc.max_receive_message_length", 64 * 1024 * 1024)]

Messages = Sequence[broker_pb2.StoredMessage]


def refusal(error: grpc.aio.AioRpcError) -> common_pb2.Error | None:
    """What CometMQ says about a failed call; None: gRPC itself failed, e.g. nobody answered."""
    for key, value in error.trailing_metadata():
        if key == "cometmq-error-bin" and isinstance(value, bytes):
            return common_pb2.Error.FromString(value)
    return None


# --- where things are -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One broker group's share of a topic, with all that reading and writing there needs.

    Queue numbers, offsets and commits belong to the broker group: a topic on two broker groups has
    a queue 0 on each, and a consumer reads both.
    """

    topic: str
    broker_group: str
    broker: broker_pb2_grpc.BrokerServiceAsyncStub
    admin: broker_pb2_grpc.BrokerAdminServiceAsyncStub  # for operators: see reset()
    pullhold: hold_pb2_grpc.HoldServiceAsyncStub | None


async def find(namesrv: str, topic: str, stack: AsyncExitStack) -> Place:
    """A place where the topic can be written; its channels stay open as long as ``stack``."""

    async def channel(address: str) -> grpc.aio.Channel:
        return await stack.enter_async_context(grpc.aio.insecure_channel(address, OPTIONS))

    # Any name server will do; each knows the whole cluster. A real client asks the next one when
    # the first does not answer, and asks again from time to time: writers change.
    names = namesrv_pb2_grpc.NameServiceStub(await channel(namesrv.split(";")[0]))
    request = namesrv_pb2.QueryRouteRequest(topic=topic)
    route = (await names.QueryRoute(request, timeout=TIMEOUT_S)).route
    for group in route.groups:
        queue_ids = range(group.topic.read_queue_count)
        print(f"route: {topic} on broker group {group.broker_group}, queues {[*queue_ids]}")
    writable = [
        (group, member)
        for group in route.groups
        if group.topic.permission & 2  # 2: may be written, 4: may be read
        for member in group.members
        if member.role == common_pb2.MEMBER_ROLE_WRITER
    ]
    if not writable:
        raise LookupError(f"{topic}: no writer now; ask for the route again later")
    group, writer = writable[0]  # a real producer takes turns
    # Those of another cluster need not know this broker. Several: take any, and the next after an
    # error. None: poll.
    holds_request = namesrv_pb2.ListPullholdsRequest(cluster=writer.cluster)
    addresses = (await names.ListPullholds(holds_request, timeout=TIMEOUT_S)).addresses
    print(f"route: writer {writer.address}, pullholds {[*addresses]}")
    return Place(
        topic,
        group.broker_group,
        broker_pb2_grpc.BrokerServiceStub(await channel(writer.address)),
        broker_pb2_grpc.BrokerAdminServiceStub(await channel(writer.internal_address)),
        hold_pb2_grpc.HoldServiceStub(await channel(addresses[0])) if addresses else None,
    )


# --- send -----------------------------------------------------------------------------------------


async def send(place: Place, *bodies: bytes, queue_id: int | None = None) -> broker_pb2.SentMessage:
    """Store messages together or not at all; where the last one is.

    Without an answer (UNAVAILABLE, DEADLINE_EXCEEDED) they may be stored or not. With a property
    UNIQ_KEY of your own in each, the same call made again within a minute stores nothing twice.
    """
    messages = [
        broker_pb2.OutgoingMessage(
            topic=place.topic,
            queue_id=queue_id,  # None: the broker takes one for the whole call
            body=body,
            tag="greeting",
            keys=[f"key-{number}"],
            properties={"language": "Python"},
        )
        for number, body in enumerate(bodies)
    ]
    request = broker_pb2.SendRequest(messages=messages)
    answer = await place.broker.Send(request, timeout=TIMEOUT_S)
    for sent in answer.sent:
        print(f"sent: {sent.message_id} to queue {sent.queue.queue_id} @ {sent.position.offset}")
    return answer.sent[-1]


# --- read -----------------------------------------------------------------------------------------


async def read(
    place: Place, queue: common_pb2.QueueRef, position: common_pb2.Position, *tags: str
) -> tuple[Messages, common_pb2.Position]:
    """The messages at a position, and the position to go on at; waits where there is nothing yet.

    No messages are no error: the wait was over, or the position had to be moved. Call it again.
    """
    pull = broker_pb2.PullRequest(
        queue=queue,
        position=position,
        filter=common_pb2.Filter(tags=tags),
        form=broker_pb2.MESSAGE_FORM_MESSAGES,
    )
    try:
        answer = await place.broker.Pull(pull, timeout=TIMEOUT_S)
        if answer.status == broker_pb2.PULL_STATUS_NOT_FOUND:
            pull.position.CopyFrom(answer.next_position)  # the same, with the generation
            answer = await hold(place, pull) or answer
    except grpc.aio.AioRpcError as error:
        refused = refusal(error)
        if refused is None or not refused.HasField("fence"):
            raise
        return [], refused.fence  # POSITION_FENCED: what stood there is gone, go on at the fence
    # Whatever the status: the next pull is at next_position. Broker and pullhold filter by a hash
    # of the tag, so that another tag may slip through; who asked for tags has to compare.
    wanted = [message for message in answer.messages if not tags or message.tag in tags]
    return wanted, answer.next_position


async def hold(place: Place, pull: broker_pb2.PullRequest) -> broker_pb2.PullResponse | None:
    """Wait at a pullhold until the pull finds something; None: it cannot be asked, so we slept."""
    if place.pullhold is not None:
        where = f"{pull.queue.topic} queue {pull.queue.queue_id} @ {pull.position.offset}"
        print(f"hold: {where} has nothing yet")
        request = hold_pb2.HoldRequest(broker_group=place.broker_group, pull=pull, hold_ms=HOLD_MS)
        try:  # the deadline is longer than the hold, else the call fails at its end
            held = await place.pullhold.Hold(request, timeout=HOLD_MS / 1000 + TIMEOUT_S)
            return held.pull
        except grpc.aio.AioRpcError as error:  # what is wrong with the pull the broker will tell
            print(f"hold: {error.code().name}: {error.details()}")
    await asyncio.sleep(POLL_S)
    return None


async def read_until(
    place: Place, position: common_pb2.Position, last: broker_pb2.SentMessage
) -> common_pb2.Position:
    """Print the messages of the queue up to one of them; the position behind it.

    A message that was sent is not always there at once: topics with asynchronous flush show it to
    readers when it is on disk, some milliseconds later.
    """
    while position.offset <= last.position.offset:
        messages, position = await read(place, last.queue, position, "greeting")
        for message in messages:
            # bit 0 of sys_flag: the producer compressed the body, see docs/format/record.md
            text = message.body[:40].decode(errors="replace")
            print(f"read: {message.queue_offset}: {text}")
    return position


async def read_matching(place: Place, queue: common_pb2.QueueRef, expression: str) -> list[int]:
    """Offsets of the messages for whose properties an SQL92 expression is true, from the first one
    on. One answer may have none of many: it looks at 1 MiB, then the next pull goes on.
    """
    pull = broker_pb2.PullRequest(
        queue=queue,
        filter=common_pb2.Filter(sql=expression),
        form=broker_pb2.MESSAGE_FORM_MESSAGES,
    )
    offsets: list[int] = []
    while True:
        answer = await place.broker.Pull(pull, timeout=TIMEOUT_S)
        if answer.status == broker_pb2.PULL_STATUS_NOT_FOUND:
            return offsets
        offsets += [message.queue_offset for message in answer.messages]
        pull.position.CopyFrom(answer.next_position)


# --- commit ---------------------------------------------------------------------------------------


def checked(result: broker_pb2.OffsetResult) -> broker_pb2.OffsetResult:
    """What became of one queue among many; the call itself went well."""
    if result.HasField("error"):
        raise RuntimeError(f"{result.error.name}: {result.error.message}")
    return result


async def committed(
    place: Place, group: str, queue: common_pb2.QueueRef
) -> broker_pb2.OffsetResult:
    """Where the group goes on in a queue, and the number of its newest reset there. Without a
    position it has never committed in the queue.
    """
    request = broker_pb2.QueryOffsetsRequest(group=group, queues=[queue])
    [result] = (await place.broker.QueryOffsets(request, timeout=TIMEOUT_S)).results
    return checked(result)


async def commit(
    place: Place,
    group: str,
    queue: common_pb2.QueueRef,
    position: common_pb2.Position,
    *,
    reset_number: int,
    lock_number: int = 0,
) -> broker_pb2.OffsetResult:
    """All messages before the position are done. The generation goes back as it came, and so does
    the number of the newest reset that we know.
    """
    item = broker_pb2.OffsetCommit(
        queue=queue, position=position, reset_number=reset_number, lock_number=lock_number
    )
    request = broker_pb2.CommitOffsetsRequest(group=group, commits=[item])
    [result] = (await place.broker.CommitOffsets(request, timeout=TIMEOUT_S)).results
    return result


# --- in order: one client at a time ---------------------------------------------------------------


async def lock(
    place: Place, group: str, client_id: str, queue: common_pb2.QueueRef
) -> broker_pb2.LockResult:
    """Lock a queue for 15 s, counted from when we ask. A client that goes on asks again each 5 s,
    and handles nothing once its time is over: another client may have the queue then.
    """
    request = broker_pb2.LockQueuesRequest(group=group, client_id=client_id, queues=[queue])
    [result] = (await place.broker.LockQueues(request, timeout=TIMEOUT_S)).results
    return result


async def unlock(place: Place, group: str, client_id: str, queue: common_pb2.QueueRef) -> None:
    """Commit before."""
    request = broker_pb2.UnlockQueuesRequest(group=group, client_id=client_id, queues=[queue])
    await place.broker.UnlockQueues(request, timeout=TIMEOUT_S)


async def read_in_order(
    place: Place, group: str, last: broker_pb2.SentMessage, reset_number: int
) -> None:
    """Two clients of a group want the same queue. Pulls and commits carry the number of the lock,
    so that who lost it does no harm.
    """
    queue = last.queue
    first = await lock(place, group, "client-1", queue)
    second = await lock(place, group, "client-2", queue)
    print(f"locked: client-1 has the queue, client-2 gets {second.error.name}")
    pull = broker_pb2.PullRequest(
        group=group,
        queue=queue,
        position=last.position,
        lock_number=first.lock_number,
        form=broker_pb2.MESSAGE_FORM_MESSAGES,
    )
    answer = await place.broker.Pull(pull, timeout=TIMEOUT_S)
    numbers = {"reset_number": reset_number, "lock_number": first.lock_number}
    done = await commit(place, group, queue, answer.next_position, **numbers)
    print(f"locked: client-1 reads {answer.count}, commits {checked(done).position.offset}")
    await unlock(place, group, "client-1", queue)
    second = await lock(place, group, "client-2", queue)
    late = await commit(place, group, queue, answer.next_position, **numbers)
    print(f"locked: client-2 has the queue, client-1 gets {late.error.name}")
    await unlock(place, group, "client-2", queue)


# --- a reset: an operator lets the group go on elsewhere ------------------------------------------


async def reset(
    place: Place, group: str, queue: common_pb2.QueueRef, offset: int, known: int
) -> None:
    """Let the group go on at an offset, and see what its members see. The call is for operators: it
    goes to the internal port, and where a cluster has a secret it needs the proof.

    Members that hold a JoinGroup stream hear of it within a second. A commit that was on its way is
    refused in any case, and the error says where to go on and the number that commits need from now
    on.
    """
    before = (await committed(place, group, queue)).position
    request = broker_pb2.ResetOffsetsRequest(
        group=group, topic=queue.topic, queue_ids=[queue.queue_id], offset=offset
    )
    await place.admin.ResetOffsets(request, timeout=TIMEOUT_S)
    late = await commit(place, group, queue, before, reset_number=known)
    fence = late.error.fence
    print(f"reset: a late commit gets {late.error.name}: go on at {fence.offset}")
    messages, position = await read(place, queue, fence)
    kept = await commit(place, group, queue, position, reset_number=late.reset_number)
    print(f"reset: {len(messages)} messages again, committed {checked(kept).position.offset}")


# --- what a group cannot do now -------------------------------------------------------------------


async def send_back(
    place: Place,
    group: str,
    queue: common_pb2.QueueRef,
    position: common_pb2.Position,
    delay_level: int,
) -> None:
    """The broker delivers the message again after the delay: 0 = 10 s, 30 s … by the number of its
    tries, 1 (1 s) to 18 (2 h), -1 = never, it is a dead letter now. Commit only after the answer.
    """
    item = broker_pb2.SendBackItem(queue=queue, position=position, delay_level=delay_level)
    request = broker_pb2.SendBackRequest(group=group, items=[item])
    [result] = (await place.broker.SendBack(request, timeout=TIMEOUT_S)).results
    if result.HasField("error"):
        raise RuntimeError(f"{result.error.name}: {result.error.message}")


async def fail_twice(
    place: Place, group: str, message: broker_pb2.StoredMessage, generation: int
) -> None:
    """One message fails, comes after a second once more, fails again, and is a dead letter then."""
    failed = common_pb2.Position(generation=generation, offset=message.queue_offset)
    await send_back(place, group, message.queue, failed, 1)
    # It comes in a topic of the group's own, which the group reads like the others.
    retries = common_pb2.QueueRef(topic=f"%RETRY%{group}")
    known = await committed(place, group, retries)
    position = known.position
    found: Messages = []
    while not found:
        found, position = await read(place, retries, position)
    again = found[0]
    first_topic = again.properties["RETRY_TOPIC"]
    print(f"again: {again.body.decode()} of {first_topic}, sent back {again.reconsume_times} times")

    failed = common_pb2.Position(generation=position.generation, offset=again.queue_offset)
    await send_back(place, group, retries, failed, -1)
    checked(await commit(place, group, retries, position, reset_number=known.reset_number))
    dead = common_pb2.QueueRef(topic=f"%DLQ%{group}")
    request = broker_pb2.QueryQueuesRequest(queues=[dead])
    [bounds] = (await place.broker.QueryQueues(request, timeout=TIMEOUT_S)).queues
    newest = common_pb2.Position(generation=bounds.generation, offset=bounds.max_offset - 1)
    found, _ = await read(place, dead, newest)
    print(f"dead letter: {found[0].body.decode()}")


# --- receive: each message for one member, for a time (POP) ---------------------------------------


async def receive(place: Place, group: str) -> None:
    """Members of a group with mode POP share all queues. A message is its member's until it is
    acknowledged, or its time is over: then it is delivered again, to any member.
    """
    request = broker_pb2.ReceiveRequest(
        group=group,
        subscriptions=[
            broker_pb2.Subscription(
                topic=place.topic, filter=common_pb2.Filter(sql="language IS NOT NULL")
            )
        ],
        max_count=2,
        invisible_ms=30_000,
        attempt_id="attempt-1",  # without an answer: the same call again, with the same id
        form=broker_pb2.MESSAGE_FORM_MESSAGES,
    )
    [run] = (await place.broker.Receive(request, timeout=TIMEOUT_S)).runs
    [same] = (await place.broker.Receive(request, timeout=TIMEOUT_S)).runs
    bodies = [message.body.decode() for message in run.messages]
    once_more = same.messages == run.messages and same.attempt == run.attempt
    print(f"received: {bodies}, attempt {run.attempt}, once more: {once_more}")
    run = same  # the handle of the newest answer counts

    # The work takes longer than its time: from now on there is another handle.
    item = broker_pb2.ChangeInvisibleTimeItem(
        messages=broker_pb2.AckItem(handle=run.handle), invisible_ms=60_000
    )
    longer = broker_pb2.ChangeInvisibleTimeRequest(group=group, items=[item])
    [changed] = (await place.broker.ChangeInvisibleTime(longer, timeout=TIMEOUT_S)).results
    items = [broker_pb2.AckItem(handle=handle) for handle in (run.handle, changed.handle)]
    done = broker_pb2.AckMessagesRequest(group=group, items=items)
    [late, _] = (await place.broker.AckMessages(done, timeout=TIMEOUT_S)).results
    kept = (await committed(place, group, run.queue)).position
    print(f"received: the old handle gets {late.error.name}, all is done before {kept.offset}")


# --- messages that wait: for their time, or for the end of a transaction --------------------------


async def delay(
    place: Place, queue: common_pb2.QueueRef, position: common_pb2.Position
) -> common_pb2.Position:
    """One message comes after its time; another is taken back, and never comes. The position behind
    them. ``deliver_at_ms`` in place of ``delay_ms`` names a time.
    """
    messages = [
        broker_pb2.OutgoingMessage(
            topic=place.topic, queue_id=queue.queue_id, body=body, tag="later", delay_ms=delay_ms
        )
        for body, delay_ms in ((b"in a second", 1_000), (b"never", 1_500))
    ]
    request = broker_pb2.SendRequest(messages=messages)
    answer = await place.broker.Send(request, timeout=TIMEOUT_S)
    recall = broker_pb2.RecallRequest(handles=[answer.sent[1].recall_handle])
    [taken] = (await place.broker.Recall(recall, timeout=TIMEOUT_S)).results
    found: Messages = []
    while not found:
        found, position = await read(place, queue, position, "later")
    is_late = found[0].store_time_ms - answer.store_time_ms >= 1_000
    print(f"delayed: {found[0].body.decode()}, waited: {is_late}, other recalled: {taken.recalled}")
    return position


async def transact(
    place: Place, queue: common_pb2.QueueRef, position: common_pb2.Position, group: str
) -> None:
    """Nobody sees a half message before its transaction ends. This producer commits one by itself,
    and one when the broker asks what became of it, as it asks any producer of the group.
    """
    messages = [
        broker_pb2.OutgoingMessage(
            topic=place.topic,
            queue_id=queue.queue_id,
            body=body,
            tag="later",
            producer_group=group,
            check_immunity_s=1,  # the broker does not ask before
        )
        for body in (b"committed", b"asked about")
    ]
    request = broker_pb2.SendRequest(messages=messages)
    sent = (await place.broker.Send(request, timeout=TIMEOUT_S)).sent
    commit_first = broker_pb2.TransactionEnd(
        half=sent[0].half, resolution=broker_pb2.TRANSACTION_RESOLUTION_COMMIT
    )
    ends = broker_pb2.EndTransactionsRequest(producer_group=group, ends=[commit_first])
    [ended] = (await place.broker.EndTransactions(ends, timeout=TIMEOUT_S)).results
    if ended.HasField("error"):
        raise RuntimeError(f"{ended.error.name}: {ended.error.message}")

    # A producer holds this stream open as long as it lives.
    stream = place.broker.CheckTransactions()
    join = broker_pb2.CheckTransactionsJoin(producer_group=group, client_id="client-1")
    await stream.write(broker_pb2.CheckTransactionsRequest(join=join))
    checks: Sequence[broker_pb2.TransactionCheck] = []
    while not checks:  # the first response says that we have joined
        response = await stream.read()
        assert isinstance(response, broker_pb2.CheckTransactionsResponse)
        checks = response.checks
    is_second = checks[0].half == sent[1].half
    print(f"checked: the second: {is_second}, asked {checks[0].check_count} times")
    answers = [
        broker_pb2.TransactionEnd(
            half=check.half, resolution=broker_pb2.TRANSACTION_RESOLUTION_COMMIT
        )
        for check in checks
    ]
    await stream.write(broker_pb2.CheckTransactionsRequest(answers=answers))
    bodies: list[str] = []
    while len(bodies) < len(messages):
        found, position = await read(place, queue, position, "later")
        bodies += [message.body.decode() for message in found]
    print(f"transactions: {', '.join(bodies)}")
    stream.cancel()


# --- the tour -------------------------------------------------------------------------------------


async def tour(namesrv: str, topic: str, group: str) -> None:
    async with AsyncExitStack() as stack:
        place = await find(namesrv, topic, stack)
        last = await send(place, b"one", b"two", b"three")

        # Where to begin: at the commit, else at the beginning. A position of generation 0 is never
        # fenced; 0 @ 0 is moved to the first message that is left. The answers tell the generation.
        known = await committed(place, group, last.queue)
        position = await read_until(place, known.position, last)

        async def send_later() -> broker_pb2.SentMessage:
            await asyncio.sleep(1)
            return await send(place, b"while you were waiting", queue_id=last.queue.queue_id)

        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(send_later())
            messages: Messages = []
            while not messages:  # after a hold that was in vain, the next one
                messages, position = await read(place, last.queue, position, "greeting")
        position = await read_until(place, position, second.result())
        print(f"held: woken by {messages[0].message_id}: {messages[0].body.decode()}")

        offsets = await read_matching(place, last.queue, "language IS NOT NULL AND KEYS <> 'key-1'")
        print(f"matched: {offsets}")

        number = known.reset_number
        checked(await commit(place, group, last.queue, position, reset_number=number))
        kept = (await committed(place, group, last.queue)).position
        print(f"committed: {group} at generation {kept.generation}, offset {kept.offset}")

        await read_in_order(place, group, last, number)
        await reset(place, group, last.queue, last.position.offset, number)
        await fail_twice(place, group, messages[0], position.generation)
        await receive(place, f"{group}-pop")
        position = await delay(place, last.queue, position)
        await transact(place, last.queue, position, f"{group}-payers")

        try:
            message = broker_pb2.OutgoingMessage(topic="../x", body=b"")
            request = broker_pb2.SendRequest(messages=[message])
            await place.broker.Send(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if (refused := refusal(error)) is None:
                raise
            retry = common_pb2.Retry.Name(refused.retry)
            print(f"refused: {error.code().name}, {refused.code} {refused.name}, {retry}")
            print(f"refused: message {refused.segment}: {refused.message}. {refused.advice}")


def main() -> int:
    """0: done. 1: refused, or nobody answered; standard error says why."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--namesrv", required=True, help="host:port;host:port")
    parser.add_argument("--topic", default="Hello")
    parser.add_argument("--group", default="stub-python")
    arguments = parser.parse_args()
    try:
        asyncio.run(tour(arguments.namesrv, arguments.topic, arguments.group))
    except grpc.aio.AioRpcError as error:
        refused = refusal(error)
        print(refused or f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except LookupError as error:
        print(*error.args, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
