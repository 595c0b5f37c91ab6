from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged
from cometmq.format import fastjson
from cometmq.format.fastjson import DEPTH_MAX, Json, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
PIECES = st.sampled_from([*"{}[]:,\"'\\/* \n\t-+.01eEux", "//", "/*", "true", "null", "a", "é"])


@given(VALUES, st.booleans(), st.sampled_from([None, 2, "\t"]))
def test_legal_json_reads_as_ever(value: Json, ascii_only: bool, indent: int | str | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    if "Infinity" in text:
        return  # is no JSON
    with suppress(UnicodeEncodeError):  # half a character
        assert loads(text.encode()) == value


@given(st.lists(PIECES).map("".join).map(str.encode) | st.binary())
def test_anything_is_read_or_refused(data: bytes) -> None:
    try:
        expected = json.loads(data.decode())
    except ValueError:
        with suppress(StoreDamaged):
            loads(data)
    else:
        assert loads(data) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{0:251,1:250}", {"0": 251, "1": 250}),
        ("{-1:{12:3}}", {"-1": {"12": 3}}),
        ('{{"brokerName":"b","queueId":0}:7}', {'{"brokerName": "b", "queueId": 0}': 7}),
        ("{[1,2]:3}", {"[1, 2]": 3}),
        ("{a:'it''s'}", None),
        ("{a:'it\\'s',}", {"a": "it's"}),
        ("{$a1:1,'$a1':2}", {"$a1": 2}),
        ("[1,,2,]", [1, 2]),
        ("{,}", {}),
        ("/* by hand */ {k: 1 // why\n}", {"k": 1}),
        (r'"\x41\v\0\7\/"', "A\v\0\7/"),
        (r'"\ud83d\ude00 \ud83d"', "\U0001f600 \ud83d"),
        ('"a\nb"', "a\nb"),
        ("\ufeff7", 7),
        ("01", None),
        ("1L", None),
        ("{1.5.2:0}", None),
        ("[1 2]", None),
        ('{"a" 1}', None),
        ('{"a":1]', None),
        ("{} x", None),
        ("/* no end", None),
        ('"no end', None),
        (r'"\q"', None),
        ("NaN", None),
        ("", None),
        ("1" * 5000, None),
    ],
)
def test_what_fastjson_takes_and_what_not(text: str, value: Json) -> None:
    if value is None:
        with pytest.raises(StoreDamaged):
            loads(text.encode())
    else:
        assert loads(text.encode()) == value


@pytest.mark.parametrize("opening", ["[", '{"a":', "{1:", "{{"])
def test_depth_has_a_limit(opening: str) -> None:
    with pytest.raises(StoreDamaged, match=r"levels|neither"):
        loads(opening.encode() * 100_000)
    assert loads(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX)


@pytest.mark.parametrize("levels", [20, 30, 60, DEPTH_MAX])
def test_keys_within_keys_do_not_grow_without_end(levels: int) -> None:
    with pytest.raises(StoreDamaged, match="a key has more than 4096 characters"):
        loads(b"{" * levels + b"1" + b":1}" * levels)


def test_a_message_queue_with_the_longest_names_is_a_key() -> None:
    queue = {"brokerName": "b" * 255, "queueId": 7, "topic": "t" * 255}
    text = json.dumps(queue)
    assert loads(f"{{{text}:1}}".encode()) == {text: 1}
    assert loads(f"{{{{{text}:1}}:2}}".encode()) == {json.dumps({text: 1}): 2}


def test_size_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastjson, "BYTES_MAX", 4)
    assert loads(b"1234") == 1234
    with pytest.raises(StoreDamaged, match="more than 4"):
        loads(b"12345")
