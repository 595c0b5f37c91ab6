"""Retention in a group: members remove by themselves, and whoever falls off the log copies anew."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.cluster.broker import RATIOS, SYNC, BrokerClient, batch
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.waiting import until, until_async

FILE_BYTES = 64 * 1024
OPTIONS: dict[str, Any] = {
    "mapped_file_size_commit_log": FILE_BYTES,
    "store_quota_bytes": 10 * FILE_BYTES,
    "clean_resource_interval": 20,
    "delete_commit_log_files_interval": 0,
    **RATIOS,
}
BODY = b"." * 10_000


def first(member: LiveMember) -> int:
    assert member.store is not None
    return member.store.min_offset


def end(member: LiveMember) -> int:
    assert member.store is not None
    return member.store.appended_offset


async def flood(client: BrokerClient, count: int) -> None:
    """Send so many large messages to T, patiently."""
    lane = await client.lane()
    for _ in range(count):
        async with asyncio.timeout(20):
            while (await lane.exchange(*batch(("T", 0, [BODY])))).HasField("error"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def bounds(member: LiveMember, topic: str) -> tuple[int, int]:
    status = await member.client.status(topic, 0)
    return status.min_offset, status.max_offset


async def test_every_member_removes_by_itself_and_the_rest_stays_equal(tmp_path: Path) -> None:
    async with live_group(tmp_path, **OPTIONS) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        await flood(group[0].client, 150)
        await group.in_step()
        await until(lambda: min(first(group[0]), first(group[1])) > 0)
        low = max(first(group[0]), first(group[1]))
        await assert_equal(group, low)


async def assert_equal(group: LiveGroup, low: int) -> None:
    stores = [group[0].store, group[1].store]
    pieces = []
    for store in stores:
        assert store is not None
        at, found = low, b""
        while piece := store.read_raw(at, FILE_BYTES):
            found, at = found + piece, at + len(piece)
        pieces.append(found)
    assert pieces[0] == pieces[1]


async def test_a_follower_that_fell_off_the_log_copies_what_is_left(tmp_path: Path) -> None:
    async with live_group(tmp_path, **OPTIONS) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 1, SYNC)
        await writer.client.put_topic("idle", 1, SYNC)
        await writer.client.send("idle", 0, b"a", b"b", b"c")
        await flood(writer.client, 3)
        await group.in_step()
        replicated = end(follower)
        await follower.stop()
        await flood(writer.client, 150)
        await until(lambda: first(writer) > replicated)
        await follower.start("follower")
        await group.in_step()
        assert follower.changes[-1].reason == "reset"
        await assert_equal(group, max(first(writer), first(follower)))
        # A queue that nobody has written to since goes on where it was, also at the next writer.
        await until_async(lambda: counts(follower, "idle", 3))
        assert await bounds(follower, "idle") == (3, 3)
        assert await bounds(writer, "idle") == (3, 3)
        await until_async(lambda: counts(follower, "T", 153))
        assert (await bounds(writer, "T"))[1] == 153


async def counts(member: LiveMember, topic: str, offset: int) -> bool:
    return (await bounds(member, topic))[1] == offset
