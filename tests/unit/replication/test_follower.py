from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import InvalidRequest, NoFollower, StaleEpoch
from cometmq.replication.follower import (
    CHUNK_BYTES_MAX,
    HANDOVER_BEHIND_BYTES_MAX,
    WINDOW_BYTES_MAX,
    Ack,
    LogView,
    Plan,
    Replica,
    check_epochs,
    choose_successor,
    owned,
    plan,
    start_of_copy,
)
from cometmq.replication.lease import ReplicaId

WRITER = LogView(((1, 0), (2, 100), (4, 300)), 0, 500)


def agree(offset: int) -> int:
    """Every record of the writer's is the follower's."""
    return 7


def differ(offset: int) -> int:
    return 8


def follower(*epochs: tuple[int, int], end: int, low: int = 0) -> LogView:
    return LogView(epochs, low, end, end - 10, 7)


@pytest.mark.parametrize(
    ("view", "start"),
    [
        (LogView((), 0, 0), 0),
        (follower((1, 0), (2, 100), (4, 300), end=400), 400),  # just behind
        (follower((1, 0), (2, 100), (4, 300), end=500), 500),
        (follower((1, 0), (2, 100), (4, 300), end=600), 500),  # the writer lost its end
        (follower((1, 0), (2, 100), end=350), 300),  # epoch 2 was longer at the follower
        (follower((1, 0), (2, 100), end=250), 250),
        (follower((1, 0), (3, 80), end=200), 80),  # epoch 3 is unknown to the writer
        (follower((1, 0), end=60), 60),
        (follower((3, 0), end=60), 0),  # nothing in common
        (follower((2, 90), end=200, low=90), 0),  # epoch 2 began elsewhere
    ],
)
def test_where_two_logs_agree(view: LogView, start: int) -> None:
    assert start_of_copy(WRITER, view, agree) == start


def test_a_last_record_that_is_another_one_puts_its_epoch_in_doubt() -> None:
    view = follower((1, 0), (2, 100), (4, 300), end=400)
    assert start_of_copy(WRITER, view, differ) == 300
    assert start_of_copy(WRITER, view, lambda _: None) == 300
    cut = follower((1, 0), (2, 100), end=300)
    assert start_of_copy(WRITER, cut, differ) == 100
    assert start_of_copy(WRITER, follower((1, 0), end=100), differ) == 0


def test_the_last_record_does_not_matter_when_it_is_cut_off() -> None:
    view = follower((1, 0), (2, 100), end=350)
    assert start_of_copy(WRITER, view, differ) == 300


def test_what_the_writer_keeps_no_more_cannot_be_gone_on_with() -> None:
    writer = LogView(((1, 0), (2, 100), (4, 300)), 200, 500)
    assert start_of_copy(writer, follower((1, 0), end=60), agree) == 200
    assert start_of_copy(writer, follower((1, 0), (2, 100), end=250), agree) == 250
    assert start_of_copy(writer, LogView((), 0, 0), agree) == 200


def test_a_log_that_begins_behind_what_waits_at_the_writer_is_copied_again() -> None:
    """Its member had stored that again as a writer, which is cut, and had removed the original."""
    view = follower((1, 0), (2, 100), (4, 300), end=600, low=200)
    assert start_of_copy(WRITER, view, agree, waits_from=199) == WRITER.log_min
    assert plan(view, WRITER.log_min) is Plan.RESET
    assert start_of_copy(WRITER, view, agree, waits_from=200) == 500
    assert start_of_copy(WRITER, LogView((), 0, 0), agree, waits_from=199) == WRITER.log_min


def test_a_follower_of_a_newer_writer_is_not_served() -> None:
    with pytest.raises(StaleEpoch, match="epoch 5"):
        start_of_copy(WRITER, follower((1, 0), (5, 100), end=200), agree)


@pytest.mark.parametrize(
    ("start", "expected"), [(400, Plan.COPY), (399, Plan.CUT), (100, Plan.RESET), (500, Plan.RESET)]
)
def test_what_a_follower_does_with_the_answer(start: int, expected: Plan) -> None:
    assert plan(follower((1, 0), end=400, low=100), start) is expected


