"""Rows → a table that fits a terminal, or records where no table does. Pure.

Words are never broken and nothing is left out: a table wraps at blanks, and where its longest words
do not fit beside each other each row is written down one field a line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

_GAP = "  "
_RULE = "─"

Row = Sequence[str]


def lay_out(
    titles: Row, rows: Sequence[Row], *, right: Sequence[bool], width: int | None
) -> list[str]:
    """The lines to print. ``right``: columns of numbers; ``width`` None: as wide as it gets."""
    widths = _widths([titles, *rows], width)
    if widths is None:
        return _records(titles, rows)
    heads = _lines(titles, widths, right)
    whole = sum(widths) + len(_GAP) * (len(widths) - 1)
    return [*heads, _RULE * whole, *(line for row in rows for line in _lines(row, widths, right))]


def _widths(rows: Sequence[Row], room: int | None) -> list[int] | None:
    """The widths of the columns; None when they do not fit, however they are wrapped."""
    columns = list(zip(*rows, strict=True))
    wanted = [max(map(cell_len, column)) for column in columns]
    if room is None:
        return wanted
    widths = [max(cell_len(w) for text in c for w in text.split(" ")) for c in columns]
    spare = room - sum(widths) - len(_GAP) * (len(columns) - 1)
    if spare < 0:
        return None
    # Those that lack least first: then most columns need not be wrapped at all.
    for n in sorted(range(len(columns)), key=lambda n: wanted[n] - widths[n]):
        more = min(spare, wanted[n] - widths[n])
        widths[n] += more
        spare -= more
    return widths


def _lines(row: Row, widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """One row, on as many lines as its tallest cell needs."""
    cells = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
    lines = []
    for n in range(max(map(len, cells))):
        parts = []
        for cell, width, is_right in zip(cells, widths, right, strict=True):
            text = cell[n] if n < len(cell) else ""
            blanks = " " * (width - cell_len(text))
            parts.append(blanks + text if is_right else text + blanks)
        lines.append(_GAP.join(parts).rstrip())
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Cut at blanks into lines of at most this width."""
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _records(titles: Row, rows: Sequence[Row]) -> list[str]:
    """Each row as one field a line, with a blank line between rows."""
    wide = max(map(cell_len, titles))
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        for title, text in zip(titles, row, strict=True):
            lines.append(f"{title}{' ' * (wide - cell_len(title))}{_GAP}{text}")
    return lines
