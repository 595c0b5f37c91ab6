"""How often open halves were asked about. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat

PAGE_BITS = 10  # 1,024 offsets: a dictionary of all would be moved at once when it grows, for ms


class CheckCounts:
    """By the offsets of halves, in pages of a thousand. None for halves that nobody was asked
    about.
    """

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def count_of(self, offset: int) -> int:
        """0: nobody was asked about it."""
        page = self._pages.get(offset >> PAGE_BITS)
        return 0 if page is None else page.get(offset, 0)

    def counts_of(self, offsets: Sequence[int]) -> list[int]:
        """The same, of many in their order."""
        counts: list[int] = []
        for number, some in _by_page(offsets):
            page = self._pages.get(number)
            counts += map(page.get, some, repeat(0)) if page else [0] * len(some)
        return counts

    def put(self, offset: int, count: int) -> None:
        """A half was asked about so often before."""
        self._pages.setdefault(offset >> PAGE_BITS, {})[offset] = count

    def count(self, offsets: Iterable[int]) -> None:
        """Halves are asked about once more."""
        for number, some in _by_page(sorted(offsets)):
            page = self._pages.setdefault(number, {})
            count_of = page.get
            for offset in some:
                page[offset] = count_of(offset, 0) + 1

    def forget(self, offsets: Collection[int]) -> bool:
        """Halves have ended. Whether there was a count of any."""
        found = False
        for offset in offsets:
            page = self._pages.get(offset >> PAGE_BITS)
            if page is not None and page.pop(offset, 0):
                found = True
                if not page:
                    del self._pages[offset >> PAGE_BITS]
        return found

    def offsets(self) -> set[int]:
        """The halves that were asked about; for tests."""
        return {offset for page in self._pages.values() for offset in page}


def _by_page(offsets: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """The offsets, which do not fall, of each page."""
    at = 0
    while at < len(offsets):
        number = offsets[at] >> PAGE_BITS
        end = bisect_left(offsets, (number + 1) << PAGE_BITS, at)
        yield number, offsets[at:end]
        at = end
