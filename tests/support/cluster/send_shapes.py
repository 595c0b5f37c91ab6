"""One message of each shape that the structured ``Send`` takes, each with an id of its client."""

from __future__ import annotations

from typing import Any

from cometmq.clock import SystemClock
from cometmq.format import request_reply
from cometmq.format.properties import SHARDING_KEY
from cometmq.v1 import broker_pb2 as pb

TOPIC, REPLY_TOPIC = "T", request_reply.reply_topic("DefaultCluster")
_OWN = {f"own{n}": f"value {n}" for n in range(5)}  # a map has another order in another process
_NUMBERED = "01" + "AB" * 12


def _message(unique_id: str, own: dict[str, str], fields: dict[str, Any]) -> pb.OutgoingMessage:
    properties = {"UNIQ_KEY": unique_id, **_OWN, **own}
    return pb.OutgoingMessage(
        **{"topic": TOPIC, "body": unique_id.encode(), **fields}, properties=properties
    )


def send_shapes() -> dict[str, pb.OutgoingMessage]:
    """The messages by the name of their shape. Every other one has a numbered id."""
    later_ms = SystemClock().wall_ms() + 3_600_000
    reply = request_reply.request_properties("asker", "7", 1_000)
    reply[request_reply.MSG_TYPE] = request_reply.REPLY
    shapes: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "plain": ({}, {}),
        "empty body": ({}, {"body": b""}),
        "tag and keys": ({}, {"tag": "A", "keys": ["k1", "k2"]}),
        "queue and flag": ({}, {"queue_id": 1, "flag": 7}),
        "own birth": ({}, {"born_time_ms": 1_700_000_000_000}),
        "more than ASCII": ({"größe": "übergroß"}, {"tag": "ä", "keys": ["ö"]}),
        "sharding key": ({SHARDING_KEY: "order-5"}, {"queue_id": 0}),
        "no wait": ({}, {"no_wait_store": True}),
        "delay level": ({}, {"delay_level": 18}),
        "delay": ({}, {"delay_ms": 3_600_000}),
        "delay, no wait": ({}, {"delay_ms": 3_600_000, "no_wait_store": True}),
        "time": ({}, {"deliver_at_ms": later_ms}),
        "half": ({}, {"producer_group": "P"}),
        "half with immunity": ({}, {"producer_group": "P", "check_immunity_s": 60}),
        "reply": (reply, {"topic": REPLY_TOPIC, "keys": ["7"]}),
    }
    made = {}
    for number, (name, (own, fields)) in enumerate(shapes.items()):
        unique_id = f"{_NUMBERED}{3 * number:08X}" if number % 2 else f"order {number}"
        made[name] = _message(unique_id, own, fields)
    made["long id"] = _message("i" * 200, {}, {})
    return made
