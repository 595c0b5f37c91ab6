from __future__ import annotations

import pytest

from cometmq.client.sending.batch import Batch
from cometmq.client.sending.in_flight import LAST_ANSWER_S, InFlightBatches
from cometmq.errors import FlowControl, InternalError


def window(count: int, in_flight_max: int = 2, deadline_s: float = 10.0) -> InFlightBatches:
    made = InFlightBatches(in_flight_max)
    for sequence in range(1, count + 1):
        made.push(Batch(sequence, deadline_s + sequence))
    return made


def send(made: InFlightBatches, now_s: float = 0.0) -> list[tuple[int, int]]:
    """(batch id, sequence) of all that may be sent now."""
    sent = []
    while (item := made.take(now_s)) is not None:
        sent.append((item[0], item[1].sequence))
    return sent


def test_so_many_are_in_flight_and_no_more() -> None:
    made = window(5)
    assert send(made) == [(1, 1), (2, 2)]
    made.answered(1)
    assert send(made) == [(3, 3)]


def test_an_answer_out_of_order_is_a_fault_of_the_server() -> None:
    made = window(2)
    send(made)
    for wrong in (2, 0, 99):
        with pytest.raises(InternalError):
            made.answered(wrong)
    assert made.answered(1)[0].sequence == 1


def test_after_a_broken_stream_all_goes_again_in_order_from_id_1() -> None:
    made = window(4)
    send(made)
    made.restart()
    assert send(made) == [(1, 1), (2, 2)]
    assert [batch.sequence for batch in made.waiting] == [3, 4]


def test_a_refused_batch_goes_back_to_its_place() -> None:
    made = window(4)
    send(made)
    made.push(made.answered(1)[0])
    assert send(made) == [(3, 1)]


def test_the_oldest_answer_decides_whether_the_stream_is_given_up() -> None:
    made = window(2)
    assert made.waits_s(100.0) == 0.0
    made.take(5.0)
    made.take(7.0)
    assert made.waits_s(6.0) == 1.0

    made.answered(1)
    assert made.waits_s(7.5) == 0.5


def test_what_expires_is_told_once_and_its_answer_still_fits() -> None:
    made = window(4)
    send(made)
    assert [batch.sequence for batch in made.expire(13.0)] == [1, 2, 3]
    assert made.expire(13.0) == []
    assert [batch.sequence for batch in made.waiting] == [4]
    assert made.answered(1)[0].expired
    made.restart()
    assert [batch.sequence for batch in made.waiting] == [4]


def test_what_is_tried_once_more_gets_a_moment_for_its_answer() -> None:
    """It was refused before: the answer says that it is not stored."""
    made = window(4)
    send(made)
    again, _ = made.answered(1)
    again.refusal = FlowControl("for now")
    made.push(again)
    made.take(again.deadline_s)
    first = again.deadline_s
    assert again not in made.expire(first + LAST_ANSWER_S / 2)
    assert again in made.expire(first + LAST_ANSWER_S)
    assert again.may_be_stored


def test_draining_hands_out_what_has_no_answer() -> None:
    made = window(4)
    send(made)
    made.expire(11.0)
    assert [batch.sequence for batch in made.drain()] == [2, 3, 4]
    assert (made.waiting, made.in_flight) == ([], {})
