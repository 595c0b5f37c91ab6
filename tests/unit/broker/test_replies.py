"""What waits for a requester: bounded, in pieces, and over when its stream is."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import ClientIdInUse, CometError, MessageNotFound, OffsetNotAvailable
from cometmq.member.read.search import Finder, KeyAnswer, KeyQuery
from cometmq.model import TopicConfig
from cometmq.store.log.commitlog import Span
from services.broker import replies
from services.broker.replies import Outbox, Replies

TOPIC = "C_REPLY_TOPIC"


async def taken(outbox: Outbox, count: int) -> list[list[Span]]:
    pieces: list[list[Span]] = []
    async for spans in outbox.answers():
        pieces.append(spans)
        if sum(map(len, pieces)) >= count:
            break
    return pieces


async def test_pieces_are_as_large_as_an_answer_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "BYTES_MAX", 100)
    outbox = Outbox("c", 0)
    sizes = [40, 60, 1, 500, 100, 99]
    for place, size in enumerate(sizes):
        assert outbox.put(place, size)
    pieces = await taken(outbox, len(sizes))
    assert [[size for _, size in piece] for piece in pieces] == [[40, 60], [1], [500], [100], [99]]
    assert [span for piece in pieces for span in piece] == list(enumerate(sizes))


async def test_a_client_that_takes_nothing_gets_only_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "WAITING_MAX", 2)
    outbox = Outbox("c", 0)
    assert [outbox.put(n, 1) for n in range(3)] == [True, True, False]
    assert await taken(outbox, 2) == [[(0, 1), (1, 1)]]
    assert outbox.put(3, 1)


async def test_a_stream_that_is_over_takes_and_gives_nothing() -> None:
    outbox = Outbox("c", 0)
    outbox.put(0, 1)
    outbox.end(ClientIdInUse("another one"))
    assert not outbox.put(1, 1)
    with pytest.raises(ClientIdInUse):
        await taken(outbox, 1)


class ColdStore:
    """Has nothing in memory, and nothing at place 7."""

    def read_records(self, spans: Sequence[Span], *, nowait: bool = False) -> bytes:
        if nowait:
            raise BlockingIOError
        assert threading.current_thread() is not threading.main_thread()
        if any(at == 7 for at, _ in spans):
            raise MessageNotFound("it is gone")
        return b"".join(b"%d" % at for at, _ in spans)


async def test_what_the_disk_has_is_read_in_a_thread_and_what_is_gone_left_out() -> None:
    nothing: Any = None
    store: Any = ColdStore()
    taken = Replies(store, nothing, mock.Mock(), "c", nothing, nothing)
    assert await taken.read([(1, 10), (7, 10), (2, 10)]) == b"12"


async def test_an_earlier_reply_is_taken_once() -> None:
    """Found by the key index, and acknowledged meanwhile."""
    outbox = Outbox("c", 100)
    assert [outbox.put(at, 1) for at in (50, 50, 100, 100)] == [True, False, True, True]


@pytest.mark.parametrize("ends", [False, True])
async def test_earlier_replies_are_looked_for_when_they_can_be_read(ends: bool) -> None:
    """After a fail-over a follower may be missing for a while; and the stream may end meanwhile."""
    outbox, queue = Outbox("c", 100), (TOPIC, 0)
    unread = {queue: OffsetNotAvailable("a follower is missing")}
    uncertain: list[Mapping[tuple[str, int], CometError]] = [unread, unread, {}]
    looked_for: list[str] = []

    async def uncertain_ends(_: object) -> Mapping[tuple[str, int], CometError]:
        if ends:
            outbox.end()
        return uncertain.pop(0)

    async def by_key(query: KeyQuery) -> KeyAnswer:
        assert ends or not uncertain
        looked_for.append(query.key)
        return KeyAnswer([], has_more=False, indexed_offset=100)

    reader, keeper, observer, store = mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock()
    reader.uncertain_ends = uncertain_ends
    keeper.state.topics.get.return_value = TopicConfig(TOPIC, 1, 1)
    store.index.status.position = 100
    taken = Replies(store, keeper, reader, "C", observer, SystemClock())
    with mock.patch.object(Finder, "by_key", lambda _, query: by_key(query)):
        await taken.look_for(outbox, ["1"])
    assert looked_for == ["1"]
    assert len(uncertain) == (2 if ends else 0)
