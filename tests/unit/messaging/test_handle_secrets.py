"""Handles are signed: none that was changed, or given for something else, passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.handle_secrets import (
    MAC_BYTES,
    RENEWAL_MS,
    SECRET_BYTES,
    SECRETS_KEPT,
    HandleSecrets,
    Secret,
)
from cometmq.messaging.state import BrokerState


def secret(number: int, created_ms: int = 0) -> Secret:
    return Secret(created_ms, bytes([number]) * SECRET_BYTES)


def secrets_of(*numbers: int) -> HandleSecrets:
    secrets = HandleSecrets()
    for number in numbers:
        secrets.add(secret(number))
    return secrets


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_flipped_bit_is_noticed(data: bytes, choice: st.DataObject) -> None:
    secrets = secrets_of(1)
    mac = secrets.mac(b"recall", data)
    assert secrets.verifies(b"recall", data, mac)
    assert len(mac) == MAC_BYTES
    signed = bytearray(data + mac)
    signed[choice.draw(st.integers(0, len(signed) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
    assert not secrets.verifies(b"recall", bytes(signed[:-MAC_BYTES]), bytes(signed[-MAC_BYTES:]))


def test_a_handle_is_good_for_its_purpose_and_broker_group_only() -> None:
    mac = secrets_of(1).mac(b"recall", b"data")
    assert not secrets_of(1).verifies(b"pop", b"data", mac)
    assert not secrets_of(2).verifies(b"recall", b"data", mac)
    assert not secrets_of(1).verifies(b"recall", b"data", mac[:-1])
    assert not secrets_of(1).verifies(b"recall", b"data", b"")
    assert not HandleSecrets().verifies(b"recall", b"data", mac)


def test_the_last_secrets_verify() -> None:
    first = secrets_of(1).mac(b"recall", b"data")
    assert secrets_of(1, 2).verifies(b"recall", b"data", first)
    assert secrets_of(1, 2).mac(b"recall", b"data") != first
    assert not secrets_of(1, 2, 3).verifies(b"recall", b"data", first)
    assert len(secrets_of(1, 2, 3)) == SECRETS_KEPT


def test_an_epoch_brings_a_secret_when_there_is_none_or_an_old_one() -> None:
    state = BrokerState()
    (first,) = state.plan_secret(1_000, bytes(SECRET_BYTES))
    state.apply(first)
    assert not state.plan_secret(1_000 + RENEWAL_MS, bytes(SECRET_BYTES))
    assert state.plan_secret(1_001 + RENEWAL_MS, bytes(SECRET_BYTES))


def test_a_snapshot_has_all_of_them() -> None:
    state, copy = BrokerState(), BrokerState()
    for number in range(3):
        state.secrets.add(secret(number, number))
    for change in state.as_changes():
        copy.apply(change)
    assert list(copy.secrets) == list(state.secrets) == [secret(1, 1), secret(2, 2)]


def test_nobody_reads_a_secret_in_a_log_of_the_program() -> None:
    assert "010101" not in repr(secret(1))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_has_its_length(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(0, bytes(length))
