from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import properties, record
from cometmq.format.indexfile import Key, key_hash
from cometmq.format.indexkeys import keys_of, keys_of_chunk

pytestmark = pytest.mark.usefixtures("implementation")

V4 = record.host_bytes("10.0.0.1", 1)
V6 = record.host_bytes("fe80::1", 1)
ROLLBACK, COMMIT, PREPARED = 12, 8, 4


def stored(
    topic: str,
    pairs: Mapping[str, str],
    log_offset: int,
    *,
    sys_flag: int = 0,
    hosts: tuple[bytes, bytes] = (V4, V4),
) -> bytes:
    return record.encode(
        topic.encode(),
        3,
        b"UNIQ_KEY\x01body",
        properties.encode(pairs),
        born_time_ms=1,
        born_host=hosts[0],
        store_host=hosts[1],
        sys_flag=sys_flag,
        log_offset=log_offset,
        store_time_ms=log_offset + 1,
    )


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        (b"", []),
        (b"KEYS\x01a", ["a"]),
        (b"KEYS\x01a\x02", ["a"]),
        (b"KEYS\x01a b  c \x02UNIQ_KEY\x01u\x02", ["u", "a", "b", "c"]),  # the id comes first
        (b"UNIQ_KEY\x01u\x02KEYS\x01a a\x02", ["u", "a", "a"]),
        (b"KEYS\x01a\tb\x02", ["a\tb"]),  # only blanks separate
        (b"KEYS\x01a\x02KEYS\x01b\x02", ["b"]),  # the last one wins, as in a Java map
        (b"KEYS\x01a\x02KEYS\x01\x02", ["a"]),  # but not if it is empty
        (b"MYKEYS\x01a\x02XUNIQ_KEY\x01u", []),
        (b"KEYS\x01 \x02", []),
        (b"x\x01KEYS\x02", []),
        (b"KEYS\x01\xff\x02", ["\ufffd"]),
    ],
)
def test_the_keys_of_a_record(raw: bytes, keys: list[str]) -> None:
    assert keys_of(raw, 0) == keys
    assert keys_of(raw, COMMIT) == keys_of(raw, PREPARED) == keys
    assert keys_of(raw, ROLLBACK) == []


def test_a_chunk_is_its_records_one_by_one() -> None:
    chunk = b"".join(
        [
            stored("T", {"UNIQ_KEY": "u1", "KEYS": "a b"}, 100),
            stored("T", {"TAGS": "x"}, 300),
            stored("Topic2", {"KEYS": "ü"}, 500, hosts=(V6, V4)),
            stored("T", {"KEYS": "never"}, 700, sys_flag=ROLLBACK),
            stored("T", {"KEYS": "z"}, 900, hosts=(V6, V6), sys_flag=COMMIT),
        ]
    )
    assert list(keys_of_chunk(chunk)) == [
        Key(key_hash("T", "u1"), 100, 101),
        Key(key_hash("T", "a"), 100, 101),
        Key(key_hash("T", "b"), 100, 101),
        Key(key_hash("Topic2", "ü"), 500, 501),
        Key(key_hash("T", "z"), 900, 901),
    ]
    assert len(keys_of_chunk(b"")) == 0


NAMES = st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "KEY", "XKEYS"])
VALUES = st.text(st.sampled_from("ab ü"), max_size=6)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.booleans())
def test_keys_are_those_of_the_decoded_properties(
    pairs: list[tuple[str, str]], ended: bool
) -> None:
    raw = "\x02".join(f"{name}\x01{value}" for name, value in pairs).encode()
    raw += b"\x02" if pairs and ended else b""
    decoded = properties.decode(raw)
    wanted = [decoded["UNIQ_KEY"]] if "UNIQ_KEY" in decoded else []
    wanted += [key for key in decoded.get("KEYS", "").split(" ") if key]
    assert keys_of(raw, 0) == wanted
