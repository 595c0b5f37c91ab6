"""A table of topics that Apache RocketMQ 5.5.1 wrote: types, order and attributes, and back."""

from __future__ import annotations

from cometmq.messaging import adoption
from cometmq.messaging.adoption import Queues
from cometmq.messaging.rocketmq_tables import TOPICS, SnapshotMark, export, parse
from cometmq.messaging.state import BrokerState
from cometmq.model import FlushMode, MessageType
from tests.compat.golden import GOLDEN, TYPED

CONTENT = (GOLDEN / TYPED).read_bytes()


def adopted() -> BrokerState:
    state = BrokerState()
    queues = Queues([], verified=lambda *_: 0, maximum=lambda *_: 0)
    adoption.adopt_tables(state, adoption.read({TOPICS: CONTENT}), queues, FlushMode.ASYNC)
    return state


def test_types_and_order_are_taken_over() -> None:
    found = {config.name: config for config in adopted().topics}
    assert {name: (c.message_type, c.is_ordered, c.attributes) for name, c in found.items()} == {
        "fifo": (MessageType.FIFO, True, ()),
        "late": (MessageType.DELAY, False, (("cleanup.policy", "DELETE"),)),
        "plain": (MessageType.UNSPECIFIED, False, ()),
    }


def test_what_goes_back_is_what_came() -> None:
    ours = export(adopted(), SnapshotMark(1, 0), 0)[TOPICS]
    assert parse(ours)["topicConfigTable"] == parse(CONTENT)["topicConfigTable"]
