"""RocketMQ's IndexFile: from the hash of a key to the places in the log. Spec:
docs/format/indexfile.md.

Header, hash slots, entries. A slot holds the number of its newest entry, an entry the number of the
one before it in the same slot; entry 0 is never used. What is stored of a key is its hash alone, so
a lookup has to read the messages, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple, Self

from cometmq.format.taghash import java_hash
from cometmq.native import accelerator

_HEADER: Final = struct.Struct(
    ">"
    "q"  # beginTimestamp: store time in ms of the file's first key
    "q"  # endTimestamp: and of its last
    "q"  # beginPhyOffset: where the record of the first key starts in the log
    "q"  # endPhyOffset: and that of the last
    "i"  # hashSlotCount: slots in use
    "i"  # indexCount: number of the next entry, from 1
)
_SLOT: Final = struct.Struct(">i")  # number of the newest entry; 0 = none
_ENTRY: Final = struct.Struct(
    ">"
    "i"  # keyHash: of "topic#key", not negative
    "q"  # phyOffset: where the record starts in the log
    "i"  # timeDiff: its store time less the file's begin, in whole seconds, rounded down
    "i"  # number of the entry before it in the same slot; 0 = none
)
HEADER_BYTES: Final = _HEADER.size
SLOT_BYTES: Final = _SLOT.size
ENTRY_BYTES: Final = _ENTRY.size
assert (HEADER_BYTES, SLOT_BYTES, ENTRY_BYTES) == (40, 4, 20)

SECONDS_MAX: Final = 0x7FFFFFFF
TIME_MS_MAX: Final = 2**63 - 1

# Ids of one producer differ in their last characters only, and topics repeat.
_TAIL_CHARACTERS: Final = 3
_CACHED_CHARACTERS_MAX: Final = 256

Read = Callable[[int, int], bytes]  # (position in the file, size) → the bytes there
# (places in the file, data): cuts the data into equal pieces, and writes one to each place
Scatter = Callable[[Sequence[int], bytes], None]


KEY: Final = struct.Struct(">iqq")  # a Key, packed


class Key(NamedTuple):
    """One key of one record."""

    hash: int
    log_offset: int
    store_time_ms: int


class Keys:
    """Keys in the order of the log, packed: there are hundreds in every millisecond of log."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        assert len(packed) % KEY.size == 0, len(packed)
        self.packed = packed

    @classmethod
    def of(cls, keys: Iterable[Key]) -> Self:
        return cls(b"".join([KEY.pack(*key) for key in keys]))

    def __len__(self) -> int:
        return len(self.packed) // KEY.size

    def __iter__(self) -> Iterator[Key]:
        return map(Key._make, KEY.iter_unpack(self.packed))

    def __getitem__(self, index: int) -> Key:
        return Key._make(KEY.unpack_from(self.packed, index * KEY.size))

    def part(self, start: int, count: int) -> Keys:
        """At most ``count`` keys from the one numbered ``start`` on."""
        return Keys(self.packed[start * KEY.size : (start + count) * KEY.size])


class Header(NamedTuple):
    """The first 40 bytes. A file without entries has the end of the one before it."""

    begin_time_ms: int = 0
    end_time_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @property
    def is_empty(self) -> bool:
        return self.next_entry == 1


def decode_header(content: bytes) -> Header:
    """The header at the start of ``content``. A file that RocketMQ made and put nothing into counts
    from 0.
    """
    header = Header._make(_HEADER.unpack_from(content))
    return header if header.next_entry > 0 else header._replace(next_entry=1)


@dataclass(frozen=True)
class Sizes:
    """RocketMQ's maxHashSlotNum and maxIndexNum: no file has them, a reader has to know them."""

    hash_slots: int = 5_000_000
    entries: int = 20_000_000

    def __post_init__(self) -> None:
        assert self.hash_slots > 0, self
        assert self.entries > 1, self  # entry 0 is never used

    @property
    def entries_at(self) -> int:
        """Offset in the file of entry 0, which is never used."""
        return HEADER_BYTES + self.hash_slots * SLOT_BYTES

    @property
    def file_bytes(self) -> int:
        return self.entries_at + self.entries * ENTRY_BYTES

    def room(self, header: Header) -> int:
        """Keys that still fit; 0 = full."""
        return max(0, self.entries - header.next_entry)


def key_hash(topic: str, key: str) -> int:
    """The hash under which ``key`` of a message of ``topic`` is found: Java's of ``topic#key``,
    without its sign; 0 for the one value that has none.
    """
    text = f"{topic}#{key}"
    if len(text) > _CACHED_CHARACTERS_MAX:
        code = java_hash(text)
    else:
        tail, factor = _tail(text[-_TAIL_CHARACTERS:])
        code = _head(text[:-_TAIL_CHARACTERS]) * factor + tail
    code &= 0xFFFFFFFF
    return -code & 0x7FFFFFFF if code & 0x80000000 else code


@lru_cache(maxsize=4096)
def _head(text: str) -> int:
    return java_hash(text)


