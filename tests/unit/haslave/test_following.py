from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest import mock

import grpc
import pytest

from cometmq.errors import CometError, PeerUnavailable, ReplicationBroken
from cometmq.v1 import member_pb2
from services.haslave.following import Follower, Following
from tests.support.stores.small_stores import WallClock


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "stream ended" for record in caplog.records)


def test_while_nobody_writes_one_line_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    following = Following(mock.Mock(), Follower("c", "g1", 1, 4096), lambda ms: ms, WallClock())
    following.follow("host:1")
    gone, broken = PeerUnavailable("refused"), ReplicationBroken("a chunk of another epoch")
    ends: list[tuple[CometError, int]] = [(gone, 1), (gone, 1), (broken, 2), (broken, 2), (gone, 3)]
    with caplog.at_level("INFO", logger="services.haslave.following"):
        for error, lines in ends:
            following._log_end(error)
            assert told(caplog) == lines
        following.follow("host:2")
        following._log_end(gone)
    assert told(caplog) == 4


async def test_whose_stream_has_ended_is_not_in_step_any_more() -> None:
    clock = WallClock()
    following = Following(mock.Mock(), Follower("c", "g1", 1, 4096), lambda ms: ms, clock)

    async def stream(*_: object) -> None:
        following.connected = True
        raise PeerUnavailable("the writer ended the stream")

    with mock.patch.object(following, "_stream_from", stream):
        following.follow("host:1")
        running = asyncio.create_task(following.run())
        await following.lost.wait()
    clock.now_ms += 3_000
    assert (following.connected, following.behind_s()) == (False, 3.0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("chunks", [0, 2])
async def test_who_was_let_in_may_soon_come_again(chunks: int) -> None:
    """A writer may agree, and then find that somebody else has our number."""
    following = Following(
        mock.MagicMock(), Follower("c", "g1", 1, 4096), lambda ms: ms, WallClock()
    )
    frames = [member_pb2.ReplicateResponse(chunk=member_pb2.LogChunk())] * chunks
    call, backoff = mock.Mock(), mock.Mock()
    call.read = mock.AsyncMock(side_effect=[*frames, grpc.aio.EOF])
    taken = mock.patch.object(following, "_take", mock.AsyncMock())
    answered = mock.patch.object(following, "_tell", mock.AsyncMock())
    with taken, answered, pytest.raises(PeerUnavailable):
        await following._copy(call, backoff)
    assert backoff.reset.call_count == chunks


async def test_a_follower_that_cannot_answer_does_not_go_on_copying() -> None:
    following = Following(
        mock.MagicMock(), Follower("c", "g1", 1, 4096), lambda ms: ms, WallClock()
    )
    frame = member_pb2.ReplicateResponse(chunk=member_pb2.LogChunk())
    call = mock.Mock()

    async def read() -> member_pb2.ReplicateResponse:
        await asyncio.sleep(0)
        return frame

    call.read = read
    failed = mock.AsyncMock(side_effect=ValueError("a fault of ours"))
    with (
        mock.patch.object(following, "_take", mock.AsyncMock()),
        mock.patch.object(following, "_tell", failed),
        pytest.raises(ValueError, match="a fault of ours"),
    ):
        await following._copy(call, mock.Mock())


async def test_a_follower_without_a_writer_leaves_nobody() -> None:
    following = Following(mock.Mock(), Follower("c", "g1", 1, 4096), lambda ms: ms, WallClock())
    await following.leave()
