"""The key index, as ``docs/format/indexfile.md`` has it."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.independent.files import entries
from tests.support.independent.record import (
    INT32_MAX,
    ROLLED_BACK,
    TRANSACTION,
    Message,
    expect,
    tag_hash,
)

HEADER = struct.Struct(">qqqqii")
ENTRY = struct.Struct(">iqii")  # keyHash, phyOffset, timeDiff, previous
NAME = re.compile(r"[0-9]{17}")


class Shape(NamedTuple):
    """What no file tells: max_hash_slot_num and max_index_num."""

    slots: int
    entries: int


class Keyed(NamedTuple):
    """One key of one record of the log."""

    hash: int
    log_offset: int
    store_time_ms: int


def key_hash(topic: str, key: str) -> int:
    size = abs(tag_hash(f"{topic}#{key}"))
    return 0 if size > INT32_MAX else size


def keyed(message: Message) -> list[Keyed]:
    """In the order in which they are put in."""
    if message.sys_flag & TRANSACTION == ROLLED_BACK:
        return []
    unique_id = message.properties.get("UNIQ_KEY", "")
    words = message.properties.get("KEYS", "").split(" ")
    place = (message.log_offset, message.store_time_ms)
    return [Keyed(key_hash(message.topic, key), *place) for key in (unique_id, *words) if key]


class IndexFile:
    """One file, read whole. ``found``: its entries in order, as (hash, log offset)."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path = path
        self._shape = shape
        self._content = path.read_bytes()
        length = 40 + 4 * shape.slots + 20 * shape.entries
        expect(len(self._content) == length, path, f"{len(self._content)} bytes, not {length}")
        self.begin_ms, self.end_ms, self.begin_offset, self.end_offset, self.used, count = (
            HEADER.unpack_from(self._content)
        )
        self.next = max(count, 1)
        expect(self.next <= shape.entries, path, f"counts {self.next} of {shape.entries} entries")
        self.sealed = self.next >= shape.entries
        entries = [self._entry(number) for number in range(1, self.next)]
        self.found = [(code, offset) for code, offset, _, _ in entries]
        newest: dict[int, int] = {}
        for number, (code, _, _, previous) in enumerate(entries, 1):
            place = f"{path} entry {number}"
            expect(code >= 0, place, f"hash {code}")
            wanted = newest.get(code % shape.slots, 0)
            expect(previous == wanted, place, f"{previous} is before it, not {wanted}")
            newest[code % shape.slots] = number
        for number in range(shape.slots):
            wanted, found = newest.get(number, 0), self._slot(number)
            expect(found == wanted, f"{path} slot {number}", f"{found}, not {wanted}")
        expect(self.used == len(newest), path, f"{self.used} slots, {len(newest)} are used")
        rest = self._content[40 + 4 * shape.slots + 20 * self.next :]
        expect(not any(rest), path, "not zeros behind the last entry")
        expect(self._entry(0) == (0, 0, 0, 0), path, "entry 0 is used")

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        at = 40 + 4 * self._shape.slots + 20 * number
        return ENTRY.unpack_from(self._content, at)

    def _slot(self, number: int) -> int:
        return int.from_bytes(self._content[40 + 4 * number : 44 + 4 * number], "big", signed=True)

    def expect_keys(self, keys: Sequence[Keyed]) -> None:
        """Its keys are these, with their times, and the header tells of the first and the last."""
        expect([key[:2] for key in keys] == self.found, self.path, "not the keys of the log")
        first, last = keys[0], keys[-1]
        bounds = (first.store_time_ms, last.store_time_ms, first.log_offset, last.log_offset)
        header = (self.begin_ms, self.end_ms, self.begin_offset, self.end_offset)
        expect(header == bounds, self.path, f"header {header}, not {bounds}")
        for number, key in enumerate(keys, 1):
            seconds = (key.store_time_ms - self.begin_ms) // 1000
            found = self._entry(number)[2]
            place = f"{self.path} entry {number}"
            expect(found == seconds, place, f"{found} s, not {seconds} s")


class KeyIndex:
    """The folder ``index``. After a clean stop it has every key of the log; after a crash its
    sealed files have the first ones.
    """

    def __init__(self, folder: Path, shape: Shape, clean: bool) -> None:
        self._clean = clean
        self.files: list[IndexFile] = []
        paths = entries(folder)
        for path in paths:
            expect(NAME.fullmatch(path.name) is not None, path, "a name that does not belong here")
        for path in paths:
            content = path.read_bytes()
            full = bool(content) and HEADER.unpack_from(content)[-1] >= shape.entries
            if not clean and not full:
                break  # a crash left it in doubt, and those behind it
            file = IndexFile(path, shape)
            # A file is named by its first key's time; not to fall behind, by the name before.
            # In local time: of this machine, which is the broker's.
            seconds = time.strftime("%Y%m%d%H%M%S", time.localtime(file.begin_ms // 1000))
            name, wanted = int(path.name), int(f"{seconds}{file.begin_ms % 1000:03}")
            if self.files:
                older = self.files[-1]
                wanted = max(wanted, int(older.path.name) + 1)
                expect(older.sealed, older.path, "not full, although another file follows")
                in_order = older.end_offset <= file.begin_offset or file.next == 1
                expect(in_order, path, "begins before the end of the file before it")
            right = name == wanted or (not self.files and name > wanted)
            expect(right, path, f"{wanted} is the time of its first key")
            self.files.append(file)

    def expect_log(self, keys: Sequence[Keyed], log_start: int) -> None:
        """The files have the keys of the log, in its order; those of log files that are gone may
        stand before them.
        """
        for file in self.files[:-1] if self._clean else ():
            expect(file.end_offset >= log_start, file.path, "no key of it is in the log any more")
        left = list(keys)
        for file in self.files:
            gone = sum(offset < log_start for _, offset in file.found)
            here, left = left[: len(file.found) - gone], left[len(file.found) - gone :]
            if not gone and here:
                file.expect_keys(here)
            same = [key[:2] for key in here] == file.found[gone:]
            expect(same, file.path, "not the keys of the log")
        expect(not left or not self._clean, "index", f"{len(left)} keys of the log are missing")
