from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import MessageIdInvalid
from cometmq.format import ids, record


class FixedClock:
    def wall_ms(self) -> int:
        return (1_609_459_200 + 0x0102) * 1000 + 999

    def monotonic_s(self) -> float:
        raise AssertionError("ids need the wall clock only")

    boottime_s = monotonic_s


@given(st.text("ab1%|_-Z", min_size=1, max_size=255), st.integers(0, 2**63 - 1))
def test_our_ids_are_read_back(group: str, log_offset: int) -> None:
    text = ids.message_id(group, log_offset)
    assert text == f"{group}/{log_offset}"
    assert ids.parse_message_id(text) == (group, None, log_offset)


@given(
    st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)
def test_ids_of_rocketmq_are_read(host: bytes, log_offset: int, upper: bool) -> None:
    text = (host + log_offset.to_bytes(8, "big")).hex()
    found = ids.parse_message_id(text.upper() if upper else text)
    assert found == (None, host, log_offset)


def test_an_id_as_rocketmq_prints_it() -> None:
    found = ids.parse_message_id("0A00000200002A9F00000000000000B1")
    assert found == (None, record.host_bytes("10.0.0.2", 10911), 177)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "g/",
        "/1",
        "g/-1",
        "g/01",
        "g/1 ",
        "g/1\n",
        "g/x",
        "a/b/1",
        "g/٣",  # a digit, but not ours
        f"g/{2**63}",
        "g" * 256 + "/1",
        "0A00000200002A9F00000000000000B",
        "0A00000200002A9F00000000000000B1\n",
        "0A00000200002A9FF000000000000000",  # a negative log offset
        "0A00000200002A9F0000000000000_B1",
        "X" * 32,
        "X" * 56,
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(MessageIdInvalid):
        ids.parse_message_id(text)


def test_unique_ids_have_the_layout_of_the_grpc_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 0x123456)
    monkeypatch.setattr("secrets.token_hex", lambda count: "ab" * count)
    unique = ids.UniqueIds(FixedClock())
    assert unique.next() == "01ABABABABABAB34560000010200000000"
    assert unique.next() == "01ABABABABABAB34560000010200000001"


def test_unique_ids_count_without_gaps_in_one_stream() -> None:
    unique = ids.UniqueIds(FixedClock())
    found = [bytes.fromhex(unique.next()) for _ in range(300)]
    assert {len(one) for one in found} == {17}
    assert {one[:13].hex().upper() for one in found} == {unique.stream}
    assert [int.from_bytes(one[13:], "big") for one in found] == list(range(300))
    assert unique.remaining == 2**32 - 300


def test_a_used_up_stream_is_followed_by_a_new_one() -> None:
    unique = ids.UniqueIds(FixedClock())
    first = unique.stream
    unique._next = ids.UNIQUE_ID_COUNTER_MAX
    assert unique.next() == first + "FFFFFFFF"
    assert unique.remaining == 0
    assert unique.next() == unique.stream + "00000000"
    assert unique.stream != first
