"""What a writer and its follower leave on the disk, with a log whose beginning retention has
removed, read by a program that knows only ``docs/format``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from cometmq.client import Message
from tests.support.cluster.cluster_story import Cluster, Kept, expect_equal, found_in
from tests.support.independent.state import rebuild
from tests.support.waiting import wait_until

# A dozen commands, each of them a process.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WAIT_S_MAX = 50
# As little room as a store may have; the machine's own disk may be nearly full.
ROOM = (
    "store_quota_bytes=6291456",
    "disk_max_used_space_ratio=98",
    "disk_space_clean_forcibly_ratio=98",
    "disk_space_warning_level_ratio=99",
    "clean_resource_interval=50",
    "delete_commit_log_files_interval=0",
    "destroy_mapped_file_interval_forcibly=0",
)
BOTH = ("g1-0", "g1-1")
IDLE_COUNT = 120


def numbered(topic: str, count: int) -> list[Message]:
    """About a kilobyte each."""
    return [Message(topic, b"%08d" % number * 125, keys=(f"k{number}",)) for number in range(count)]


def until(cluster: Cluster, true: Callable[[list[Any]], bool]) -> None:
    """Wait until it is true of what the command says of the members."""
    wait_until("members", lambda: true(cluster.command("broker", "status")), WAIT_S_MAX)


def in_step(members: list[Any]) -> bool:
    """Both have the whole log on their disks, and none of its beginning."""
    names = ("log_appended_offset", "log_flushed_offset")
    ends = {one[name] for one in members for name in names}
    return len(members) == len(BOTH) and len(ends) == 1 and all(map(_is_shortened, members))


def _is_shortened(member: Any) -> bool:
    return bool(member["log_min_offset"])


def play(cluster: Cluster, story: Kept) -> None:
    """Fill the room, stop; kill both; start, hand over, stop."""
    cluster.up(brokers=1, slaves=1)
    cluster.command("topic", "create", "idle", "--queues", "1")
    cluster.command("topic", "create", "orders", "--queues", "3")
    cluster.send(numbered("idle", IDLE_COUNT))
    cluster.consume("idle", "readers", IDLE_COUNT)
    cluster.send(numbered("orders", 9_000))
    until(cluster, in_step)
    cluster.down()
    story.keep("stopped", cluster, *BOTH)

    cluster.up(brokers=1, slaves=1)
    cluster.send(numbered("orders", 400))
    cluster.kill("g1-1")
    story.keep("killed", cluster, "g1-1")
    cluster.send(numbered("orders", 100))
    cluster.kill("g1-0")
    story.keep("killed", cluster, "g1-0")

    cluster.up(brokers=1, slaves=1)
    cluster.send(numbered("orders", 300))
    until(cluster, in_step)
    cluster.command("broker", "step-down", "--broker-group", "g1")
    cluster.send([*numbered("orders", 300), *numbered("idle", 5)])
    cluster.consume("orders", "readers", 100)
    until(cluster, in_step)
    cluster.down()
    story.keep("handed over", cluster, *BOTH)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("copies")
    story, cluster = Kept(folder / "kept"), Cluster(folder / "cluster", *ROOM)
    try:
        play(cluster, story)
    except BaseException:
        cluster.down()
        raise
    return story


MOMENTS = ("stopped", "killed", "handed over")
every_store = pytest.mark.parametrize(
    ("moment", "name"), [(moment, name) for moment in MOMENTS for name in BOTH]
)


@every_store
def test_every_message_that_is_left_is_where_its_receipt_says(
    story: Kept, moment: str, name: str
) -> None:
    with story.store(moment, name) as store:
        assert store.clean == (moment != "killed")
        start, end = store.log.row.start, store.log.end
        assert start > 0, "nothing has gone"
        sent = story.sent[moment]
        left = {place: one for place, one in sent.items() if start <= place[1] < end}
        expect_equal(found_in(store, "g1"), left)
        assert 0 < len(left) < len(sent)


@every_store
def test_what_is_left_tells_the_whole_state_with_a_copy_to_spare(
    story: Kept, moment: str, name: str
) -> None:
    with story.store(moment, name) as store:
        tags = Counter(record.tag for record in store.log.state.records)
        assert tags["COPY_ONLY"] + tags["COPY_LAST"] >= 2
        assert store.state is not None
        assert store.state.topics.keys() == {"idle", "orders"}
        assert store.state.offsets["readers", "idle", 0].offset == IDLE_COUNT


@pytest.mark.parametrize("name", BOTH)
def test_a_queue_whose_messages_are_all_gone_counts_on(story: Kept, name: str) -> None:
    for moment in ("stopped", "killed"):
        with story.store(moment, name) as store:
            assert ("idle", 0) not in store.queues()
            assert store.log.state.counted["idle", 0] == IDLE_COUNT
    with story.store("handed over", name) as store:
        assert store.bounds("idle", 0) == (IDLE_COUNT, IDLE_COUNT + 5)


@pytest.mark.parametrize("moment", ["stopped", "handed over"])
def test_a_follower_has_the_writers_bytes(story: Kept, moment: str) -> None:
    with story.store(moment, BOTH[0]) as one, story.store(moment, BOTH[1]) as other:
        assert one.identity.store_id != other.identity.store_id
        assert one.epochs == other.epochs
        start = max(one.log.row.start, other.log.row.start)
        end = min(one.log.end, other.log.end)  # offsets may be committed until the writer stops
        assert end - start > 1_000_000
        assert one.log.row.read(start, end) == other.log.row.read(start, end)
        first, second = (
            rebuild([record for record in store.log.state.records if record.log_offset < end])
            for store in (one, other)
        )
        assert first == second is not None


def test_a_crash_raises_all_generations_and_a_hand_over_none(story: Kept) -> None:
    def histories(moment: str) -> list[list[tuple[int, int]]]:
        with story.store(moment, "g1-0") as store:
            assert store.state is not None
            return [one for topic in store.state.topics.values() for one in topic.histories]

    assert [len(history) for history in histories("stopped")] == [1] * 4
    assert [len(history) for history in histories("handed over")] == [2] * 4


def test_who_writes_has_the_lease_and_exports_the_tables(story: Kept) -> None:
    with story.store("stopped", "g1-0") as writer, story.store("stopped", "g1-1") as follower:
        assert {one["cometmq"]["position"] for one in writer.config.values()} == {writer.log.end}
        assert not follower.config
    with story.store("handed over", "g1-0") as before, story.store("handed over", "g1-1") as now:
        assert {one["cometmq"]["position"] for one in now.config.values()} == {now.log.end}
        lease = json.loads((story.folder.parent / "cluster" / "leases" / "g1.json").read_text())
        assert lease.keys() == {"version", "record"}
        record = lease["record"]
        assert (record["group"], record["epoch"]) == ("g1", now.epochs[-1].number)
        assert (record["holder_id"], record["holder_store_id"]) == (1, now.identity.store_id)
        shown = max(one["cometmq"]["position"] for one in before.config.values())
        assert shown <= now.epochs[-1].start, "it wrote no more of them once it followed"
        assert [epoch.number for epoch in now.epochs] == [1, 2, 3, 4]
