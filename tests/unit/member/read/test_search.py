from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.format.indexfile import TIME_MS_MAX
from cometmq.format.properties import encode
from cometmq.member.read import search
from cometmq.member.read.search import Finder, KeyQuery
from cometmq.store.queries import PIECE_READS, Boundary
from cometmq.store.writer import MessageStore
from tests.support.cluster.members import Member, living_member
from tests.support.waiting import until

COUNT = 500  # messages of one key
HOT = KeyQuery("T", "hot", False, 0, TIME_MS_MAX, 0)
NOBODY = replace(HOT, is_unique_id=True)  # the id of none of them


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[Member]:
    async with living_member(tmp_path) as member:
        await member.put("T", 2)
        member.append("T", 0, *[b"x"] * COUNT, properties=encode({"KEYS": "hot"}))
        await member.on_disk()
        while member.store.index_some():
            pass
        yield member


class HeldReads:
    """Counts the messages that are looked at; the first read waits until :meth:`go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._gate = threading.Event()
        self.go_on = self._gate.set
        really_read = MessageStore.read_record

        def read_record(store: MessageStore, log_offset: int, *, nowait: bool = False) -> bytes:
            self.count += 1
            assert self._gate.wait(30), "the test forgot to let the read go on"
            return really_read(store, log_offset, nowait=nowait)

        monkeypatch.setattr(MessageStore, "read_record", read_record)


async def test_a_query_that_was_given_up_reads_no_more(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HeldReads(monkeypatch)
    query = asyncio.create_task(Finder(member.reader).by_key(NOBODY))
    await until(lambda: reads.count == 1)
    query.cancel()
    with suppress(asyncio.CancelledError):
        await query
    reads.go_on()
    member.reader.close()
    assert reads.count == PIECE_READS


async def test_one_query_looks_at_a_bounded_number_of_messages(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "READS_MAX", 10 * PIECE_READS)
    reads = HeldReads(monkeypatch)
    reads.go_on()
    answer = await Finder(member.reader).by_key(NOBODY)
    assert (answer.found, answer.has_more, reads.count) == ([], True, 10 * PIECE_READS)


async def test_a_query_that_comes_to_the_end_says_so(member: Member) -> None:
    answer = await Finder(member.reader).by_key(NOBODY)
    assert (answer.found, answer.has_more) == ([], False)
    answer = await Finder(member.reader).by_key(HOT)
    assert (len(answer.found), answer.has_more) == (search.COUNT_DEFAULT, True)


async def test_a_search_by_time_gives_way_between_queues(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "QUEUES_AT_ONCE", 2)
    queues = [("T", 0), ("T", 1), ("T", 2), ("U", 0), ("T", 0)]
    answers = await Finder(member.reader).by_time(queues, 0, Boundary.LOWER)
    kinds = [type(answer).__name__ for answer in answers]
    assert kinds == ["TimeAnswer", "TimeAnswer", "QueueNotFound", "TopicNotFound", "TimeAnswer"]
    assert answers[0] == answers[4]
