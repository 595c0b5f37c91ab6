from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.rebalance import allocate_average, allocate_topics
from cometmq.model import QueueRef

NAMES = st.text("abc@1", min_size=1, max_size=4)
QUEUES = st.builds(QueueRef, st.just("T"), st.integers(0, 40), st.sampled_from(["g1", "g2", "g3"]))


def queues(count: int, topic: str = "T") -> list[QueueRef]:
    return [QueueRef(topic, n, "g") for n in range(count)]


@given(st.sets(NAMES, min_size=1, max_size=12), st.sets(QUEUES, max_size=50))
def test_the_members_together_read_each_queue_once(
    members: set[str], all_queues: set[QueueRef]
) -> None:
    shares = [allocate_average(name, members, all_queues) for name in sorted(members)]
    assert [queue for share in shares for queue in share] == sorted(all_queues)
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.lists(NAMES, min_size=1), st.lists(QUEUES), st.randoms())
def test_neither_order_nor_repetition_matters(
    members: list[str], some: list[QueueRef], random: object
) -> None:
    again = allocate_average(members[0], members[::-1] * 2, some[::-1] * 2)
    assert again == allocate_average(members[0], members, some)


def test_ranges_are_contiguous_and_the_first_get_more() -> None:
    shares = [allocate_average(name, ["b", "a", "c"], queues(8)) for name in "abc"]
    assert [[queue.queue_id for queue in share] for share in shares] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


def test_a_stranger_gets_nothing() -> None:
    assert allocate_average("x", ["a", "b"], queues(8)) == []


def test_each_topic_is_divided_among_its_own_readers() -> None:
    mine = allocate_topics(
        "a",
        {"S": queues(2, "S"), "T": queues(2, "T"), "U": queues(2, "U")},
        {"S": ["a"], "T": ["a", "b"]},
    )
    assert mine == {*queues(2, "S"), QueueRef("T", 0, "g")}
