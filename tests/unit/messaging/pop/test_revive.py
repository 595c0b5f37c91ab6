"""What RocketMQ's revive log says is not acknowledged."""

from __future__ import annotations

import json
from itertools import permutations

import pytest

from cometmq.messaging.pop.revive import ACK, BATCH_ACK, CHECKPOINT, ReviveLog

KEY = {"c": "G", "t": "T", "q": 2, "so": 10, "pt": 1_000}


def message(tag: str, **more: object) -> tuple[str, bytes]:
    return tag, json.dumps({**KEY, "bn": "broker", **more}).encode()


DENSE = message(CHECKPOINT, it=500, n=4, bm=0, ro=7)


def open_after(*messages: tuple[str, bytes]) -> dict[int, int]:
    log = ReviveLog()
    assert all(log.add(*one) for one in messages)
    return log.open().get(("G", ("T", 2)), {})


def test_a_checkpoint_without_gaps() -> None:
    assert open_after(DENSE) == dict.fromkeys((10, 11, 12, 13), 1_500)


def test_messages_between_others_and_what_is_acknowledged_already() -> None:
    # As 5.x writes it: the distance of each to the first, and a bit for each that is done.
    assert open_after(message(CHECKPOINT, it=500, n=3, bm=0b10, d=[0, 3, 40])) == {
        10: 1_500,
        50: 1_500,
    }


def test_acknowledgements_in_any_order() -> None:
    messages = [DENSE, message(ACK, ao=11), message(BATCH_ACK, aol=[10, 13])]
    for some in permutations(messages):
        assert open_after(*some) == {12: 1_500}


def test_those_of_another_time_or_message_do_not_count() -> None:
    others = [message(ACK, ao=11, pt=999), message(ACK, ao=12, so=11), message(ACK, ao=99)]
    assert len(open_after(DENSE, *others)) == 4


def test_more_time_is_a_new_checkpoint_and_an_acknowledgement() -> None:
    more = message(CHECKPOINT, so=11, pt=1_200, it=60_000, n=1, bm=0)
    assert open_after(DENSE, more, message(ACK, ao=11)) == {
        **dict.fromkeys((10, 12, 13), 1_500),
        11: 61_200,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        (CHECKPOINT, b"{"),
        (CHECKPOINT, b"[]"),
        (CHECKPOINT, b'"x"'),
        ("other", DENSE[1]),
        message(CHECKPOINT, it=1, n=33, bm=0),
        message(CHECKPOINT, it=1, n=-1, bm=0),
        message(CHECKPOINT, it=1, n=1, bm=0, d=list(range(40))),
        message(CHECKPOINT, it="soon", n=1, bm=0),
        message(CHECKPOINT, it=1, n=1, bm=0, c=None),
        message(CHECKPOINT, it=1, n=1, bm=0, pt=2**63),
        message(ACK),
        message(ACK, ao=None),
        message(BATCH_ACK, aol=3),
        message(ACK, ao=float("inf")),
        (ACK, b"[" * 100_000),
        message(CHECKPOINT, it=1, n=1, bm=0, d=[float("inf")]),
        message(CHECKPOINT, it=2**63 - 1, n=1, bm=0),
        message(CHECKPOINT, it=-2_000, n=1, bm=0),
    ],
)
def test_what_does_not_read_is_passed_over(wrong: tuple[str, bytes]) -> None:
    log = ReviveLog()
    assert not log.add(*wrong)
    assert log.open() == {}
