from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import indexfile
from cometmq.format.indexfile import Header, Key, Keys, Sizes, key_hash
from tests.unit.format import naive

pytestmark = pytest.mark.usefixtures("implementation")

SIZES = Sizes(hash_slots=4, entries=8)


def empty(sizes: Sizes = SIZES) -> bytearray:
    return bytearray(sizes.file_bytes)


def insert(content: bytearray, header: Header, *keys: Key, sizes: Sizes = SIZES) -> Header:
    """Put keys in and write the header, as whoever owns a file does."""
    header = indexfile.insert(memoryview(content), sizes, header, Keys.of(keys))
    content[:40] = header.encode()
    return header


def found(
    file: bytes | bytearray,
    code: int,
    first_ms: int = 0,
    last_ms: int = 10**15,
    sizes: Sizes = SIZES,
) -> list[int]:
    content = bytes(file)
    begin = indexfile.decode_header(content).begin_time_ms

    def read(at: int, size: int) -> bytes:
        return content[at : at + size]

    entries = indexfile.find(read, sizes, begin, code, first_ms, last_ms)
    return [log_offset for log_offset in entries if log_offset is not None]


def test_the_default_file_is_as_large_as_rocketmqs() -> None:
    assert Sizes().file_bytes == 420_000_040


def test_golden() -> None:
    # Java's hash of "A#b": 65 * 31 * 31 + 35 * 31 + 98 = 63648 = 0xF8A0, a multiple of 4.
    assert [key_hash("A", key) for key in "bcf"] == [0xF8A0, 0xF8A1, 0xF8A4]
    content = empty()
    header = insert(content, Header(), Key(0xF8A0, 1000, 5000), Key(0xF8A1, 1000, 5000))
    insert(content, header, Key(0xF8A4, 2000, 7999))
    wanted = bytes.fromhex(
        "0000000000001388 0000000000001F3F 00000000000003E8 00000000000007D0"  # 5000 7999 1000 2000
        "00000002 00000004"  # two slots in use, entry 4 is next
        "00000003 00000002 00000000 00000000"  # slots: A#f (before it A#b), A#c
        "00000000 0000000000000000 00000000 00000000"  # entry 0 is never used
        "0000F8A0 00000000000003E8 00000000 00000000"
        "0000F8A1 00000000000003E8 00000000 00000000"
        "0000F8A4 00000000000007D0 00000002 00000001"  # 2.999 s are 2; before it: entry 1
    )
    assert bytes(content) == wanted + bytes(4 * 20)


def test_a_hash_is_never_negative() -> None:
    key = "cuikacpk"
    assert naive.hash_of(f"T#{key}") == -(2**31)  # which has no absolute value
    assert key_hash("T", key) == 0


@given(st.text(max_size=12), st.text(max_size=300))
def test_a_hash_is_javas_without_its_sign(topic: str, key: str) -> None:
    java = naive.hash_of(f"{topic}#{key}")
    assert key_hash(topic, key) == (0 if java == -(2**31) else abs(java))


def test_the_newest_comes_first_and_other_hashes_of_the_slot_do_not_come() -> None:
    content = empty()
    keys = [Key(0, 10, 1000), Key(4, 20, 1000), Key(0, 30, 3000), Key(8, 40, 3000)]
    header = insert(content, Header(), *keys)
    assert header.used_slots == 1
    assert found(content, 0) == [30, 10]
    assert found(content, 4) == [20]
    assert found(content, 12) == []


def test_every_entry_that_is_read_lets_one_stop() -> None:
    content = empty()
    insert(content, Header(), Key(4, 1, 1), Key(0, 2, 1), Key(0, 3, 5000), Key(8, 4, 5000))

    def read(at: int, size: int) -> bytes:
        return bytes(content[at : at + size])

    assert list(indexfile.find(read, SIZES, 1, 0, 0, 1000)) == [None, None, 2, None]


def test_times_are_known_by_the_second() -> None:
    content = empty()
    keys = [Key(0, at, 10_000 + at) for at in (0, 1500, 2500)]
    insert(content, Header(), Key(1, 0, 10_000), *keys)
    assert found(content, 0, first_ms=11_999) == [2500, 1500]  # 11.5 s are stored as 11
    assert found(content, 0, first_ms=12_000) == [2500]
    assert found(content, 0, first_ms=11_000, last_ms=11_400) == [1500]


def test_the_first_entry_is_found_whatever_its_time_says() -> None:
    content = empty()
    insert(content, Header(), Key(0, 7, 10_000))
    seconds_at = SIZES.entries_at + 20 + 12
    content[seconds_at : seconds_at + 4] = (3600).to_bytes(4, "big")  # as RocketMQ may have it
    assert found(content, 0, last_ms=10_000) == [7]


def test_seconds_stay_within_their_field() -> None:
    content = empty()
    insert(content, Header(), Key(0, 1, 10**10), Key(0, 2, 10**15), Key(0, 3, 5))
    seconds = [int.from_bytes(content[56 + 20 * n + 12 :][:4], "big") for n in (1, 2, 3)]
    assert seconds == [0, 0x7FFFFFFF, 0]


def test_a_file_that_rocketmq_has_just_made_has_nothing() -> None:
    header = indexfile.decode_header(bytes(40))
    assert header.is_empty
    assert SIZES.room(header) == 7  # entry 0 is never used
    assert found(bytes(SIZES.file_bytes), 0) == []


def test_a_loop_is_not_followed_and_a_file_that_ends_early_ends_the_search() -> None:
    content = empty()
    insert(content, Header(), Key(0, 1, 1), Key(0, 2, 1))
    previous_at = SIZES.entries_at + 20 + 16
    content[previous_at : previous_at + 4] = (2).to_bytes(4, "big")  # entry 1 points to entry 2
    assert found(content, 0) == [2, 1]
    assert found(bytes(content[: SIZES.entries_at + 60]), 0) == [2, 1]
    assert found(bytes(content[: SIZES.entries_at + 50]), 0) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=30))
def test_whatever_was_put_in_is_found(steps: list[tuple[int, int]]) -> None:
    sizes = Sizes(hash_slots=5, entries=31)
    content, header = empty(sizes), Header()
    naive: dict[int, list[int]] = defaultdict(list)
    time_ms = 1_000_000
    for offset, (code, later_ms) in enumerate(steps):
        time_ms += later_ms
        header = insert(content, header, Key(code, offset, time_ms), sizes=sizes)
        naive[code].insert(0, offset)
    assert indexfile.decode_header(bytes(content)) == header
    assert header.used_slots == len({code % 5 for code in naive})
    assert sizes.room(header) == 30 - len(steps)
    for code in range(41):
        assert found(content, code, sizes=sizes) == naive[code]
