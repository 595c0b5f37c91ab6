"""The properties of a record: ``name \\x01 value \\x02`` pairs in UTF-8. Spec:
docs/format/properties.md.

Written in the 5.x form (with the last ``\\x02``), read in both. What producers send is checked
strictly (:func:`verify`), what already lies in a log is read as leniently as RocketMQ's clients
read it (:func:`decode`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cometmq.errors import PropertiesInvalid, PropertiesTooLarge, PropertyReserved
from cometmq.format.request_reply import CORRELATION_ID, MSG_TYPE, REPLY_TO_CLIENT, TTL
from cometmq.model import PROPERTIES_BYTES_MAX

KEYS = "KEYS"
TAGS = "TAGS"
UNIQ_KEY = "UNIQ_KEY"
SHARDING_KEY = "__SHARDINGKEY"  # messages of one key go to one queue
RETRY_TOPIC = "RETRY_TOPIC"  # of a message that was sent back: the topic that it was sent to first
_SHARDING_KEY = f"{SHARDING_KEY}\x01".encode()
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"  # of the same: the id that it had at first
FIELD_NAMES = frozenset((KEYS, SHARDING_KEY, TAGS, UNIQ_KEY))  # fields of Message, or ours
KEY_SEPARATOR = " "  # between the keys inside the value of KEYS

RESERVED = frozenset(
    """
    WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MAX_RECONSUME_TIMES
    CONSUME_START_TIME TRAN_PREPARED_QUEUE_OFFSET TRANSACTION_CHECK_TIMES ARRIVE_TIME
    CHECK_IMMUNITY_TIME_IN_SECONDS PUSH_REPLY_TIME CLUSTER INNER_MULTI_DISPATCH INNER_NUM INNER_BASE
    INNER_MULTI_QUEUE_OFFSET EXTEND_UNIQ_INFO DUP_INFO __transactionId__ POP_CK POP_CK_OFFSET
    1ST_POP_TIME PROPERTY_FORWARD_QUEUE_ID REDIRECT TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_DELAY_MS
    TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY
    TIMER_DELAY_LEVEL __BORNHOST __CRC32# DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID
    """.split()  # noqa: SIM905 - forty lines less
)
"""Names that belong to the broker; a record of a producer must not carry them."""

RESERVED_PREFIX = "__RMQ.TRANSIENT."  # names that are never stored

# A name or a value: at least one byte, none of the two separators, and no NUL: a torn write leaves
# zeros behind, and recovery must not take them for properties.
_TEXT = rb"[\x03-\xff]++"
FRAMING = re.compile(rb"(?:%b\x01%b\x02)*+(?:%b\x01%b)?" % (_TEXT, _TEXT, _TEXT, _TEXT))
"""What a producer may send, as a full match: whole pairs, nothing empty, the last ``\\x02``
optional."""

STORED_FRAMING = re.compile(
    rb"(?:(?:%(name)b\x01%(value)b)?+\x02)*+(?:%(name)b\x01%(value)b)?+"
    % {b"name": rb"[\x03-\xff]*+", b"value": rb"[\x01\x03-\xff]*+"}
)
"""The properties that a log may have, as a full match: also what RocketMQ accepts (empty names and
values, ``\x01`` in a value, a separator too many). Narrow enough to find the zeros of a torn write.
"""


def _harmless(text: bytes, unlike_reserved: bytes) -> re.Pattern[bytes]:
    """Whole pairs of non-empty ``text``, none of them reserved; group 1 is the (last) tag. A name
    whose first byte is ``unlike_reserved`` is not compared with the reserved ones."""
    return re.compile(
        rb"(?:"
        rb"TAGS\x01(%(text)b++)(?:\x02|\Z)"
        rb"|(?:KEYS|UNIQ_KEY"
        rb"|%(unlike_reserved)b%(text)b*+"
        rb"|(?!(?:%(reserved)b)\x01|%(prefix)b)[A-Z1_]%(text)b*+"
        rb")\x01%(text)b++(?:\x02|\Z)"
        rb")*+"
        % {
            b"text": text,
            b"unlike_reserved": unlike_reserved,
            b"reserved": b"|".join(re.escape(name.encode()) for name in sorted(RESERVED)),
            b"prefix": re.escape(RESERVED_PREFIX.encode()),
        }
    )


CLEAN = _harmless(rb"[\x03-\x7f]", rb"[\x03-02-@\[-^`-\x7f]")
"""The quick look of the append path: a full match may be stored, without any doubt, and group 1 is
the tag. No match says nothing: :func:`clean_text` is the look at text beyond ASCII, :func:`verify`
decides."""

_CLEAN_IF_UTF8 = _harmless(rb"[\x03-\xff]", rb"[\x03-02-@\[-^`-\xff]")
assert all(name[0] in "ABCDEFGHIJKLMNOPQRSTUVWXYZ1_" for name in RESERVED | {RESERVED_PREFIX})


def encode(properties: Mapping[str, str]) -> bytes:
    """The properties as a record carries them. Reserved names pass: the broker has to write them.

    Raises PropertiesInvalid (empty name or value, a control character 0, 1 or 2, not encodable),
    PropertiesTooLarge.
    """
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise PropertiesInvalid(f"a property is not text: {error}") from None
    if len(data) > PROPERTIES_BYTES_MAX:
        raise PropertiesTooLarge(
            f"the properties have {len(data)} bytes, {PROPERTIES_BYTES_MAX} are allowed"
        )
    # One separator of each kind was put in for each pair: if there are no more, then names and
    # values hold none.
    separators_fit = len(properties) == text.count("\x01") == text.count("\x02")
    if not separators_fit or "\x00" in text or "" in properties or not all(properties.values()):
        _refuse_pair(properties)
    return data


def _refuse_pair(properties: Mapping[str, str]) -> None:
    for name, value in properties.items():
        for what, text in (("name", name), ("value", value)):
            if not text or any(c in text for c in "\x00\x01\x02"):
                raise PropertiesInvalid(
                    f"the {what} of property {name!r} is empty or has a control character 0, 1 or 2"
                )
    raise AssertionError("some pair is wrong, or encode() would not ask")


def decode(properties: bytes) -> dict[str, str]:
    """The pairs, as RocketMQ's clients read them: incomplete pairs and empty names or values are
    dropped, the last of several equal names wins, what is not UTF-8 becomes U+FFFD."""
    pairs = [pair.partition("\x01") for pair in properties.decode("utf-8", "replace").split("\x02")]
    return {name: value for name, _, value in pairs if name and value}


def tag_of(properties: bytes) -> bytes:
    """The value of TAGS, as bytes; empty = no tag. The same as :func:`decode` finds, without
    decoding the rest."""
    at = properties.rfind(b"\x02TAGS\x01")
    if at >= 0:
        at += 6
    elif properties.startswith(b"TAGS\x01"):
        at = 5
    else:
        return b""
    end = properties.find(b"\x02", at)
    tag = properties[at:] if end < 0 else properties[at:end]
    # An empty pair does not count, an earlier one may.
    return tag or decode(properties).get(TAGS, "").encode()


def sharding_key_of(properties: bytes) -> bytes:
    """The value of ``__SHARDINGKEY``, as bytes; empty = none. The same as :func:`decode` finds,
    without decoding the rest."""
    if _SHARDING_KEY not in properties:
        return b""
    return decode(properties).get(SHARDING_KEY, "").encode()


def clean_text(buffer: bytes, start: int, end: int) -> re.Match[bytes] | None:
    """As ``CLEAN.fullmatch(buffer, start, end)``, for text beyond ASCII."""
    clean = _CLEAN_IF_UTF8.fullmatch(buffer, start, end)
    try:
        buffer[start:end].decode()
    except UnicodeDecodeError:
        return None
    return clean


def is_reserved(name: str) -> bool:
    """Whether a property name is the broker's own."""
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


