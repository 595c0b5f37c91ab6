from __future__ import annotations

from cometmq.client.cluster.routing import (
    auto_created_queues,
    is_ordered,
    queues_in_order,
    readable_queues,
    with_groups,
    with_order_of,
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


def ordered(
    route: namesrv_pb2.TopicRoute, *queues: tuple[str, int], flag: bool = True
) -> namesrv_pb2.TopicRoute:
    for of_group in route.groups:
        of_group.topic.is_ordered = flag
    for name, count in queues:
        route.order.add(broker_group=name, queue_count=count)
    return route


def test_fixed_queues_count_as_they_are_listed() -> None:
    fixed = ordered(route(group("a", write=3), group("b", write=1)), ("c", 1), ("a", 2))
    assert names(queues_in_order(fixed)) == ["c0", "a0", "a1"]
    assert names(writable_queues(fixed)) == ["a0", "a1"], "of what is there, only what is listed"
    assert names(queues_in_order(with_groups(fixed, [group("d")]))) == ["c0", "a0", "a1"]
    assert is_ordered(fixed)
    assert is_ordered(ordered(route(group("a"))))
    assert not is_ordered(route(group("a")))


def test_a_name_server_that_has_no_list_changes_nothing() -> None:
    known = ordered(route(group("a")), ("a", 2), ("b", 2))
    lost = ordered(route(group("a")))
    assert with_order_of(lost, known).order == known.order
    assert with_order_of(route(), known).order == known.order, "also while nobody serves it"
    other = ordered(route(group("a")), ("a", 1))
    assert with_order_of(other, known) is other
    not_ordered = ordered(route(group("a")), flag=False)
    assert not with_order_of(not_ordered, known).order
    assert with_order_of(lost, None) is lost
