from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.group import rebalance
from cometmq.client.group.rebalance import (
    Allocation,
    ByConfig,
    ByMachineRoom,
    MachineRoomNearby,
    Strategy,
    allocate,
    allocate_topics,
)
from cometmq.errors import CometError
from cometmq.model import QueueRef

NAMES = st.text("abc@1", min_size=1, max_size=4)
QUEUES = st.builds(QueueRef, st.just("T"), st.integers(0, 40), st.sampled_from(["g1", "g2", "g3"]))
STRATEGIES = st.sampled_from(Allocation)


def queues(count: int, topic: str = "T") -> list[QueueRef]:
    return [QueueRef(topic, n, "g") for n in range(count)]


@given(STRATEGIES, st.sets(NAMES, min_size=1, max_size=12), st.sets(QUEUES, max_size=50))
def test_the_members_together_read_each_queue_once(
    strategy: Allocation, members: set[str], all_queues: set[QueueRef]
) -> None:
    shares = [allocate(strategy, name, members, all_queues) for name in sorted(members)]
    assert sorted(queue for share in shares for queue in share) == sorted(all_queues)
    sizes = [len(share) for share in shares]
    if strategy is not Allocation.CONSISTENT_HASH:
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@given(STRATEGIES, st.lists(NAMES, min_size=1), st.lists(QUEUES))
def test_neither_order_nor_repetition_matters(
    strategy: Allocation, members: list[str], some: list[QueueRef]
) -> None:
    again = allocate(strategy, members[0], members[::-1] * 2, some[::-1] * 2)
    assert again == allocate(strategy, members[0], members, some)


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        (Allocation.AVERAGE, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (Allocation.CIRCLE, [[0, 3, 6], [1, 4, 7], [2, 5]]),
    ],
)
def test_ranges_are_contiguous_or_in_turn(strategy: Allocation, shares: list[list[int]]) -> None:
    found = [allocate(strategy, name, ["b", "a", "c"], queues(8)) for name in "abc"]
    assert [[queue.queue_id for queue in share] for share in found] == shares


def test_queues_are_in_the_order_of_rocketmq() -> None:
    """Topic, broker group, number: else members of RocketMQ in the group would disagree."""
    two = [QueueRef("T", n, group) for n in range(2) for group in ("g1", "g2")]
    share = allocate(Allocation.AVERAGE, "a", ["a", "b"], two)
    assert share == [QueueRef("T", 0, "g1"), QueueRef("T", 1, "g1")]


@given(st.sets(NAMES, min_size=2, max_size=12), st.sets(QUEUES, max_size=50))
def test_by_hash_only_the_queues_of_the_member_that_leaves_move(
    members: set[str], all_queues: set[QueueRef]
) -> None:
    _, *stay = sorted(members)
    for name in stay:
        before = set(allocate(Allocation.CONSISTENT_HASH, name, members, all_queues))
        assert before <= set(allocate(Allocation.CONSISTENT_HASH, name, stay, all_queues))


def test_a_stranger_gets_nothing() -> None:
    assert all(allocate(one, "x", ["a", "b"], queues(8)) == [] for one in Allocation)


def test_each_topic_is_divided_among_its_own_readers() -> None:
    mine = allocate_topics(
        Allocation.AVERAGE,
        "a",
        {"S": queues(2, "S"), "T": queues(2, "T"), "U": queues(2, "U")},
        {"S": ["a"], "T": ["a", "b"]},
    )
    assert mine == {*queues(2, "S"), QueueRef("T", 0, "g")}


@given(
    st.sets(NAMES, min_size=1, max_size=12),
    st.sets(NAMES, min_size=1, max_size=12),
    st.sets(QUEUES, max_size=50),
)
def test_sticky_moves_no_more_queues_than_it_has_to(
    before: set[str], after: set[str], all_queues: set[QueueRef]
) -> None:
    strategy = Allocation.STICKY
    held = {name: allocate(strategy, name, before, all_queues) for name in before}
    now = {name: allocate(strategy, name, after, all_queues, held) for name in after}
    assert {name: allocate(strategy, name, after, all_queues, now) for name in after} == now
    share = len(all_queues) // len(after)
    for name in before & after:
        kept = set(held[name]) & set(now[name])
        assert len(kept) >= min(len(held[name]), share), "a member keeps what it has, up to a share"


