from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import PropertiesInvalid, PropertiesTooLarge, PropertyReserved
from cometmq.format import properties
from tests.unit.format import naive, strategies

raw_properties = st.binary(max_size=30) | st.text("TAGS\x01\x02é", max_size=30).map(str.encode)


@given(strategies.property_maps)
def test_what_is_encoded_is_decoded_and_seen_by_the_naive_reader(pairs: dict[str, str]) -> None:
    data = properties.encode(pairs)
    assert properties.decode(data) == pairs
    assert properties.decode(data.removesuffix(b"\x02")) == pairs
    assert naive.pairs(data) == list(pairs.items())
    assert properties.verify(data) == pairs.get("TAGS", "").encode()


@given(st.dictionaries(st.text("a\x00\x01\x02", max_size=3), st.text("b\x00\x01\x02", max_size=4)))
def test_pairs_that_would_read_as_others_are_refused(pairs: dict[str, str]) -> None:
    clean = all(
        text and not set(text) & set("\x00\x01\x02") for pair in pairs.items() for text in pair
    )
    if clean:
        assert properties.decode(properties.encode(pairs)) == pairs
    else:
        with pytest.raises(PropertiesInvalid):
            properties.encode(pairs)


@pytest.mark.parametrize(
    "pair",
    [("", "v"), ("n", ""), ("n\x00", "v"), ("n", "v\x01"), ("n", "v\x02b\x01c"), ("\x01", "v")],
)
def test_a_wrong_pair_among_good_ones_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(PropertiesInvalid, match="of property"):
        properties.encode({"before": "x", pair[0]: pair[1], "after": "y"})


def test_text_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(PropertiesInvalid):
        properties.encode({"name": "\ud800"})


def test_the_size_limit_counts_bytes() -> None:
    assert len(properties.encode({"n": "é" * 16_382})) == 32_767
    with pytest.raises(PropertiesTooLarge):
        properties.encode({"nn": "é" * 16_382})


@given(raw_properties)
def test_verify_agrees_with_the_naive_reader(data: bytes) -> None:
    pairs = naive.pairs(data)
    if pairs is None:
        with pytest.raises(PropertiesInvalid):
            properties.verify(data)
    else:
        assert properties.verify(data) == dict(pairs).get("TAGS", "").encode()


@given(raw_properties)
def test_the_quick_look_lets_nothing_pass_that_verify_refuses(data: bytes) -> None:
    clean = properties.CLEAN.fullmatch(data)
    if clean is not None:
        assert properties.verify(data) == (clean[1] or b"")


@pytest.mark.parametrize("name", sorted(properties.RESERVED))
def test_the_quick_look_knows_every_reserved_name(name: str) -> None:
    pair = f"{name}\x01v\x02".encode()
    assert properties.CLEAN.fullmatch(pair) is None
    assert properties.CLEAN.fullmatch(b"X" + pair) is not None
    with pytest.raises(PropertyReserved):
        properties.verify(pair)


@given(st.lists(st.sampled_from(["TAGS", "ATAGS", "KEYS"]), max_size=5), st.data())
def test_tag_of_finds_what_decode_finds(names: list[str], draw: st.DataObject) -> None:
    values = [draw.draw(st.sampled_from(["", "a", "TAGS", "\x01"])) for _ in names]
    data = "".join(f"{n}\x01{v}\x02" for n, v in zip(names, values, strict=True)).encode()
    for form in (data, data.removesuffix(b"\x02")):
        assert properties.tag_of(form).decode() == properties.decode(form).get("TAGS", "")


@pytest.mark.parametrize(
    ("data", "pairs"),
    [
        (b"", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b\x02c", {"a": "b"}),
        (b"a\x01\x02\x01b\x02\x02c\x01d\x02", {"c": "d"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_what_lies_in_a_log_is_read_leniently(data: bytes, pairs: dict[str, str]) -> None:
    assert properties.decode(data) == pairs


@given(raw_properties)
def test_what_producers_may_send_may_stand_in_a_log(data: bytes) -> None:
    if properties.FRAMING.fullmatch(data):
        assert properties.STORED_FRAMING.fullmatch(data)


def test_the_docs_list_exactly_the_reserved_names() -> None:
    docs = Path(__file__).parents[3] / "docs/format/properties.md"
    _, table, _ = re.split(r"<!-- reserved: (?:begin|end) -->", docs.read_text(encoding="utf-8"))
    assert sorted(re.findall(r"`([^`]+)`", table)) == sorted(properties.RESERVED)
