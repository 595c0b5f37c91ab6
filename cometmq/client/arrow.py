"""Messages as columns, for Arrow and what reads it: pandas, Polars, DuckDB, Parquet. Needs the
optional extra ``arrow`` (pyarrow).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

from cometmq.client.received import ReceivedMessage
from cometmq.errors import ConfigInvalid, InvalidRequest

Value = Callable[[ReceivedMessage], object]

# Name, Arrow type in pyarrow's words, the value of a message; docs/reference/client.md has the
# meaning of each.
_COLUMNS: tuple[tuple[str, str, Value], ...] = (
    ("topic", "string", attrgetter("topic")),
    ("broker_group", "string", attrgetter("queue.broker_group")),
    ("queue_id", "int32", attrgetter("queue.queue_id")),
    ("queue_offset", "int64", attrgetter("queue_offset")),
    ("message_id", "string", attrgetter("message_id")),
    ("unique_id", "string", lambda message: message.unique_id or None),
    ("born_time", "timestamp", attrgetter("born_time_ms")),
    ("store_time", "timestamp", attrgetter("store_time_ms")),
    ("reconsume_times", "int32", attrgetter("reconsume_times")),
    ("flag", "int32", attrgetter("flag")),
    ("tag", "string", lambda message: message.tag or None),
    ("keys", "list", attrgetter("keys")),
    ("properties", "map", lambda message: [*message.properties.items()]),
    ("body", "binary", attrgetter("body")),
)
COLUMNS = tuple(name for name, _, _ in _COLUMNS)


def to_arrow(messages: Sequence[ReceivedMessage], columns: Collection[str] = COLUMNS) -> Any:
    """A ``pyarrow.Table`` with a row for each message, in their order, and these columns in theirs;
    no other field is decoded. Raises ConfigInvalid (pyarrow is not installed), InvalidRequest (a
    column that does not exist), BodyCompressionInvalid.
    """
    arrow = _arrow()
    known = {name: (kind, value) for name, kind, value in _COLUMNS}
    if isinstance(columns, str) or not known.keys() >= {*columns}:
        raise InvalidRequest(
            f"columns is a collection of some of {', '.join(known)}; not {columns!r:.200}"
        )
    types = _types(arrow)
    fields = [arrow.field(name, types[known[name][0]]) for name in columns]
    arrays = [
        arrow.array(map(known[field.name][1], messages), field.type, size=len(messages))
        for field in fields
    ]
    return arrow.Table.from_arrays(arrays, schema=arrow.schema(fields))


def _types(arrow: Any) -> dict[str, Any]:
    return {
        "binary": arrow.binary(),
        "int32": arrow.int32(),
        "int64": arrow.int64(),
        "list": arrow.list_(arrow.string()),
        "map": arrow.map_(arrow.string(), arrow.string()),
        "string": arrow.string(),
        "timestamp": arrow.timestamp("ms", tz="UTC"),
    }


def _arrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as missing:
        raise ConfigInvalid(
            f"to_arrow needs {missing.name}: pip install 'cometmq[arrow]'"
        ) from None
    return pyarrow