def test_an_empty_log_that_begins_where_the_writers_does_is_copied_to() -> None:
    assert plan(LogView((), 200, 200), 200) is Plan.COPY
    assert plan(LogView((), 0, 0), 200) is Plan.RESET


@pytest.mark.parametrize(
    "epochs", [((1, 0), (1, 5)), ((2, 0), (1, 5)), ((1, 5), (2, 5)), ((0, 0),)]
)
def test_epochs_that_do_not_grow_are_refused(epochs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidRequest):
        check_epochs(epochs)


# --- against logs that are written out byte by byte -----------------------------------------------

History = list[tuple[int, int]]  # the epoch that wrote each byte, and a mark of the byte itself


def view_of(log: History) -> LogView:
    starts: dict[int, int] = {}
    for offset, (epoch, _) in enumerate(log):
        starts.setdefault(epoch, offset)
    return LogView(tuple(starts.items()), 0, len(log), len(log) - 1, hash(log[-1]) if log else 0)


@st.composite
def two_logs(draw: st.DrawFn) -> tuple[History, History]:
    """Writers take turns: each begins on one member's log, that may have lost its end. Of every
    epoch there is one history; the other member has a part of it, or not.
    """
    logs: list[History] = [[], []]
    for epoch in range(1, draw(st.integers(2, 6))):
        writer = draw(st.integers(0, 1))
        log, other = logs[writer], logs[1 - writer]
        if draw(st.booleans()) and log:
            del log[draw(st.integers(0, len(log))) :]
        common = 0
        while common < min(len(log), len(other)) and log[common] == other[common]:
            common += 1
        first = len(log)
        log += [(epoch, draw(st.integers(0, 2**20))) for _ in range(draw(st.integers(1, 4)))]
        if draw(st.booleans()):  # the other follows
            del other[common:]
            other += log[common : draw(st.integers(min(first, len(log)), len(log)))]
    return logs[0], logs[1]


@given(two_logs())
def test_after_the_handshakes_nothing_is_left_that_the_writer_does_not_have(
    logs: tuple[History, History],
) -> None:
    writer, copy = logs
    newest = max((epoch for epoch, _ in writer + copy), default=0)
    # whoever opens for writing has a number above all others
    writer = [*writer, (newest + 1, 0)]
    for _ in range(20):
        start = start_of_copy(view_of(writer), view_of(copy), lambda at: hash(writer[at]))
        if plan(view_of(copy), start) is Plan.COPY:
            break
        copy = copy[:start]
    else:
        raise AssertionError("the handshakes come to no end")
    assert copy == writer[: len(copy)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99))), st.integers(0, 99))
def test_owned_epochs_have_a_byte(epochs: list[tuple[int, int]], end: int) -> None:
    assert all(start < end for _, start in owned(epochs, end))


# --- the writer's followers -----------------------------------------------------------------------


def replica(member_id: int = 1, appended: int = 0, flushed: int = 0) -> Replica:
    found = Replica(ReplicaId(member_id, "store"), 0, now_s=0.0)
    if appended:
        found.sent_to(appended)
        found.acked(Ack(appended, flushed, 0, 0), appended)
    return found


def test_no_more_is_sent_than_the_window_holds() -> None:
    found = replica()
    found.sent_to(WINDOW_BYTES_MAX - CHUNK_BYTES_MAX)
    assert found.has_room
    found.sent_to(WINDOW_BYTES_MAX)
    assert not found.has_room


def test_a_window_that_is_full_opens_by_whole_chunks() -> None:
    found = replica()
    found.sent_to(WINDOW_BYTES_MAX + 500)
    found.acked(Ack(CHUNK_BYTES_MAX + 499, 0, 0, 0), 10**9)
    assert not found.has_room, "less than a chunk would be sent"
    found.acked(Ack(CHUNK_BYTES_MAX + 500, 0, 0, 0), 10**9)
    assert found.has_room


def test_a_new_stream_takes_nothing_off_the_followers_disk() -> None:
    found = replica(appended=100, flushed=20)
    found.join(100)
    assert (found.appended, found.flushed) == (100, 20)
    found.join(15)
    assert (found.appended, found.flushed) == (15, 15)