def of_application(properties: Mapping[str, str]) -> dict[str, str]:
    """Those of a stored record that an application set and may send again. Pairs that RocketMQ
    takes and a producer of ours may not send are left out: empty ones, and values with a separator.
    """
    left_out = FIELD_NAMES
    if CORRELATION_ID in properties and REPLY_TO_CLIENT in properties:
        left_out |= {CORRELATION_ID, REPLY_TO_CLIENT, TTL, MSG_TYPE}
    return {
        name: value
        for name, value in properties.items()
        if name and value and "\x01" not in value and name not in left_out
        if not is_reserved(name)
    }


def verify(properties: bytes) -> bytes:
    """Checks what a producer sent, and returns its tag (empty = none). The size is checked with the
    record's framing.

    Raises PropertiesInvalid, PropertyReserved.
    """
    harmless = _CLEAN_IF_UTF8.fullmatch(properties)
    if harmless is None and FRAMING.fullmatch(properties) is None:
        raise PropertiesInvalid("the properties are not whole pairs of non-empty names and values")
    try:
        properties.decode()
    except UnicodeDecodeError as error:
        raise PropertiesInvalid(
            f"the properties are not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    if harmless is None:
        reserved = sorted(filter(is_reserved, decode(properties)))
        raise PropertyReserved(f"the property name {reserved[0]!r} is reserved")
    return harmless[1] or b""
