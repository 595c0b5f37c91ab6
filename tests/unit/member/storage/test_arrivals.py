"""Arrivals: level-triggered, conflated, nothing missed, nothing told twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.errors import LimitExceeded, QueueNotFound
from cometmq.member.storage.arrivals import (
    SHARED_INLINE_MAX,
    TAG_CODES_MAX,
    TAG_UNITS_MAX,
    Arrival,
    Arrivals,
    Watch,
)
from cometmq.messaging import inline_messages
from cometmq.messaging.inline_messages import WANTED_ARRIVALS, InlineMessages

A, B = ("t", 0), ("t", 1)
ANY: frozenset[int] = frozenset()


@dataclass
class State:
    """A queue: the tag code of each readable message."""

    generation: int = 1
    codes: list[int] = field(default_factory=list)

    @property
    def max_offset(self) -> int:
        return len(self.codes)


class Shelf:
    """The queues of a member."""

    def __init__(self, *keys: tuple[str, int]) -> None:
        self.states = {key: State() for key in keys}
        self.cold = False
        self.looks = 0
        self.reads = 0

    def queue(self, topic: str, queue_id: int) -> State:
        self.looks += 1
        try:
            return self.states[topic, queue_id]
        except KeyError:
            raise QueueNotFound("gone") from None

    def tag_codes(self, topic: str, queue_id: int, first: int, end: int) -> frozenset[int]:
        return ANY if self.cold else frozenset(self.states[topic, queue_id].codes[first:end])

    def inline_messages(
        self, topic: str, queue_id: int, first: int, end: int
    ) -> InlineMessages | None:
        self.reads += 1
        if self.cold or end - first > inline_messages.COUNT_MAX:
            return None
        return inline_messages_of(first, self.states[topic, queue_id].codes[first:end])


def inline_messages_of(first: int, codes: list[int]) -> InlineMessages:
    """A message is two bytes: its tag code twice."""
    return InlineMessages(
        first, 0, bytes(code for code in codes for _ in "ab"), [2] * len(codes), codes
    )


class Notifier:
    def __init__(self) -> None:
        self.rings = 0

    def __call__(self) -> None:
        self.rings += 1


def told(arrivals: Arrivals, watch: Watch, shelf: Shelf) -> list[Arrival]:
    """All that there is to tell now."""
    found = []
    while (arrival := arrivals.next_arrival(watch, shelf)) is not None:
        found.append(arrival)
    return found


def append(arrivals: Arrivals, shelf: Shelf, key: tuple[str, int], *codes: int) -> None:
    shelf.states[key].codes += codes
    arrivals.advanced([(key, shelf.states[key].max_offset)])


def test_adding_a_queue_tells_it_at_once_and_again() -> None:
    arrivals, shelf, notifier = Arrivals(), Shelf(A), Notifier()
    watch = arrivals.open(notifier)
    arrivals.add(watch, [A])
    assert notifier.rings == 1
    assert told(arrivals, watch, shelf) == [Arrival(A, 1, 0)]
    assert told(arrivals, watch, shelf) == []
    arrivals.add(watch, [A])
    assert told(arrivals, watch, shelf) == [Arrival(A, 1, 0)]


def test_only_the_latest_is_told_with_the_tags_of_all() -> None:
    arrivals, shelf = Arrivals(), Shelf(A, B)
    watch = arrivals.open(Notifier())
    arrivals.add(watch, [A, B])
    told(arrivals, watch, shelf)
    append(arrivals, shelf, A, 7)
    append(arrivals, shelf, A, 8, 7)
    append(arrivals, shelf, B, 9)
    assert told(arrivals, watch, shelf) == [
        Arrival(A, 1, 3, frozenset({7, 8})),
        Arrival(B, 1, 1, frozenset({9})),
    ]


def test_each_stream_hears_what_is_new_to_it() -> None:
    arrivals, shelf = Arrivals(), Shelf(A)
    early, late = arrivals.open(Notifier()), arrivals.open(Notifier())
    arrivals.add(early, [A])
    told(arrivals, early, shelf)
    append(arrivals, shelf, A, 7)
    told(arrivals, early, shelf)
    arrivals.add(late, [A])
    append(arrivals, shelf, A, 8)
    assert told(arrivals, early, shelf) == [Arrival(A, 1, 2, frozenset({8}))]
    assert told(arrivals, late, shelf) == [Arrival(A, 1, 2)]


# --- messages that come along --------------------------------------------------------------------


def wanting(shelf: Shelf, *keys: tuple[str, int]) -> tuple[Arrivals, Watch]:
    """A stream that was told of these queues and wants their messages."""
    arrivals = Arrivals()
    watch = arrivals.open(Notifier())
    arrivals.add(watch, keys)
    told(arrivals, watch, shelf)
    arrivals.want(watch, keys)
    return arrivals, watch


def test_messages_come_along_where_they_are_wanted() -> None:
    shelf = Shelf(A, B)
    arrivals, watch = wanting(shelf, A)
    arrivals.add(watch, [B])
    told(arrivals, watch, shelf)
    append(arrivals, shelf, A, 7, 8)
    append(arrivals, shelf, B, 9)
    assert told(arrivals, watch, shelf) == [
        Arrival(A, 1, 2, frozenset({7, 8}), inline_messages_of(0, [7, 8])),
        Arrival(B, 1, 1, frozenset({9})),
    ]


def test_messages_begin_where_the_last_telling_ended_however_slow_the_stream() -> None:
    shelf = Shelf(A)
    arrivals, watch = wanting(shelf, A)
    append(arrivals, shelf, A, 7)
    told(arrivals, watch, shelf)
    append(arrivals, shelf, A, 8)
    append(arrivals, shelf, A, 9)
    assert [arrival.inline_messages for arrival in told(arrivals, watch, shelf)] == [
        inline_messages_of(1, [8, 9])
    ]
    for _ in range(inline_messages.COUNT_MAX + 1):  # more than come along: the stream took nothing
        append(arrivals, shelf, A, 7)
    assert [arrival.inline_messages for arrival in told(arrivals, watch, shelf)] == [None]
    append(arrivals, shelf, A, 7)
    assert [arrival.inline_messages for arrival in told(arrivals, watch, shelf)] == [
        inline_messages_of(36, [7])
    ]


def test_who_says_no_more_gets_them_no_more() -> None:
    shelf = Shelf(A)
    arrivals, watch = wanting(shelf, A)
    with_messages = 0
    for _ in range(2 * WANTED_ARRIVALS):
        append(arrivals, shelf, A, 7)
        with_messages += sum(a.inline_messages is not None for a in told(arrivals, watch, shelf))
    assert with_messages == WANTED_ARRIVALS
    reads = shelf.reads
    append(arrivals, shelf, A, 7)
    told(arrivals, watch, shelf)
    assert shelf.reads == reads, "what nobody wants is not read"


def test_a_queue_that_is_not_watched_or_was_forgotten_is_not_wanted() -> None:
    shelf = Shelf(A, B)
    arrivals, watch = wanting(shelf, A)
    arrivals.want(watch, [B])
    arrivals.remove(watch, [A])
    arrivals.add(watch, [A, B])
    told(arrivals, watch, shelf)
    append(arrivals, shelf, A, 7)
    append(arrivals, shelf, B, 7)
    assert [arrival.inline_messages for arrival in told(arrivals, watch, shelf)] == [None, None]


def test_a_new_generation_comes_without_messages() -> None:
    shelf = Shelf(A)
    arrivals, watch = wanting(shelf, A)
    shelf.states[A] = State(2, [5])
    arrivals.topic_changed("t")
    assert told(arrivals, watch, shelf) == [Arrival(A, 2, 1)]
    append(arrivals, shelf, A, 6)
    assert [arrival.inline_messages for arrival in told(arrivals, watch, shelf)] == [
        inline_messages_of(1, [6])
    ]


def test_what_many_streams_want_is_read_once() -> None:
    shelf = Shelf(A)
    arrivals, first = wanting(shelf, A)
    others = [arrivals.open(Notifier()) for _ in range(5)]
    for watch in others:
        arrivals.add(watch, [A])
        told(arrivals, watch, shelf)
        arrivals.want(watch, [A])
    for place in range(3):
        append(arrivals, shelf, A, 7)
        for watch in (first, *others):
            assert told(arrivals, watch, shelf)[0].inline_messages == inline_messages_of(place, [7])
        assert shelf.reads == place + 1


def test_what_is_kept_for_other_streams_is_bounded() -> None:
    keys = [("t", number) for number in range(2 * SHARED_INLINE_MAX)]
    shelf = Shelf(*keys)
    arrivals, watch = wanting(shelf, *keys)
    arrivals.add(arrivals.open(Notifier()), keys)
    for key in keys:
        shelf.states[key].codes.append(7)
    arrivals.advanced([(key, 1) for key in keys])
    told(arrivals, watch, shelf)
    assert 0 < len(arrivals._shared) <= SHARED_INLINE_MAX


# --- limits and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [[1] * (TAG_UNITS_MAX + 1), list(range(TAG_CODES_MAX + 1))])
def test_too_many_tags_are_any(codes: list[int]) -> None:
    arrivals, shelf = Arrivals(), Shelf(A)
    watch = arrivals.open(Notifier())
    arrivals.add(watch, [A])
    told(arrivals, watch, shelf)
    append(arrivals, shelf, A, *codes)
    assert told(arrivals, watch, shelf) == [Arrival(A, 1, len(codes), ANY)]


def test_another_generation_is_told_with_any_tag() -> None:
    arrivals, shelf = Arrivals(), Shelf(A)
    watch = arrivals.open(Notifier())
    arrivals.add(watch, [A])
    append(arrivals, shelf, A, 7)
    told(arrivals, watch, shelf)
    shelf.states[A] = State(2, [5])
    arrivals.topic_changed("other")
    assert told(arrivals, watch, shelf) == []
    arrivals.topic_changed("t")
    assert told(arrivals, watch, shelf) == [Arrival(A, 2, 1, ANY)]


def test_a_queue_that_is_gone_ends_its_watch() -> None:
    arrivals, shelf = Arrivals(), Shelf(A)
    watch = arrivals.open(Notifier())
    arrivals.add(watch, [A, B])
    first, second = told(arrivals, watch, shelf)
    assert (first.key, first.error) == (A, None)
    assert (second.key, type(second.error)) == (B, QueueNotFound)
    assert B not in arrivals
    shelf.states[B] = State()
    arrivals.topic_changed("t")
    assert told(arrivals, watch, shelf) == []


def told_returns(arrivals: Arrivals, watch: Watch, shelf: Shelf) -> list[tuple[str, int, int]]:
    found = []
    while (arrival := arrivals.next_arrival(watch, shelf)) is not None:
        assert arrival.codes == ANY
        found += [(group, *one) for group, one in arrival.returns]
    return found


def test_what_came_back_to_groups_is_told_once_and_to_new_streams() -> None:
    shelf, arrivals, ring = Shelf(A, B), Arrivals(), Notifier()
    watch = arrivals.open(ring)
    arrivals.add(watch, [A])
    assert told_returns(arrivals, watch, shelf) == []
    rings = ring.rings
    arrivals.came_back(A, "G", 5, 2)
    arrivals.came_back(A, "H", 6, 1)
    arrivals.came_back(B, "G", 7, 1)
    arrivals.came_back(A, "G", 8, 3)
    arrivals.validate()
    assert ring.rings > rings
    assert told_returns(arrivals, watch, shelf) == [("G", 8, 5), ("H", 6, 1)], "both of G's"
    assert told_returns(arrivals, watch, shelf) == []
    shelf.states[A].codes.append(1)
    arrivals.advanced([(A, 1)])
    arrivals.came_back(A, "H", 9, 1)
    [arrival] = [arrivals.next_arrival(watch, shelf)]
    assert arrival is not None
    assert (arrival.max_offset, arrival.codes) == (1, frozenset({1}))
    assert [group for group, _ in arrival.returns] == ["H"]
    other = arrivals.open(Notifier())
    arrivals.add(other, [A])
    assert told_returns(arrivals, other, shelf) == [("G", 8, 3), ("H", 9, 1)]
    arrivals.came_back(A, "G", 10, 1)
    arrivals.returns.forget_group("G")
    arrivals.remove(other, [A])
    arrivals.validate()
    assert told_returns(arrivals, watch, shelf) == []


def test_many_groups_are_told_in_parts() -> None:
    shelf, arrivals = Shelf(A), Arrivals()
    watch = arrivals.open(Notifier())
    for number in range(1, 2_501):
        arrivals.came_back(A, f"G{number}", number, 1)
    arrivals.add(watch, [A])
    parts = []
    while (arrival := arrivals.next_arrival(watch, shelf)) is not None:
        parts.append(len(arrival.returns))
    assert parts == [1_024, 1_024, 452]


def test_what_nobody_watches_costs_nobody_anything() -> None:
    arrivals, shelf, notifier = Arrivals(), Shelf(A, B), Notifier()
    watch = arrivals.open(notifier)
    arrivals.add(watch, [A])
    told(arrivals, watch, shelf)
    rings, looks = notifier.rings, shelf.looks
    append(arrivals, shelf, B, 1)
    arrivals.remove(watch, [A, B])
    append(arrivals, shelf, A, 1)
    assert (notifier.rings, shelf.looks, arrivals.queue_count) == (rings, looks, 0)


def test_a_closed_stream_is_forgotten() -> None:
    arrivals, shelf = Arrivals(watches_max=1), Shelf(A)
    watch = arrivals.open(Notifier())
    arrivals.add(watch, [A])
    arrivals.close(watch)
    append(arrivals, shelf, A, 1)
    assert (len(arrivals), A in arrivals) == (0, False)
    arrivals.open(Notifier())


def test_limits_refuse_whole_requests() -> None:
    arrivals = Arrivals(watches_max=1, queues_max=2)
    watch = arrivals.open(Notifier())
    with pytest.raises(LimitExceeded):
        arrivals.open(Notifier())
    arrivals.add(watch, [A])
    with pytest.raises(LimitExceeded):
        arrivals.add(watch, [B, ("u", 0), A])
    assert arrivals.queue_count == 1
    arrivals.add(watch, [A, B])


class ArrivalsMachine(RuleBasedStateMachine):
    """Two streams that read now and then; what each was told is checked against the queues."""

    keys = st.sampled_from([A, B, ("u", 0)])
    which = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = Arrivals()
        self.shelf = Shelf(A, B, ("u", 0))
        self.notifiers = [Notifier(), Notifier()]
        self.watches = [self.arrivals.open(notifier) for notifier in self.notifiers]
        self.seen: list[dict[tuple[str, int], tuple[int, int] | None]] = [{}, {}]

    @rule(which=which, key=keys)
    def add(self, which: int, key: tuple[str, int]) -> None:
        self.arrivals.add(self.watches[which], [key])
        self.seen[which][key] = None

    @rule(which=which, key=keys)
    def want(self, which: int, key: tuple[str, int]) -> None:
        self.arrivals.want(self.watches[which], [key])

    @rule(which=which, key=keys)
    def remove(self, which: int, key: tuple[str, int]) -> None:
        self.arrivals.remove(self.watches[which], [key])
        self.seen[which].pop(key, None)

    @rule(key=keys, codes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def append(self, key: tuple[str, int], codes: list[int]) -> None:
        append(self.arrivals, self.shelf, key, *codes)

    @rule(key=keys)
    def create_again(self, key: tuple[str, int]) -> None:
        self.shelf.states[key] = State(self.shelf.states[key].generation + 1)
        self.arrivals.topic_changed(key[0])

    @rule(cold=st.booleans())
    def cache(self, cold: bool) -> None:
        self.shelf.cold = cold

    @rule(which=which)
    def read(self, which: int) -> None:
        seen = self.seen[which]
        found = told(self.arrivals, self.watches[which], self.shelf)
        assert len({arrival.key for arrival in found}) == len(found), "conflated"
        for arrival in found:
            before, state = seen[arrival.key], self.shelf.states[arrival.key]
            assert before != (arrival.generation, arrival.max_offset), "nothing is told twice"
            if arrival.codes:
                assert before is not None
                assert arrival.codes == set(state.codes[before[1] : arrival.max_offset])
            if arrival.inline_messages is not None:
                assert before is not None
                assert arrival.inline_messages == inline_messages_of(
                    before[1], state.codes[before[1] :]
                )
                assert arrival.inline_messages.end_offset == arrival.max_offset
            seen[arrival.key] = (arrival.generation, arrival.max_offset)
        for key, last in seen.items():
            state = self.shelf.states[key]
            assert last == (state.generation, state.max_offset), "nothing is missed"

    @invariant()
    def watched_is_what_streams_watch(self) -> None:
        self.arrivals.validate()
        for key in self.shelf.states:
            assert (key in self.arrivals) == any(key in seen for seen in self.seen)


TestArrivals = ArrivalsMachine.TestCase