@pytest.mark.parametrize("ack", [(50, 20), (101, 20), (100, 19), (100, 101)])
def test_an_ack_that_cannot_be_is_refused(ack: tuple[int, int]) -> None:
    found = replica(appended=100, flushed=20)
    with pytest.raises(InvalidRequest):
        found.acked(Ack(*ack, 0, 0), 100)


def test_an_answer_shows_as_of_when_it_had_everything() -> None:
    found = replica()
    found.sent_to(200)
    found.framed(1000, 100)
    found.framed(2000, 200)
    found.acked(Ack(100, 0, 1000, 0), 300)
    assert (found.in_step_s, found.heard_s) == (1.0, 1.0)
    found.acked(Ack(199, 0, 2000, 0), 300)
    assert (found.in_step_s, found.heard_s) == (1.0, 2.0)
    found.acked(Ack(200, 0, 2000, 0), 300)
    assert found.in_step_s == 2.0


def test_who_has_everything_that_there_is_was_in_step_when_it_was_asked() -> None:
    found = replica(appended=100, flushed=100)
    found.framed(7000, 100)
    found.acked(Ack(100, 100, 7000, 0), 100)
    assert found.in_step_s == 7.0


def test_a_promise_counts_from_when_the_frame_was_sent() -> None:
    found = replica()
    found.framed(4000, 0)
    found.framed(4500, 0)
    found.acked(Ack(0, 0, 4000, 6000), 0)
    assert found.promised_until_s == pytest.approx(9.94)
    found.acked(Ack(0, 0, 4500, 0), 0)
    assert found.promised_until_s == pytest.approx(9.94), "what was promised holds"
    found.acked(Ack(0, 0, 4500, 1000), 0)
    assert found.promised_until_s == pytest.approx(9.94)


@pytest.mark.parametrize("answers_ms", [3999, 5001])
def test_only_frames_that_were_sent_are_answered_in_order(answers_ms: int) -> None:
    found = replica()
    found.framed(4000, 0)
    found.framed(5000, 0)
    found.acked(Ack(0, 0, 4000, 0), 0)
    with pytest.raises(InvalidRequest):
        found.acked(Ack(0, 0, answers_ms, 0), 0)


def test_how_far_behind() -> None:
    found = replica(appended=100, flushed=100)
    assert found.behind_s(100, 50.0) == 0.0
    assert found.behind_bytes(150) == 50
    assert found.behind_s(150, 50.0) == 50.0
    assert found.has_all(100)
    assert not found.has_all(101)


def test_the_successor_is_who_has_come_furthest_or_who_was_named() -> None:
    near, far = replica(1, 100, 100), replica(2, 100, 90)
    assert choose_successor([far, near], None, 100) is near
    assert choose_successor([far, near], 2, 100) is far
    assert choose_successor([replica(2, 5, 5), replica(1, 5, 5)], None, 5).member_id == 1


def test_a_member_whose_clock_is_off_takes_over_when_no_other_can() -> None:
    near, far = replica(1, 100, 100), replica(2, 100, 90)
    assert choose_successor([near, far], None, 100, {1}) is far
    assert choose_successor([near, far], None, 100, {1, 2}) is near
    assert choose_successor([near, far], 1, 100, {1}) is near, "an operator has named it"
    end = 100 + HANDOVER_BEHIND_BYTES_MAX
    assert choose_successor([near, replica(2, 90, 90)], None, end, {1}) is near


@pytest.mark.parametrize("wanted", [None, 1])
def test_a_leaving_follower_takes_nothing_over(wanted: int | None) -> None:
    leaving = replica(1, 100, 100)
    leaving.acked(Ack(100, 100, 0, 0, leaving=True), 100)
    with pytest.raises(NoFollower):
        choose_successor([leaving], wanted, 100)
    assert choose_successor([leaving, replica(2, 90, 90)], None, 100).member_id == 2


@pytest.mark.parametrize(
    ("wanted", "end", "match"),
    [(3, 100, "member 3"), (1, 101 + HANDOVER_BEHIND_BYTES_MAX, "bytes behind")],
)
def test_who_cannot_take_over(wanted: int, end: int, match: str) -> None:
    with pytest.raises(NoFollower, match=match):
        choose_successor([replica(1, 100, 100)], wanted, end)
    with pytest.raises(NoFollower, match="no follower"):
        choose_successor([], None, 0)
