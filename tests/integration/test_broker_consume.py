"""Reading, groups, offsets and administration over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.errors import PositionFenced, QueueNotFound, TopicNotFound
from cometmq.member.read import reader
from cometmq.messaging.rocketmq_tables import mark_of, parse
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import SYNC, BrokerClient, batch, encoded, refusal, running_broker
from tests.support.cluster.pullhold import sample, scraped
from tests.support.stores.gates import ColdDisk, HeldFlush
from tests.support.waiting import DEADLINE_S, until

FOUND, NO_MATCH = pb.PULL_STATUS_FOUND, pb.PULL_STATUS_NO_MATCHED_MESSAGE
NOT_FOUND, MOVED = pb.PULL_STATUS_NOT_FOUND, pb.PULL_STATUS_OFFSET_MOVED


async def send_tagged(broker: BrokerClient, tags: str) -> None:
    """One message for each character, which is its tag and its body, to queue 0 of T."""
    records = b"".join(encoded("T", 0, tag.encode(), tag=tag) for tag in tags)
    lane = await broker.lane()
    result = await lane.exchange(records, [pb.Segment(topic="T", queue_id=0, count=len(tags))])
    assert not result.HasField("error"), result.error


async def test_bounds_tell_of_what_was_acknowledged_before(tmp_path: Path) -> None:
    """Nobody reads, and the log is synced seldom: the question itself makes it readable."""
    async with running_broker(tmp_path, **SELDOM) as broker:
        await broker.put_topic("T", 1)
        await send_tagged(broker, "a")
        assert (await broker.status("T", 0)).max_offset == 1
        await send_tagged(broker, "b")
        by_time = pb.QueryOffsetsByTimeRequest(
            queues=[common.QueueRef(topic="T", queue_id=0)], time_ms=1 << 42
        )
        [answer] = (await broker.stub.QueryOffsetsByTime(by_time)).queues
        assert answer.position.offset == 2
        await broker.commit("G", ("T", 0, 0, 0))
        await send_tagged(broker, "c")
        group = pb.DescribeGroupRequest(group="G")
        [progress] = (await broker.admin.DescribeGroup(group)).progress
        assert progress.max_offset == 3


async def test_nobody_begins_below_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose disk does not answer, as after a pause: it shows less than it has taken."""
    disk = HeldFlush(monkeypatch)
    monkeypatch.setattr(reader, "END_S_MAX", 0.1)
    queue, late_ms = common.QueueRef(topic="T", queue_id=0), 1 << 42
    bounds = pb.QueryQueuesRequest(queues=[queue], end_wanted=True)
    by_time = pb.QueryOffsetsByTimeRequest(queues=[queue], time_ms=late_ms)
    resets = [
        pb.ResetOffsetsRequest(group="R", topic="T", bound=pb.RESET_BOUND_LAST),
        pb.ResetOffsetsRequest(group="R", topic="T", time_ms=late_ms),
    ]
    receives = [
        pb.ReceiveRequest(
            group="P",
            subscriptions=[pb.Subscription(topic="T")],
            invisible_ms=30_000,
            start=start,
            start_time_ms=late_ms,
        )
        for start in (pb.RECEIVE_START_LAST, pb.RECEIVE_START_TIME)
    ]

    async def answers() -> list[Any]:
        return [
            (await broker.stub.QueryQueues(bounds)).queues[0],
            (await broker.stub.QueryOffsetsByTime(by_time)).queues[0],
            *[(await broker.admin.ResetOffsets(one)).results[0] for one in resets],
        ]

    async with running_broker(tmp_path, **SELDOM) as broker:
        await broker.put_topic("T", 1)
        settings = pb.GroupSettings(group="P", mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await broker.commit("R", ("T", 0, 0, 0))
        disk.hold()
        await send_tagged(broker, "abc")
        for one in await answers():
            assert from_proto(one.error).name() == "OFFSET_NOT_AVAILABLE"
        for ask in receives:
            assert (await refusal(broker.stub.Receive(ask))).name() == "OFFSET_NOT_AVAILABLE"
        assert (await broker.status("T", 0)).max_offset == 0  # operators see what can be read
        disk.release()
        ends, at_time, *after = await answers()
        assert (ends.max_offset, at_time.position.offset) == (3, 3)
        assert [one.after.offset for one in after] == [3, 3]
        assert not (await broker.stub.Receive(receives[0])).runs
        await send_tagged(broker, "d")
        assert (await broker.status("T", 0)).max_offset == 4
        [run] = (await broker.stub.Receive(receives[0])).runs
        assert run.count == 1


# --- pull ---------------------------------------------------------------------------------------


async def test_pull_status_table(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        generation = (await broker.status("T", 0)).generation
        # An empty queue: its start is where one waits, beyond it there is nothing.
        empty = await broker.pull("T", 0, 0)
        assert (empty.status, empty.next_position.offset) == (NOT_FOUND, 0)
        beyond = await broker.pull("T", 0, 5)
        assert (beyond.status, beyond.next_position.offset) == (MOVED, 0)
        await send_tagged(broker, "abca")
        await broker.read_queue("T", 0)
        table = [
            (0, [], FOUND, 4, 4),
            (3, [], FOUND, 1, 4),
            (4, [], NOT_FOUND, 0, 4),
            (5, [], MOVED, 0, 4),
            (1 << 62, [], MOVED, 0, 4),
            (0, ["b", "c"], FOUND, 2, 4),
            (2, ["b"], NO_MATCH, 0, 4),
            (4, ["b"], NOT_FOUND, 0, 4),
        ]
        for offset, tags, status, count, next_offset in table:
            answer = await broker.pull("T", 0, offset, filter=common.Filter(tags=tags))
            got = (answer.status, answer.count, answer.next_position.offset)
            assert got == (status, count, next_offset), (offset, tags)
            assert answer.next_position.generation == generation
            assert (answer.min_offset, answer.max_offset) == (0, 4)
            assert bool(answer.records) == bool(count)


async def test_pull_limits_and_forms(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await send_tagged(broker, "abcdefgh")
        await broker.read_queue("T", 0)
        assert (await broker.pull("T", 0, 0, max_count=3)).count == 3
        assert (await broker.pull("T", 0, 0, max_bytes=1)).count == 1  # the first always comes
        answer = await broker.pull("T", 0, 2, max_count=2, form=pb.MESSAGE_FORM_MESSAGES)
        assert not answer.records
        assert [(m.body, m.tag, m.queue_offset) for m in answer.messages] == [
            (b"c", "c", 2),
            (b"d", "d", 3),
        ]
        assert answer.messages[0].message_id == f"g1/{answer.messages[0].log_offset}"


async def test_reads_across_files_of_queue_and_log(tmp_path: Path) -> None:
    """Queue files of 20 units, log files of 64 KiB: pulls stop at the files' ends and go on."""
    async with running_broker(tmp_path, mapped_file_size_commit_log=64 * 1024) as broker:
        await broker.put_topic("T", 2)
        lane = await broker.lane()
        expected: list[list[bytes]] = [[], []]
        for number in range(30):
            bodies = [b"%d:%d" % (number, n) + b"." * 500 for n in range(10)]
            await lane.send(("T", number % 2, bodies))
            expected[number % 2] += bodies
        assert broker.store.appended_offset > 128 * 1024
        assert [await broker.bodies("T", q) for q in (0, 1)] == expected


async def test_what_the_disk_must_read_comes_from_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ColdDisk(monkeypatch)
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        sent = await broker.send("T", 0, b"a", b"b")
        await broker.read_queue("T", 0)
        disk.go_cold()
        assert await broker.bodies("T", 0) == [b"a", b"b"]
        request = pb.GetMessageRequest(message_id=sent.sent[1].message_id)
        assert (await broker.stub.GetMessage(request)).message.body == b"b"
        assert (await broker.status("T", 0)).last_store_time_ms == sent.store_time_ms
        assert disk.refused >= 3


async def test_a_cold_read_does_not_hold_up_a_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ColdDisk(monkeypatch)
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"a")
        await broker.read_queue("T", 0)
        disk.go_cold(stuck=True)
        pulling = asyncio.create_task(broker.pull("T", 0, 0))
        await until(lambda: disk.stuck)
        await broker.send("T", 0, b"b")
        assert not pulling.done()
        disk.release()
        assert (await pulling).count == 1


SELDOM = {"flush_interval_commit_log": 60_000, "flush_commit_log_thorough_interval": 60_000}


async def test_query_queues_answers_each_on_its_own(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **SELDOM) as broker:
        await broker.put_topic("T", 2)
        await send_tagged(broker, "abc")
        names = [("T", 0), ("unknown", 0), ("T", 9), ("T", 1)]
        queues = [common.QueueRef(topic=t, queue_id=q) for t, q in names]
        answer = await broker.stub.QueryQueues(pb.QueryQueuesRequest(queues=queues))
        assert [(q.queue.topic, q.queue.queue_id) for q in answer.queues] == names
        assert [(q.min_offset, q.max_offset) for q in answer.queues] == [(0, 3), *[(0, 0)] * 3]
        errors = [type(from_proto(q.error)) for q in answer.queues if q.HasField("error")]
        assert errors == [TopicNotFound, QueueNotFound]


# --- offsets ------------------------------------------------------------------------------------


async def test_commits_many_at_once(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 2)
        await send_tagged(broker, "abcde")
        await broker.read_queue("T", 0)
        g = (await broker.status("T", 0)).generation
        items = [("T", 0, g, 3), ("no", 0, g, 1), ("T", 9, g, 1), ("T", 0, g, -1), ("T", 1, g, 0)]
        results = await broker.commit("g", *items)
        errors = [from_proto(r.error).name() if r.HasField("error") else "" for r in results]
        assert errors == ["", "TOPIC_NOT_FOUND", "QUEUE_NOT_FOUND", "OFFSET_INVALID", ""]
        assert [r.queue.topic for r in results] == [item[0] for item in items]
        assert (results[0].position.offset, results[4].position.offset) == (3, 0)


async def test_commits_only_go_forward_and_not_beyond_what_is_readable(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await send_tagged(broker, "abcde")
        await broker.read_queue("T", 0)
        g = (await broker.status("T", 0)).generation
        assert await broker.committed("g", "T", 0) is None
        kept = [
            (await broker.commit("g", ("T", 0, generation, offset)))[0].position.offset
            for generation, offset in ((g, 3), (g, 1), (0, 2), (0, 99), (g, 4))
        ]
        assert kept == [3, 3, 3, 5, 5]
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert (position.generation, position.offset) == (g, 5)


async def test_offsets_survive_a_crash_and_a_stop(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await send_tagged(broker, "abcde")
        await broker.read_queue("T", 0)
        state = "rmq_sys_cometmq_state", 0
        records = broker.store.queue_bounds(*state)[1]
        await broker.commit("g", ("T", 0, 0, 2))
        # Within a moment two records come: the new group and what it committed.
        await until(lambda: broker.store.queue_bounds(*state)[1] == records + 2)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 2
        await broker.commit("g", ("T", 0, 0, 4))  # stopped in order: not a moment is lost
    async with running_broker(tmp_path) as broker:
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 4


async def test_groups_are_not_made_on_demand_when_that_is_off(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_subscription_group=False) as broker:
        await broker.put_topic("T", 1)
        assert (await refusal(broker.commit("g", ("T", 0, 0, 0)))).name() == "GROUP_NOT_FOUND"
        assert (await refusal(GroupStream(broker, "c").join("T"))).name() == "GROUP_NOT_FOUND"


# --- membership ---------------------------------------------------------------------------------


class GroupStream:
    """One raw JoinGroup stream."""

    def __init__(self, broker: BrokerClient, client_id: str, group: str = "g") -> None:
        self.call = broker.stub.JoinGroup()
        self.client_id = client_id
        self.group = group

    async def subscribe(self, *topics: str) -> None:
        subscriptions = [pb.Subscription(topic=t) for t in topics]
        request = pb.JoinGroupRequest(
            group=self.group, client_id=self.client_id, subscriptions=subscriptions
        )
        await self.call.write(request)

    async def join(self, *topics: str) -> pb.JoinGroupResponse:
        await self.subscribe(*topics)
        return await self.view()

    async def view(self) -> pb.JoinGroupResponse:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        assert isinstance(response, pb.JoinGroupResponse), "the stream has ended"
        return response

    async def end(self) -> None:
        """Read to the end of the stream. Raises its error."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.call.read() is not grpc.aio.EOF:
                pass

    async def sees(self, members: Sequence[str]) -> pb.JoinGroupResponse:
        """Read until the members are these; versions rise meanwhile."""
        version = 0
        while True:
            view = await self.view()
            assert view.version > version
            version = view.version
            if [m.client_id for m in view.members] == list(members):
                return view


async def test_members_see_each_other_come_and_go(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        first, second = GroupStream(broker, "a"), GroupStream(broker, "b")
        assert [m.client_id for m in (await first.join("T")).members] == ["a"]
        await second.subscribe("T", "U")
        view = await first.sees(["a", "b"])
        assert [s.topic for s in view.members[1].subscriptions] == ["T", "U"]
        await second.sees(["a", "b"])
        second.call.cancel()  # as when its process dies
        await first.sees(["a"])
        third = GroupStream(broker, "c")
        await third.subscribe("T")
        await first.sees(["a", "c"])
        await third.call.done_writing()  # in order
        await first.sees(["a"])


async def test_other_groups_are_not_told(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        first, other = GroupStream(broker, "a"), GroupStream(broker, "b", "h")
        await first.join("T")
        assert [m.client_id for m in (await other.join("T")).members] == ["b"]
        await first.subscribe("T", "U")
        view = await first.view()  # the next that it hears of is its own change
        assert [len(m.subscriptions) for m in view.members] == [2]


@pytest.mark.parametrize(
    ("group", "client_id", "topics", "error"),
    [
        ("a b", "c", ["T"], "GROUP_NAME_INVALID"),
        ("", "c", ["T"], "GROUP_NAME_INVALID"),
        ("g", "", ["T"], "INVALID_REQUEST"),
        ("g", "c\n", ["T"], "INVALID_REQUEST"),
        ("g", "c" * 256, ["T"], "INVALID_REQUEST"),
        ("g", "c", ["../x"], "TOPIC_NAME_INVALID"),
        ("g", "c", ["T", "T"], "INVALID_REQUEST"),
        ("g", "c", [f"T{n}" for n in range(1001)], "LIMIT_EXCEEDED"),
    ],
)
async def test_a_bad_membership_is_refused(
    tmp_path: Path, group: str, client_id: str, topics: list[str], error: str
) -> None:
    async with running_broker(tmp_path) as broker:
        stream = GroupStream(broker, client_id, group)
        assert (await refusal(stream.join(*topics))).name() == error
        groups = (await broker.admin.ListGroups(pb.ListGroupsRequest())).groups
        assert not groups, "a refused member leaves no group behind"


async def test_drain_ends_memberships(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        stream = GroupStream(broker, "a")
        await stream.join("T")
        ended = asyncio.create_task(stream.end())
    await ended


# --- topics -------------------------------------------------------------------------------------


async def test_a_topic_that_is_created_again_begins_anew(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        before = (await broker.send("T", 0, b"old", b"older")).sent[1].position
        await broker.read_queue("T", 0)
        await broker.commit("g", ("T", 0, before.generation, 2))
        await broker.drop_topic("T")
        assert (await refusal(broker.pull("T", 0, 0))).name() == "TOPIC_NOT_FOUND"
        assert (await refusal(broker.send("T", 0, b"x"))).name() == "TOPIC_NOT_FOUND"
        await broker.put_topic("T", 1)
        assert await broker.committed("g", "T", 0) is None
        after = (await broker.send("T", 0, b"new")).sent[0].position
        assert (after.offset, after.generation > before.generation) == (0, True)
        error = await refusal(broker.pull("T", 0, 1, before.generation))
        assert (type(error), error.fence) == (PositionFenced, (after.generation, 0))
        assert await broker.bodies("T", 0) == [b"new"]


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_deleted_topic_stays_deleted_after_a_crash(tmp_path: Path, recreated: bool) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"old", b"older")
        await broker.drop_topic("T")
        if recreated:
            await broker.put_topic("T", 1)
            await broker.send("T", 0, b"new")
        broker.crash()
    async with running_broker(tmp_path) as broker:
        if not recreated:
            assert (await refusal(broker.pull("T", 0, 0))).name() == "TOPIC_NOT_FOUND"
            await broker.put_topic("T", 1)
            await broker.send("T", 0, b"new")
        assert await broker.bodies("T", 0) == [b"new"]


async def test_deleting_while_everybody_sends(tmp_path: Path) -> None:
    """Whatever was accepted before the deletion is gone, whatever after it is there, after a crash
    too.
    """
    async with running_broker(tmp_path, auto_create_topic_enable=True) as broker:
        await broker.put_topic("T", 1)
        lanes = [await broker.lane() for _ in range(4)]

        async def send_many(lane_number: int) -> None:
            for number in range(40):
                records, segments = batch(("T", 0, [b"%d.%d" % (lane_number, number)]))
                await lanes[lane_number].exchange(records, segments)

        sending = asyncio.gather(*(send_many(n) for n in range(4)))
        drops = 0
        while not sending.done():
            drops += await _dropped(broker)
        await sending
        assert drops
        await broker.put_topic("T", 1)
        before = await broker.bodies("T", 0)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await broker.bodies("T", 0) == before


async def _dropped(broker: BrokerClient) -> bool:
    """Delete T; False when it is not there just now."""
    try:
        await broker.drop_topic("T")
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_queues_are_added_and_hidden(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        assert (await broker.put_topic("T", 1)).created
        assert not (await broker.put_topic("T", 3)).created
        await broker.send("T", 2, b"x")
        await broker.put_topic("T", 2)
        assert (await refusal(broker.send("T", 2, b"y"))).name() == "QUEUE_NOT_FOUND"
        await broker.put_topic("T", 3)
        assert await broker.bodies("T", 2) == [b"x"]  # hidden, not deleted


@pytest.mark.parametrize(("permission", "verb"), [(4, "send"), (2, "pull")])
async def test_permissions(tmp_path: Path, permission: int, verb: str) -> None:
    async with running_broker(tmp_path) as broker:
        config = common.TopicConfig(name="T", permission=permission)
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        calls = {"send": broker.send("T", 0, b"x"), "pull": broker.pull("T", 0, 0)}
        refused = calls.pop(verb)
        await calls.popitem()[1]
        assert (await refusal(refused)).name() == "NO_PERMISSION"


async def test_descriptions(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("B", 2, SYNC)
        await broker.put_topic("A", 1)
        await broker.send("B", 1, b"x")
        listed = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        assert [(t.name, t.flush_mode) for t in listed.topics] == [("A", 1), ("B", 2)]
        stream = GroupStream(broker, "c")
        await stream.join("B")
        await broker.commit("g", ("A", 0, 0, 0))
        described = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="g"))
        got = [(p.queue.topic, p.queue.queue_id, p.max_offset) for p in described.progress]
        assert got == [("A", 0, 0), ("B", 0, 0), ("B", 1, 1)]
        assert [p.HasField("committed") for p in described.progress] == [True, False, False]
        only = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="g", topic="A"))
        assert [p.queue.topic for p in only.progress] == ["A"]
        before = broker.store.appended_offset
        about = await broker.admin.DescribeBroker(pb.DescribeBrokerRequest())
        assert (about.broker_group, about.epoch) == ("g1", broker.store.epoch)
        # What was committed may be written meanwhile.
        assert before <= about.log_appended_offset <= broker.store.appended_offset


# --- what others read ---------------------------------------------------------------------------


async def test_exports_in_rocketmqs_form(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 3)
        await broker.send("T", 0, b"a", b"b")
        await broker.read_queue("T", 0)
        await broker.commit("g", ("T", 0, 0, 2))
        epoch = broker.store.epoch
    files = {p.name: parse(p.read_bytes()) for p in (tmp_path / "store/config").glob("*.json")}
    assert files["topics.json"]["topicConfigTable"]["T"]["writeQueueNums"] == 3
    assert files["consumerOffset.json"]["offsetTable"] == {"T@g": {"0": 2}}
    assert "g" in files["subscriptionGroup.json"]["subscriptionGroupTable"]
    marks = [mark_of(table) for table in files.values()]
    assert [mark.epoch for mark in marks if mark] == [epoch] * 4


async def test_exports_are_written_while_running(tmp_path: Path) -> None:
    path = tmp_path / "store/config/topics.json"
    async with running_broker(tmp_path, flush_consumer_offset_interval=100) as broker:
        await until(path.exists)
        await broker.put_topic("T", 1)
        await until(lambda: path.exists() and b'"T"' in path.read_bytes())


async def test_metrics_have_rocketmqs_names(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"a", b"b", b"c")
        await broker.read_queue("T", 0)
        await broker.commit("g", ("T", 0, 0, 1))
        lane = await broker.lane()
        await lane.refused(b"", [])
        await refusal(broker.send("absent", 0, b"x"))
        node = 'cluster="DefaultCluster",node_id="g1",node_type="broker"'
        address = broker.metrics_address
        for name, label, value in (
            ("rocketmq_messages_in_total", 'topic="T"', 3),
            ("rocketmq_consumer_lag_messages", 'consumer_group="g"', 2),
            ("rocketmq_producer_connections", node, 1),
            ("cometmq_batches_refused_total", 'error="BATCH_MALFORMED"', 1),
            ("cometmq_batches_refused_total", 'error="TOPIC_NOT_FOUND"', 1),
        ):
            assert await sample(address, name, label) == value, name
        assert await sample(address, "rocketmq_messages_out_total", 'topic="T"') >= 3
        await broker.drop_topic("T")
        assert 'topic="T"' not in await scraped(address), "a deleted topic leaves no series behind"


async def test_a_group_begins_once(tmp_path: Path) -> None:
    """The member that is first decides; the others get its answer."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *(b"%d" % n for n in range(5)))
        assert len(await broker.read_queue("T", 0)) == 5
        queue = common.QueueRef(topic="T", queue_id=0)
        for offset in (2, 4, 0):
            position = common.Position(offset=offset)
            commit = pb.OffsetCommit(queue=queue, position=position, begins=True)
            request = pb.CommitOffsetsRequest(group="G", commits=[commit])
            [result] = (await broker.stub.CommitOffsets(request)).results
            assert result.position.offset == 2


# --- a commit with a pull -------------------------------------------------------------------------


async def test_a_pull_commits_under_the_rules_of_commits(tmp_path: Path) -> None:
    queue = common.QueueRef(topic="T", queue_id=0)

    async def pull(
        broker: BrokerClient, offset: int, group: str = "G", **commit: Any
    ) -> tuple[pb.PullResponse, str]:
        item = pb.OffsetCommit(queue=queue, position=common.Position(offset=offset), **commit)
        request = pb.PullRequest(
            group=group, queue=queue, position=common.Position(offset=offset), commit=item
        )
        answer = await broker.stub.Pull(request)
        assert answer.HasField("committed")
        return answer, answer.committed.error.name

    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await send_tagged(broker, "abc")
        await broker.read_queue("T", 0)
        first, error = await pull(broker, 1)  # makes the group, as a commit does
        assert (first.status, first.count, error) == (FOUND, 2, "")
        assert first.committed.position.offset == 1
        kept = await broker.committed("G", "T", 0)
        assert kept is not None
        assert kept.offset == 1

        # It never goes back, and needs locks and resets. The pull is answered all the same.
        assert (await pull(broker, 0))[0].committed.position.offset == 1
        answer, error = await pull(broker, 2, lock_number=7)
        assert (answer.count, error) == (1, "QUEUE_LOCKED")
        await broker.admin.ResetOffsets(pb.ResetOffsetsRequest(group="G", topic="T", offset=0))
        answer, error = await pull(broker, 2)
        assert (answer.count, error) == (1, "OFFSET_RESET")
        assert answer.committed.error.fence.offset == 0
        number = answer.committed.reset_number
        assert (await pull(broker, 2, reset_number=number))[1] == ""

        # Nothing for no group, and for a queue that is not there; a pull without one tells nothing.
        assert (await refusal(pull(broker, 0, group=""))).name() == "GROUP_NAME_INVALID"
        item = pb.OffsetCommit(queue=common.QueueRef(topic="T", queue_id=9))
        request = pb.PullRequest(group="H", queue=queue, commit=item)
        answer = await broker.stub.Pull(request)
        assert (answer.count, answer.committed.error.name) == (3, "QUEUE_NOT_FOUND")
        assert list((await broker.admin.ListGroups(pb.ListGroupsRequest())).groups) == ["G"]
        assert not (await broker.stub.Pull(pb.PullRequest(queue=queue))).HasField("committed")
    async with running_broker(tmp_path) as broker:
        kept = await broker.committed("G", "T", 0)
        assert kept is not None
        assert kept.offset == 2
