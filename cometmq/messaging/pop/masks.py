"""Sets of messages near each other, as the bits of a number: bit i is message ``first`` + i.

In the state log a set is a list of lengths: messages in the set, messages that are not, and so on
in turn. A dense set is one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def dense(count: int) -> int:
    """The mask of ``count`` messages without a gap."""
    return (1 << count) - 1


def mask_of(runs: Sequence[int]) -> int:
    """The mask that these lengths describe. ValueError: there is a length 0, or the last is of a
    gap.
    """
    if len(runs) % 2 == 0 or min(runs) < 1:
        raise ValueError(f"{list(runs)[:20]} are not lengths of runs and gaps")
    mask = at = 0
    for number, length in enumerate(runs):
        if number % 2 == 0:
            mask |= dense(length) << at
        at += length
    return mask


def mask_of_offsets(offsets: Sequence[int]) -> tuple[int, int]:
    """The first of these messages, which rise, and their mask."""
    first = offsets[0]
    return first, sum(1 << (offset - first) for offset in offsets)


def runs_of(mask: int) -> list[int]:
    """The lengths that describe ``mask``, whose lowest bit is set."""
    assert mask & 1
    runs: list[int] = []
    while mask:
        for flipped in (False, True):
            part = ~mask if flipped else mask
            length = (~part & (part + 1)).bit_length() - 1  # its lowest bits that are set
            runs.append(length)
            mask >>= length
            if not mask:
                break
    return runs


def spans_of(mask: int, first: int) -> Iterator[tuple[int, int]]:
    """(offset, count) of each run of neighbours in the set."""
    offset = first
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        count = (~mask & (mask + 1)).bit_length() - 1
        yield offset + gap, count
        mask >>= count
        offset += gap + count


def offsets_of(mask: int, first: int) -> Iterator[int]:
    """Each message in the set."""
    for offset, count in spans_of(mask, first):
        yield from range(offset, offset + count)


def lowest(mask: int, count: int) -> int:
    """The part of ``mask`` with its lowest messages, at most ``count``."""
    if mask.bit_count() <= count:
        return mask
    part = 0
    for offset, length in spans_of(mask, 0):
        take = min(length, count)
        part |= dense(take) << offset
        count -= take
        if not count:
            break
    return part


def shifted(mask: int, first: int, base: int) -> int:
    """``mask`` of messages from ``first`` on as one from ``base`` on; lower messages fall out."""
    return mask << (first - base) if first >= base else mask >> (base - first)


def trimmed(first: int, mask: int) -> tuple[int, int]:
    """The same messages, with bit 0 for the first of them."""
    gap = (mask & -mask).bit_length() - 1
    return first + gap, mask >> gap