ROOMS = ("a", "b", "c")
ROOM_NAMES = st.builds("{}@{}".format, st.sampled_from(ROOMS), st.integers(0, 3))
ROOM_QUEUES = st.builds(QueueRef, st.just("T"), st.integers(0, 9), ROOM_NAMES)


@given(
    STRATEGIES,
    st.sets(ROOM_NAMES, min_size=1, max_size=8),
    st.sets(ROOM_QUEUES | QUEUES, max_size=40),
)
def test_nearby_members_read_their_own_room_and_share_those_without_members(
    inner: Allocation, members: set[str], all_queues: set[QueueRef]
) -> None:
    nearby = MachineRoomNearby(inner)
    shares = {name: allocate(nearby, name, members, all_queues) for name in members}
    assert sorted(queue for share in shares.values() for queue in share) == sorted(all_queues)
    inhabited = {name.split("@")[0] for name in members}
    for name, share in shares.items():
        for queue in share:
            room, sign, _ = queue.broker_group.partition("@")
            assert not sign or room not in inhabited or name.startswith(f"{room}@")


@given(
    st.sets(st.sampled_from(ROOMS)),
    st.sets(NAMES, min_size=1, max_size=8),
    st.sets(ROOM_QUEUES | QUEUES, max_size=40),
)
def test_by_machine_room_the_queues_of_these_rooms_are_read_once(
    rooms: set[str], members: set[str], all_queues: set[QueueRef]
) -> None:
    strategy = ByMachineRoom(rooms)
    shares = [allocate(strategy, name, members, all_queues) for name in sorted(members)]
    inside = [q for q in all_queues if "@" in q.broker_group and q.broker_group[0] in rooms]
    assert sorted(queue for share in shares for queue in share) == sorted(inside)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_by_config_a_member_reads_its_list_as_far_as_it_is_there() -> None:
    mine = ByConfig([QueueRef("T", 9, "g"), QueueRef("T", 1, "g"), QueueRef("T", 1, "g")])
    assert allocate(mine, "a", ["a", "b"], queues(8)) == [QueueRef("T", 1, "g")]
    assert allocate(mine, "x", ["a", "b"], queues(8)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByConfig("T"),  # type: ignore[arg-type]
        lambda: ByConfig([QueueRef("T", 0)]),
        lambda: ByConfig([QueueRef("T", -1, "g")]),
        lambda: ByMachineRoom("room"),
        lambda: ByMachineRoom([1]),  # type: ignore[list-item]
        lambda: MachineRoomNearby("average"),  # type: ignore[arg-type]
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused(make: Callable[[], Strategy]) -> None:
    with pytest.raises(CometError):
        make()


def test_labels_tell_strategies_apart_and_are_short() -> None:
    rooms = [f"room-{n}" for n in range(40)]
    strategies: list[Strategy] = [
        *Allocation,
        ByConfig([]),
        ByMachineRoom(rooms),
        ByMachineRoom(rooms[:-1]),
        MachineRoomNearby(),
        MachineRoomNearby(Allocation.CIRCLE),
        MachineRoomNearby(ByMachineRoom(rooms)),
    ]
    labels = [strategy.label for strategy in strategies]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 64


def test_a_ring_is_made_once_for_all_topics_of_the_same_members() -> None:
    rebalance._ring.cache_clear()
    by_topic = {f"T{n}": queues(4, f"T{n}") for n in range(20)}
    members = {topic: ["a", "b", "c"] for topic in by_topic}
    shares = [
        allocate_topics(Allocation.CONSISTENT_HASH, name, by_topic, members) for name in "abc"
    ]
    assert sum(map(len, shares)) == 80
    assert rebalance._ring.cache_info().misses == 1
