"""What a writer answers while another member may write: nothing that only the writer may say."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.errors import BrokerDraining, OffsetNotAvailable
from cometmq.member.rpc.lease_rights import ADMIN, BROKER, UNDER_LEASE
from cometmq.member.rpc.servicers import Servicers
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient, batch, refusal, running_broker
from tests.support.waiting import until

T0 = common.QueueRef(topic="T", queue_id=0)
AT_FIRST = common.Position(generation=1, offset=0)
COMMIT = pb.TRANSACTION_RESOLUTION_COMMIT
ROUNDS = 3  # of other answers on the connection, while a call has to stay without one


class Paused:
    """A writer that was paused: it cannot know whether another member writes by now."""

    def __init__(self) -> None:
        self.storage: Any = None
        self.admin: Any = None  # the servicer for operators
        self.allowed = True

    @property
    def waiting_count(self) -> int:
        queues = self.storage._acks.values()
        return sum(not future.done() for queue in queues for _, future in queue._waiting)

    def go_on(self) -> None:
        """It has renewed its lease: no other member writes."""
        self.allowed = True
        self.storage.settle()


@asynccontextmanager
async def pausable(
    directory: Path, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[BrokerClient, Paused]]:
    paused, add_to = Paused(), Servicers.add_to

    def noted(servicers: Servicers, *args: Any) -> None:
        assert servicers.until_certain is not None
        storage = paused.storage = servicers.until_certain.__self__  # type: ignore[attr-defined]
        paused.admin = servicers.admin
        assert isinstance(storage, MemberStorage)
        patch.setattr(storage.authority, "may_acknowledge", lambda: paused.allowed)
        add_to(servicers, *args)

    patch.setattr(Servicers, "add_to", noted)
    async with running_broker(directory) as broker:
        yield broker, paused


class Story:
    """What calls find at the broker: received messages, locks, halves, dead letters."""

    def __init__(self, broker: BrokerClient, paused: Paused) -> None:
        self.broker, self.paused, self._numbers = broker, paused, itertools.count()

    async def begin(self) -> None:
        broker = self.broker
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *[b"%d" % number for number in range(40)])
        await broker.read_queue("T", 0)
        settings = pb.GroupSettings(group="G", mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        for group in ("L", "M"):
            settings = pb.GroupSettings(group=group)
            await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await self.send_back(retry_times_max=0)

    def name(self) -> str:
        return f"N{next(self._numbers)}"

    async def received(self) -> str:
        [run] = (await self.receive()).runs
        return run.handle

    def receive(self) -> Awaitable[pb.ReceiveResponse]:
        subscriptions = [pb.Subscription(topic="T")]
        return self.broker.stub.Receive(
            pb.ReceiveRequest(
                group="G", subscriptions=subscriptions, invisible_ms=600_000, max_count=1
            )
        )

    def send_back(self, **fields: Any) -> Awaitable[pb.SendBackResponse]:
        item = pb.SendBackItem(
            queue=T0, position=common.Position(offset=next(self._numbers)), **fields
        )
        return self.broker.stub.SendBack(pb.SendBackRequest(group="L", items=[item]))

    async def timer(self) -> str:
        due_ms = int(time.time() * 1000) + 600_000
        message = pb.OutgoingMessage(topic="T", queue_id=0, body=b"t", deliver_at_ms=due_ms)
        [sent] = (await self.broker.stub.Send(pb.SendRequest(messages=[message]))).sent
        return sent.recall_handle

    async def half(self) -> pb.HalfRef:
        message = pb.OutgoingMessage(topic="T", queue_id=0, body=b"h", producer_group="P")
        [sent] = (await self.broker.stub.Send(pb.SendRequest(messages=[message]))).sent
        return sent.half

    async def first(self, call: Any, request: Any) -> Any:
        """The first answer of a stream."""
        await call.write(request)
        answer = await call.read()
        call.cancel()
        return answer


# Of each method: what is done before the writer is paused, and the call.
Asked = Callable[[], Awaitable[Any]]
Prepared = Callable[[Story], Awaitable[Asked]]


def _asked(make: Callable[[Story], Awaitable[Any]]) -> Prepared:
    async def prepare(story: Story) -> Asked:
        return lambda: make(story)

    return prepare


async def _ack(story: Story) -> Asked:
    items = [pb.AckItem(handle=await story.received())]
    return lambda: story.broker.stub.AckMessages(pb.AckMessagesRequest(group="G", items=items))


async def _change(story: Story) -> Asked:
    messages = pb.AckItem(handle=await story.received())
    items = [pb.ChangeInvisibleTimeItem(messages=messages, invisible_ms=60_000)]
    request = pb.ChangeInvisibleTimeRequest(group="G", items=items)
    return lambda: story.broker.stub.ChangeInvisibleTime(request)


def _lock(story: Story) -> Awaitable[pb.LockQueuesResponse]:
    request = pb.LockQueuesRequest(group="L", client_id="c", queues=[T0])
    return story.broker.stub.LockQueues(request)


async def _renewed(story: Story) -> Asked:
    await _lock(story)
    return lambda: _lock(story)


async def _unlock(story: Story) -> Asked:
    await _lock(story)
    request = pb.UnlockQueuesRequest(group="L", client_id="c", queues=[T0])
    return lambda: story.broker.stub.UnlockQueues(request)


async def _recall(story: Story) -> Asked:
    handles = [await story.timer()]
    return lambda: story.broker.stub.Recall(pb.RecallRequest(handles=handles))


async def _end(story: Story) -> Asked:
    ends = [pb.TransactionEnd(half=await story.half(), resolution=COMMIT)]
    request = pb.EndTransactionsRequest(producer_group="P", ends=ends)
    return lambda: story.broker.stub.EndTransactions(request)


async def _drop_halves(story: Story) -> Asked:
    request = pb.DropHalvesRequest(half_offsets=[(await story.half()).half_offset])
    return lambda: story.broker.admin.DropHalves(request)


async def _drop_topic(story: Story) -> Asked:
    await story.broker.put_topic(name := story.name())
    return lambda: story.broker.drop_topic(name)


async def _drop_group(story: Story) -> Asked:
    settings = pb.GroupSettings(group=(name := story.name()))
    await story.broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
    return lambda: story.broker.admin.DeleteGroup(pb.DeleteGroupRequest(group=name))


def _commit(story: Story) -> Awaitable[Any]:
    return story.broker.commit("M", ("T", 0, 0, next(story._numbers)))


def _join(story: Story) -> Awaitable[Any]:
    request = pb.JoinGroupRequest(
        group="L", client_id=story.name(), subscriptions=[pb.Subscription(topic="T")]
    )
    return story.first(story.broker.stub.JoinGroup(), request)


def _check(story: Story) -> Awaitable[Any]:
    join = pb.CheckTransactionsJoin(producer_group="P", client_id="c")
    request = pb.CheckTransactionsRequest(join=join)
    return story.first(story.broker.stub.CheckTransactions(), request)


def _replies(story: Story) -> Awaitable[Any]:
    return story.first(story.broker.stub.Replies(), pb.RepliesRequest(client_id=story.name()))


def _assignment(story: Story) -> Awaitable[Any]:
    request = pb.QueryAssignmentRequest(group="G", topic="T", client_id="c")
    return story.broker.stub.QueryAssignment(request)


def _offsets(story: Story) -> Awaitable[Any]:
    return story.broker.stub.QueryOffsets(pb.QueryOffsetsRequest(group="M", queues=[T0]))


def _put_group(story: Story) -> Awaitable[Any]:
    settings = pb.GroupSettings(group=story.name())
    return story.broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))


def _reset(story: Story) -> Awaitable[Any]:
    request = pb.ResetOffsetsRequest(group="M", topic="T", offset=1)
    return story.broker.admin.ResetOffsets(request)


def _put_quota(story: Story) -> Awaitable[Any]:
    quota = pb.Quota(messages_per_s=1_000_000 + next(story._numbers))
    request = pb.PutQuotaRequest(scope=pb.QUOTA_SCOPE_TOPIC, send=quota)
    return story.broker.admin.PutQuota(request)


async def _drop_quota(story: Story) -> Asked:
    await _put_quota(story)
    request = pb.DropQuotaRequest(scope=pb.QUOTA_SCOPE_TOPIC)
    return lambda: story.broker.admin.DropQuota(request)


def _remove(story: Story) -> Awaitable[Any]:
    return story.broker.admin.RemoveMembers(pb.RemoveMembersRequest(group="M"))


async def _forget(story: Story) -> Asked:
    await story.broker.put_topic(name := story.name())
    await story.broker.commit("M", (name, 0, 0, 0))
    request = pb.ForgetOffsetsRequest(group="M", topic=name)
    return lambda: story.broker.admin.ForgetOffsets(request)


def _resend(story: Story) -> Awaitable[Any]:
    items = [pb.ResendItem(queue_id=0, position=common.Position(offset=next(story._numbers)))]
    request = pb.ResendMessagesRequest(topic="T", items=items)
    return story.broker.admin.ResendMessages(request)


def _resend_dead(story: Story) -> Awaitable[Any]:
    request = pb.ResendDeadLettersRequest(group="L", offsets=[0], again=True)
    return story.broker.admin.ResendDeadLetters(request)


def _purge(story: Story) -> Awaitable[Any]:
    return story.broker.admin.PurgeDeadLetters(pb.PurgeDeadLettersRequest(group="L"))


async def _resume(story: Story) -> Asked:
    half = await story.half()
    await story.paused.admin._halves._service.giving_up.give_up([half.half_offset], "a test")
    request = pb.ResumeChecksRequest(offsets=[0])
    return lambda: story.broker.admin.ResumeChecks(request)


def _send(story: Story) -> Awaitable[Any]:
    return story.broker.send("T", 0, b"more")


async def _stream(story: Story) -> Asked:
    lane = await story.broker.lane()
    records, segments = batch(("T", 0, [b"more"]))

    async def sent() -> None:
        await lane.put(records, segments)
        assert not (await lane.result()).HasField("error")

    return sent


PREPARED: dict[str, Prepared] = {
    "Receive": _asked(Story.receive),
    "AckMessages": _ack,
    "ChangeInvisibleTime": _change,
    "LockQueues": _renewed,
    "UnlockQueues": _unlock,
    "SendBack": _asked(lambda story: story.send_back()),
    "Recall": _recall,
    "EndTransactions": _end,
    "CommitOffsets": _asked(_commit),
    "JoinGroup": _asked(_join),
    "CheckTransactions": _asked(_check),
    "Replies": _asked(_replies),
    "QueryAssignment": _asked(_assignment),
    "QueryOffsets": _asked(_offsets),
    "PutTopic": _asked(lambda story: story.broker.put_topic(story.name())),
    "DeleteTopic": _drop_topic,
    "PutGroup": _asked(_put_group),
    "DeleteGroup": _drop_group,
    "PutQuota": _asked(_put_quota),
    "DropQuota": _drop_quota,
    "RemoveMembers": _asked(_remove),
    "ResetOffsets": _asked(_reset),
    "ForgetOffsets": _forget,
    "ResendMessages": _asked(_resend),
    "ResendDeadLetters": _asked(_resend_dead),
    "PurgeDeadLetters": _asked(_purge),
    "ResumeChecks": _resume,
    "DropHalves": _drop_halves,
}
# These ask for the right by themselves when a message is acknowledged.
ACKNOWLEDGED: dict[str, Prepared] = {"Send": _asked(_send), "SendStream": _stream}


def test_there_is_a_call_of_each_method_that_needs_the_lease() -> None:
    assert {name.removeprefix(BROKER).removeprefix(ADMIN) for name in UNDER_LEASE} == set(PREPARED)


@pytest.mark.parametrize("name", [*PREPARED, *ACKNOWLEDGED])
async def test_a_paused_writer_answers_when_no_other_member_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It gave messages, questions and places that its successor had given to others."""
    async with pausable(tmp_path, monkeypatch) as (broker, paused):
        story = Story(broker, paused)
        await story.begin()
        await story.first(broker.stub.Replies(), pb.RepliesRequest(client_id="first"))
        ask = await {**PREPARED, **ACKNOWLEDGED}[name](story)
        paused.allowed = False
        call: asyncio.Future[Any] = asyncio.ensure_future(ask())
        await until(lambda: paused.waiting_count or call.done())
        for _ in range(ROUNDS):
            await broker.stub.DescribeMember(pb.DescribeMemberRequest())
        assert not call.done(), "another member may have given the same to others"
        paused.go_on()
        assert await call is not grpc.aio.EOF


@pytest.mark.parametrize("name", PREPARED)
async def test_a_writer_that_was_paused_and_deposed_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with pausable(tmp_path, monkeypatch) as (broker, paused):
        story = Story(broker, paused)
        await story.begin()
        await story.first(broker.stub.Replies(), pb.RepliesRequest(client_id="first"))
        ask = await PREPARED[name](story)
        paused.allowed = False
        call: asyncio.Future[Any] = asyncio.ensure_future(ask())
        await until(lambda: paused.waiting_count or call.done())
        paused.storage.depose()
        assert isinstance(await refusal(call), BrokerDraining)
        assert isinstance(await refusal(ask()), BrokerDraining), "at once"


async def test_a_paused_writer_tells_no_end_of_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pausable(tmp_path, monkeypatch) as (broker, paused):
        await Story(broker, paused).begin()
        paused.allowed = False
        request = pb.QueryQueuesRequest(queues=[T0], end_wanted=True)
        [answer] = (await broker.stub.QueryQueues(request)).queues
        assert isinstance(from_proto(answer.error), OffsetNotAvailable)
        paused.go_on()
        [answer] = (await broker.stub.QueryQueues(request)).queues
        assert answer.max_offset == 40
