"""The text of an order configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import InvalidRequest
from cometmq.messaging.order import OrderedQueues, parse, text_of

NAMES = st.text("%|aZ09._-", min_size=1, max_size=9)


def test_rocketmqs_form() -> None:
    """What its updateOrderConf takes, and what a broker that registers itself writes."""
    wanted = (OrderedQueues("broker-b", 4), OrderedQueues("broker-a", 8))
    assert parse("broker-b:4;broker-a:8") == wanted
    assert parse(" broker-b:4; broker-a:8;") == wanted
    assert text_of(wanted) == "broker-b:4;broker-a:8"


@given(st.dictionaries(NAMES, st.integers(1, 1024), min_size=1, max_size=16))
def test_what_is_written_is_read(counts: dict[str, int]) -> None:
    queues = tuple(OrderedQueues(*entry) for entry in counts.items())
    assert parse(text_of(queues)) == queues


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "a",
        "a:",
        ":4",
        "a:0",
        "a:1025",
        "a:-1",
        "a:4;;b:4",
        "a:4;a:5",
        "a b:4",
        "a:\u0664",
        "a" * 128 + ":4",
        ";".join(f"g{n}:1024" for n in range(17)),
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="order: "):
        parse(text)
