"""Trace records in RocketMQ's form: the steps of single messages that a client took. Pure.

``\\x01`` separates fields, and each record ends with ``\\x02``. A message of the trace topic
has many of them; its keys are the ids and keys of the messages that they are about. Absent texts
are ``null``, as Java writes them: RocketMQ's reader counts fields, and drops empty ones at the end.
Times are milliseconds since 1970-01-01 UTC, by the client's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

FIELD: Final = "\x01"
RECORD: Final = "\x02"
NULL: Final = "null"
REGION: Final = "DefaultRegion"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
TRACE_ON: Final = "TRACE_ON"  # property of a message: "true" or "false", whatever the sampling says

TEXT_LENGTH_MAX = 4_096  # of a field: the rest of a longer one is left out
INT_MAX = 2**31 - 1  # RocketMQ reads durations and sizes as Java's int

# Ordinals of RocketMQ's MessageType.
NORMAL, HALF, COMMIT, DELAY, ORDER = range(5)
# Ordinals of RocketMQ's ConsumeReturnType.
SUCCESS, TIME_OUT, EXCEPTION, RETURN_NULL, FAILED = range(5)


class Pub(NamedTuple):
    """A send. ``time_ms``: when it began; ``cost_ms``: until its answer."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str
    body_bytes: int
    cost_ms: int
    message_type: int
    offset_message_id: str
    is_success: bool


class SubBefore(NamedTuple):
    """A listener call begins. ``request_id`` is that of its :class:`SubAfter`."""

    time_ms: int
    group: str
    request_id: str
    message_id: str
    retry_times: int
    keys: str


class SubAfter(NamedTuple):
    """A listener call has ended. Time and group are 0 and empty in records of old clients."""

    request_id: str
    message_id: str
    cost_ms: int
    is_success: bool
    keys: str
    code: int
    time_ms: int
    group: str


class EndTransaction(NamedTuple):
    """A transaction was ended by its producer. ``state``: RocketMQ's LocalTransactionState."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    tags: str
    keys: str
    store_host: str
    message_type: int
    transaction_id: str
    state: str
    from_check: bool


class Recall(NamedTuple):
    """A delayed message was recalled, or was not in time."""

    time_ms: int
    group: str
    topic: str
    message_id: str
    is_success: bool


TraceRecord: TypeAlias = Pub | SubBefore | SubAfter | EndTransaction | Recall


def encode(record: TraceRecord) -> str:
    """The record with its end. Separators inside of texts become blanks."""
    fields = _ENCODERS[type(record)](record)
    return FIELD.join([type(record).__name__, *map(text_field, fields)]) + RECORD


def decode(body: str) -> Iterator[TraceRecord]:
    """The records of a body of the trace topic. What is none is passed by: anyone may send one."""
    for line in body.split(RECORD):
        kind, *fields = line.split(FIELD)
        decoder = _DECODERS.get(kind)
        if decoder is None:
            continue
        try:
            yield decoder(["" if field == NULL else field for field in fields])
        except (IndexError, ValueError):
            continue


def text_field(value: str | int) -> str:
    """A field as a record has it."""
    if value.__class__ is int:
        return str(value)
    if value is True or value is False:
        return "true" if value else "false"
    assert isinstance(value, str)
    if not value:
        return NULL
    if FIELD in value or RECORD in value or len(value) > TEXT_LENGTH_MAX:
        value = value[:TEXT_LENGTH_MAX].replace(FIELD, " ").replace(RECORD, " ")
    return value


def _int(value: int) -> int:
    return max(0, min(value, INT_MAX))


def _pub(r: Pub) -> tuple[str | int, ...]:
    return (
        *(r.time_ms, REGION, r.group, r.topic, r.message_id, r.tags, r.keys, r.store_host),
        *(_int(r.body_bytes), _int(r.cost_ms), r.message_type, r.offset_message_id, r.is_success),
    )


def _sub_before(r: SubBefore) -> tuple[str | int, ...]:
    return r.time_ms, REGION, r.group, r.request_id, r.message_id, _int(r.retry_times), r.keys


def _sub_after(r: SubAfter) -> tuple[str | int, ...]:
    return (
        *(r.request_id, r.message_id, _int(r.cost_ms), r.is_success, r.keys),
        *(r.code, r.time_ms, r.group),
    )


def _end(r: EndTransaction) -> tuple[str | int, ...]:
    return (
        *(r.time_ms, REGION, r.group, r.topic, r.message_id, r.tags, r.keys, r.store_host),
        *(r.message_type, r.transaction_id, r.state, r.from_check),
    )


def _recall(r: Recall) -> tuple[str | int, ...]:
    return r.time_ms, REGION, r.group, r.topic, r.message_id, r.is_success


_ENCODERS: dict[type, Callable[..., tuple[str | int, ...]]] = {
    Pub: _pub,
    SubBefore: _sub_before,
    SubAfter: _sub_after,
    EndTransaction: _end,
    Recall: _recall,
}


def _read_pub(f: list[str]) -> Pub:
    offset_id, success = ("", f[11]) if len(f) == 12 else (f[11], f[12])  # 4.x had no id there
    return Pub(
        *(int(f[0]), f[2], f[3], f[4], f[5], f[6], f[7], int(f[8]), int(f[9]), int(f[10])),
        *(offset_id, success == "true"),
    )


def _read_sub_before(f: list[str]) -> SubBefore:
    keys = f[6] if len(f) > 6 else ""
    return SubBefore(int(f[0]), f[2], f[3], f[4], int(f[5]), keys)


def _read_sub_after(f: list[str]) -> SubAfter:
    more = [*f[5:8], "", "", ""][:3]  # old clients do not write them
    return SubAfter(
        *(f[0], f[1], int(f[2]), f[3] == "true", f[4] if len(f) > 4 else ""),
        *(int(more[0] or 0), int(more[1] or 0), more[2]),
    )


def _read_end(f: list[str]) -> EndTransaction:
    return EndTransaction(
        *(int(f[0]), f[2], f[3], f[4], f[5], f[6], f[7], int(f[8]), f[9], f[10], f[11] == "true"),
    )


def _read_recall(f: list[str]) -> Recall:
    return Recall(int(f[0]), f[2], f[3], f[4], f[5] == "true")


_DECODERS: dict[str, Callable[[list[str]], TraceRecord]] = {
    "Pub": _read_pub,
    "SubBefore": _read_sub_before,
    "SubAfter": _read_sub_after,
    "EndTransaction": _read_end,
    "Recall": _read_recall,
}
