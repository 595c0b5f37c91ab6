from __future__ import annotations

from cometmq.client.routing import (
    auto_created_queues,
    readable_queues,
    writable_queues,
    writers,
)
from cometmq.model import QueueRef
from cometmq.v1 import common_pb2, namesrv_pb2

WRITER, FOLLOWER = common_pb2.MEMBER_ROLE_WRITER, common_pb2.MEMBER_ROLE_FOLLOWER


def group(
    name: str, *, write: int = 2, read: int = 2, perm: int = 6, role: int = WRITER
) -> namesrv_pb2.GroupRoute:
    return namesrv_pb2.GroupRoute(
        broker_group=name,
        topic=common_pb2.TopicConfig(
            name="T", read_queue_count=read, write_queue_count=write, permission=perm
        ),
        members=[
            namesrv_pb2.Member(role=common_pb2.MemberRole.ValueType(role), address=f"{name}:1")
        ],
    )


def route(*groups: namesrv_pb2.GroupRoute) -> namesrv_pb2.TopicRoute:
    return namesrv_pb2.TopicRoute(topic="T", groups=groups)


def names(queues: list[QueueRef]) -> list[str]:
    return [f"{queue.broker_group}{queue.queue_id}" for queue in queues]


def test_writable_queues_take_turns_between_groups() -> None:
    queues = writable_queues(route(group("a", write=3), group("b", write=1), group("c")))
    assert names(queues) == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_nothing_is_written_without_permission_or_writer() -> None:
    queues = writable_queues(route(group("a", perm=4), group("b", role=FOLLOWER), group("c")))
    assert names(queues) == ["c0", "c1"]


def test_readers_keep_the_queues_of_a_group_that_lost_its_writer() -> None:
    queues = readable_queues(
        route(group("b", role=FOLLOWER), group("a", read=1), group("c", perm=2))
    )
    assert names(queues) == ["a0", "b0", "b1"]


def test_writers_by_group() -> None:
    assert writers(route(group("a"), group("b", role=FOLLOWER))) == {"a": "a:1"}


def test_a_topic_to_be_created_gets_four_queues() -> None:
    queues = auto_created_queues("new", writable_queues(route(group("a", write=8))))
    assert queues == [QueueRef("new", n, "a") for n in range(4)]