@lru_cache(maxsize=8192)
def _tail(text: str) -> tuple[int, int]:
    """The hash of ``text``, and the factor for the hash of the text in front of it."""
    return java_hash(text), 31 ** (len(text.encode("utf-16-be", "surrogatepass")) // 2)


def insert(
    view: memoryview, sizes: Sizes, header: Header, keys: Keys, scatter: Scatter | None = None
) -> Header:
    """Put ``keys``, for which there must be room, into the entries and slots of a file that is
    mapped at ``view``; returns its new header, which is not written.

    An entry is written before the slot that names it: a reader at the same time finds it whole
    or finds the one before it. ``scatter`` writes for plain Python, instead of the view.
    """
    assert 0 < len(keys) <= sizes.room(header), (len(keys), header)
    begin_time_ms, _, begin_offset, _, used_slots, number = header
    if header.is_empty:
        _, begin_offset, begin_time_ms = keys[0]
    if accelerator is None:
        entries, slots, used = _planned(view, sizes, keys, number, begin_time_ms)
        write = scatter or partial(_write, view)
        write([sizes.entries_at + number * ENTRY_BYTES], entries)
        write(list(slots), struct.pack(f">{len(slots)}i", *slots.values()))
    else:
        used = accelerator.index_put(
            view, keys.packed, sizes.hash_slots, sizes.entries, number, begin_time_ms
        )
    _, end_offset, end_time_ms = keys[len(keys) - 1]
    number += len(keys)
    return Header(begin_time_ms, end_time_ms, begin_offset, end_offset, used_slots + used, number)


def _planned(
    view: memoryview, sizes: Sizes, keys: Keys, number: int, begin_time_ms: int
) -> tuple[bytes, dict[int, int], int]:
    """The entries of ``keys``, numbered from ``number`` on; the new values of slots by their place
    in the file; how many of them were empty.
    """
    entries: list[bytes] = []
    slots: dict[int, int] = {}
    used = 0
    slot_count, known, read_slot, pack = sizes.hash_slots, slots.get, _SLOT.unpack_from, _ENTRY.pack
    for code, log_offset, time_ms in KEY.iter_unpack(keys.packed):
        slot_at = HEADER_BYTES + code % slot_count * SLOT_BYTES
        previous = known(slot_at)
        if previous is None:
            previous = read_slot(view, slot_at)[0]
            if not 0 < previous < number:
                previous = 0
                used += 1
        seconds = min(max(0, (time_ms - begin_time_ms) // 1000), SECONDS_MAX)
        entries.append(pack(code, log_offset, seconds, previous))
        slots[slot_at] = number
        number += 1
    return b"".join(entries), slots, used


def _write(view: memoryview, places: Sequence[int], data: bytes) -> None:
    size = len(data) // len(places)
    for at, place in enumerate(places):
        view[place : place + size] = data[at * size : (at + 1) * size]


def find(
    read: Read, sizes: Sizes, begin_time_ms: int, code: int, first_ms: int, last_ms: int
) -> Iterator[int | None]:
    """Log offsets of the records with a key of this hash, newest first, out of a file that begins
    at ``begin_time_ms``; None for each other entry that had to be read, so that the caller can
    stop there. No record from ``first_ms`` to ``last_ms`` is missing; but times are known by
    the second, so one may be up to 999 ms outside, and the file's first any time.

    ``read`` may answer less than it was asked for: then the file is gone, and nothing more comes.
    """
    slot = read(HEADER_BYTES + code % sizes.hash_slots * SLOT_BYTES, SLOT_BYTES)
    number = _SLOT.unpack(slot)[0] if len(slot) == SLOT_BYTES else 0
    above = sizes.entries
    while 0 < number < above:  # numbers fall; a file in which they do not is not followed
        entry = read(sizes.entries_at + number * ENTRY_BYTES, ENTRY_BYTES)
        if len(entry) < ENTRY_BYTES:
            return
        its_code, log_offset, seconds, previous = _ENTRY.unpack(entry)
        time_ms = begin_time_ms + seconds * 1000
        # RocketMQ counts the first entry's seconds from the end of the file before: they say
        # nothing, but no entry is older.
        is_first = number == 1
        if time_ms + 999 < first_ms and not is_first:
            return
        is_meant = its_code == code and (time_ms <= last_ms or is_first)
        yield log_offset if is_meant else None
        number, above = previous, number


def last_hashes(read: Read, sizes: Sizes, header: Header) -> Iterator[int]:
    """Hashes of the keys of the record that was put in last, without following any chain."""
    for number in range(min(header.next_entry, sizes.entries) - 1, 0, -1):
        entry = read(sizes.entries_at + number * ENTRY_BYTES, ENTRY_BYTES)
        if len(entry) < ENTRY_BYTES:  # as in find: the file is gone
            return
        code, log_offset, _, _ = _ENTRY.unpack(entry)
        if log_offset != header.end_offset:
            return
        yield code
