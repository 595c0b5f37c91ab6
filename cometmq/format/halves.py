"""The stored form of a half message, and of the records of ended halves. Spec:
docs/format/batch.md, docs/format/record.md.

A half is a message whose transaction has not ended. RocketMQ's form (docs/format/properties.md):
the record lies in the only queue of the half topic, and its properties name the producer group that
knows how the transaction ended, and the topic and queue that the message is meant for. When it is
committed, a record for that queue is made from it. An op record, in a topic of its own, lists the
halves that have ended, by their offsets in the half queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from cometmq.errors import InvalidRequest
from cometmq.format import record, taghash
from cometmq.format.properties import TAGS, UNIQ_KEY, decode, encode
from cometmq.model import IMMUNITY_S_MAX

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"  # for halves that no producer has ended
QUEUE_ID = 0  # of all three
HALF_QUEUE = (HALF_TOPIC, QUEUE_ID)
OFFSETS_GROUP = "CID_RMQ_SYS_TRANS"  # under which RocketMQ keeps how far it is in both queues

SYS_FLAG_COMMITTED = 2 << 2
SYS_FLAG_TRANSACTION = 3 << 2

TRAN_MSG, PGROUP = "TRAN_MSG", "PGROUP"
REAL_TOPIC, REAL_QID = "REAL_TOPIC", "REAL_QID"
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"  # RocketMQ's count; ours is state

OP_TAG = "d"
OP_BODY_BYTES_MAX = 4_096  # of a record that lists several halves, as in RocketMQ 5


class HalfForm(NamedTuple):
    """The properties that all halves of a run share: the producer group, and its immunity in s;
    0 = as long as the broker says.
    """

    group: str
    immunity_s: int = 0


class HalfProperties(NamedTuple):
    """The properties of a half. ``immunity_s`` 0: it names none. ``check_count``: how
    often RocketMQ has asked about it.
    """

    topic: str
    queue_id: int
    group: str
    immunity_s: int
    unique_id: str
    check_count: int


def check_immunity(immunity_s: int) -> None:
    """Raises ``InvalidRequest`` unless it is 0 to 3,600 seconds."""
    if not 0 <= immunity_s <= IMMUNITY_S_MAX:
        raise InvalidRequest(
            f"check_immunity_s: 0 (the broker's) to {IMMUNITY_S_MAX} s, not {immunity_s}"
        )


@lru_cache(maxsize=4096)  # a producer repeats its queues
def prefix(form: HalfForm, topic: str, queue_id: int) -> bytes:
    """What the properties of such a record begin with, byte for byte."""
    pairs = [(TRAN_MSG, "true"), (PGROUP, form.group), (REAL_TOPIC, topic), (REAL_QID, queue_id)]
    if form.immunity_s:
        pairs.append((IMMUNITY, form.immunity_s))
    return b"".join(f"{name}\x01{value}\x02".encode() for name, value in pairs)


def read(raw_properties: bytes) -> HalfProperties | None:
    """What a record of the half topic says, RocketMQ's too; None: it names no topic or queue."""
    properties = decode(raw_properties)
    topic, queue_id = properties.get(REAL_TOPIC, ""), _number(properties.get(REAL_QID, ""))
    if not topic or queue_id is None:
        return None
    immunity_s = min(_number(properties.get(IMMUNITY, "")) or 0, IMMUNITY_S_MAX)
    return HalfProperties(
        topic,
        queue_id,
        properties.get(PGROUP, ""),
        immunity_s,
        properties.get(UNIQ_KEY, ""),
        _number(properties.get(CHECK_TIMES, "")) or 0,
    )


# How our form begins, and ends.
_OUR_TARGET = re.compile(
    rb"TRAN_MSG\x01true\x02PGROUP\x01[^\x02]*\x02"
    rb"(REAL_TOPIC\x01[\x03-\xff]{1,255}\x02REAL_QID\x01[0-9]{1,9}\x02)"
)
_LAST_ID = re.compile(rb"\x02UNIQ_KEY\x01([\x03-\x7f]+)\x02\Z")


def target_text(properties: bytes) -> tuple[bytes, str]:
    """The part of our form that names the target of a half, and the unique id that ends it; both
    empty for a record of another form.
    """
    target, last = _OUR_TARGET.match(properties), _LAST_ID.search(properties)
    return (target[1], last[1].decode()) if target and last else (b"", "")


_COUNTED_ID = re.compile(r"(.*)([0-9A-F]{8})", re.DOTALL)


def split_id(unique_id: str) -> tuple[str, int] | None:
    """The stream of a unique id, and the counter that ends it in eight digits, as our producers
    make ids; None: it is another one.
    """
    found = _COUNTED_ID.fullmatch(unique_id)
    return (found[1], int(found[2], 16)) if found else None


@lru_cache(maxsize=4096)  # many halves have the same target
def target_of_text(text: bytes) -> tuple[str, int]:
    """The topic and queue that such a text names."""
    pairs = decode(text)
    return pairs[REAL_TOPIC], int(pairs[REAL_QID])


def _number(text: str) -> int | None:
    """None: it is no number of so few digits that Java's int holds it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class OpRecord(NamedTuple):
    """A record to be appended that lists halves which have ended."""

    body: bytes
    host: bytes  # the broker's own, as of a producer

    @property
    def topic(self) -> str:
        return OP_TOPIC

    @property
    def queue_id(self) -> int:
        return QUEUE_ID

    @property
    def size_bytes(self) -> int:
        head = record.layout_of_hosts(self.host, self.host).record_bytes_min
        return head + len(self.body) + len(OP_TOPIC) + len(_OP_PROPERTIES)

    def tags_code(self, store_time_ms: int) -> int:
        """What the record's unit holds."""
        return _OP_CODE

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        """The record as it is written at ``log_offset``."""
        assert len(store_host) == len(self.host)
        return record.encode(
            OP_TOPIC.encode(),
            QUEUE_ID,
            self.body,
            _OP_PROPERTIES,
            born_time_ms=store_time_ms,
            born_host=self.host,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
        )


_OP_PROPERTIES = encode({TAGS: OP_TAG})
_OP_CODE = taghash.tags_code(OP_TAG.encode())


def op_records(offsets: Sequence[int], host: bytes) -> list[OpRecord]:
    """The records that list these halves, RocketMQ 5's form: as few as their bodies allow."""
    return [OpRecord(body, host) for body in _op_bodies(offsets)]


def _op_bodies(offsets: Sequence[int]) -> Iterator[bytes]:
    each = OP_BODY_BYTES_MAX // (len(str(max(offsets, default=0))) + len(","))
    for first in range(0, len(offsets), each):
        yield ",".join(map(str, offsets[first : first + each])).encode()


def ended_halves(body: bytes) -> list[int]:
    """The offsets that an op record lists, in RocketMQ 4's form (one) or 5's (with commas). What is
    no number is passed over, as RocketMQ does.
    """
    return [int(text) for text in body.split(b",") if text.isdigit() and len(text) < 20]
