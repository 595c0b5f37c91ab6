"""Handles: nobody makes one, changes one, or uses that of another group."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import HandleInvalid
from cometmq.messaging.handle_secrets import HandleSecrets, Secret
from cometmq.messaging.pop.handles import HANDLE_LENGTH_MAX, Handle, decode, encode

NUMBERS = st.integers(0, 2**62)
HANDLES = st.builds(
    Handle,
    st.tuples(st.text("%|abcXYZ019_-", min_size=1, max_size=127), st.integers(0, 1023)),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.integers(1, 2**20),
    NUMBERS,
)
ONE = Handle(("orders", 3), 7, (1 << 32) + 5, 100, 32, 1_700_000_000_000)


def secrets(*keys: bytes) -> HandleSecrets:
    made = HandleSecrets()
    for key in keys:
        made.add(Secret(0, key * 32))
    return made


OURS = secrets(b"k")


@given(HANDLES)
def test_a_handle_comes_back_as_it_was(handle: Handle) -> None:
    text = encode(OURS, "G", handle)
    assert decode(OURS, "G", text) == handle
    assert len(text) <= HANDLE_LENGTH_MAX


def test_each_flipped_bit_is_refused() -> None:
    text = encode(OURS, "G", ONE)
    for place, character in enumerate(text):
        for bit in range(7):
            forged = text[:place] + chr(ord(character) ^ 1 << bit) + text[place + 1 :]
            with pytest.raises(HandleInvalid):
                decode(OURS, "G", forged)


@pytest.mark.parametrize("text", ["", "A", "=" * 8, "A" * 80, "A" * 300, "ü" * 80, "\0" * 80])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(HandleInvalid):
        decode(OURS, "G", text)


def test_a_handle_has_one_form() -> None:
    text = encode(OURS, "G", ONE)
    padded = text + "=" * (-len(text) % 4)
    with pytest.raises(HandleInvalid):
        decode(OURS, "G", padded + "=" if padded == text else padded)
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    with pytest.raises(HandleInvalid):
        decode(OURS, "G", base64.urlsafe_b64encode(raw + b"\0").decode().rstrip("="))


def test_a_handle_of_another_group_or_cluster_is_refused() -> None:
    for known, group in ((OURS, "H"), (secrets(b"x"), "G"), (secrets(b"k", b"x", b"y"), "G")):
        with pytest.raises(HandleInvalid):
            decode(known, group, encode(OURS, "G", ONE))
    assert decode(secrets(b"k", b"x"), "G", encode(OURS, "G", ONE)) == ONE  # of the secret before


@pytest.mark.parametrize(("first", "count"), [(99, 1), (131, 2), (100, 33), (0, 1), (132, 1)])
def test_an_item_names_messages_of_its_handle(first: int, count: int) -> None:
    with pytest.raises(HandleInvalid):
        ONE.mask(first, count)
    assert ONE.mask(102, 3) == 0b11100
    assert ONE.mask(0, 0) == 2**32 - 1
