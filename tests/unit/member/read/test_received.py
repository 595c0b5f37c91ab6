"""Messages read by their offsets: which are gone, and which nobody may see yet."""

from __future__ import annotations

import asyncio
from typing import Any

from cometmq.errors import MessageNotFound, OffsetInvalid
from cometmq.format import queueunit
from cometmq.member.read.received import read_offsets

KEY = ("T", 0)


class Stored:
    """A queue from 2 to 8 of which consumers see what lies below 5."""

    def __init__(self) -> None:
        self.store = self

    def bounds(self, _key: object) -> tuple[int, int, int]:
        return 2, 5, 8

    def read_units(self, *place: Any, nowait: bool) -> bytes:
        return queueunit.pack(100 * place[2], 3, 0)

    def read_messages(self, *place: Any, nowait: bool) -> bytes:
        [(log_offset, _)] = place[3]
        return b"%d" % log_offset


def read(*offsets: int, **options: bool) -> dict[int, object]:
    stored: Any = Stored()
    found = asyncio.run(read_offsets(stored, KEY, offsets, 1_000, **options))
    return {offset: one if isinstance(one, bytes) else type(one) for offset, one in found}


def test_a_message_above_what_consumers_see_is_not_gone() -> None:
    """A new writer has the leases of the one before, and knows later who has copies: it passed such
    messages over for good.
    """
    assert read(1, 2, 4, 5, 7, 8) == {
        1: MessageNotFound,
        2: b"200",
        4: b"400",
        5: OffsetInvalid,
        7: OffsetInvalid,
        8: MessageNotFound,
    }


def test_its_key_can_be_learned() -> None:
    assert read(5, 8, with_hidden=True) == {5: b"500", 8: MessageNotFound}
