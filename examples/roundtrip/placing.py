"""Lines arrive in any order, some of them twice; every place is filled once. Pure, but for what
``finished`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from examples.roundtrip.sources import SourceFile


class _Sheet:
    """The places of one file. ``lines`` is given up when the file is complete, ``filled`` tells
    duplicates forever.
    """

    __slots__ = ("filled", "lines", "missing")

    def __init__(self, messages: int) -> None:
        self.lines: list[bytes] = [b""] * messages
        self.filled = bytearray(messages)
        self.missing = messages


class Placer:
    """Puts lines into their files.

    ``finished(name, content)`` is called once for each file, at its last missing line; only
    unfinished files are kept in memory. Line numbers count from 1; line 0 stands for the whole
    of an empty file.
    """

    def __init__(self, files: Sequence[SourceFile], finished: Callable[[str, bytes], None]) -> None:
        self._sheets = {file.name: _Sheet(file.messages) for file in files}
        self._empty = {file.name for file in files if not file.line_count}
        self._finished = finished
        self.placed = 0
        self.placed_bytes = 0
        self.duplicates = 0
        self.strays = 0
        self.expected = sum(sheet.missing for sheet in self._sheets.values())
        self.unfinished_files = len(self._sheets)

    def place(self, name: str, line_number: int, body: bytes) -> None:
        """A line that no file has room for counts as a stray, a second one for the same place as a
        duplicate.
        """
        sheet = self._sheets.get(name)
        index = line_number if name in self._empty else line_number - 1
        if sheet is None or not 0 <= index < len(sheet.filled):
            self.strays += 1
        elif sheet.filled[index]:
            self.duplicates += 1
        else:
            self._fill(name, sheet, index, body)

    def _fill(self, name: str, sheet: _Sheet, index: int, body: bytes) -> None:
        sheet.lines[index] = body
        sheet.filled[index] = 1
        sheet.missing -= 1
        self.placed += 1
        self.placed_bytes += len(body)
        if not sheet.missing:
            self._finished(name, b"".join(sheet.lines))
            sheet.lines = []
            self.unfinished_files -= 1

    @property
    def complete(self) -> bool:
        return self.placed == self.expected

    def missing(self) -> dict[str, int]:
        """Unfinished files and how many of their lines have not come."""
        return {name: sheet.missing for name, sheet in self._sheets.items() if sheet.missing}
