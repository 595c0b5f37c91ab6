"""What real brokers leave on the disk, read by a program that knows only ``docs/format``.

The brokers are started and stopped by the public command; messages go in by the SDK and the
command. Every byte that was sent must be found where its receipt says, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, QueueRef
from tests.support.cluster.cluster_story import (
    INDEX_SHAPE,
    Cluster,
    Kept,
    expect_equal,
    found_in,
)
from tests.support.independent.reader import Store
from tests.support.independent.record import Broken
from tests.support.independent.state import State, raise_history
from tests.support.independent.tables import EXPORTS

pytestmark = pytest.mark.timeout(180)  # a dozen commands, each of them a process

GROUPS = ("g1", "g2")
QUEUES = {"orders": 12, "bills": 2, "gone": 1}  # of each broker
BODY_CRC_AT = 8
SECONDS_TO_2021 = 1_609_459_200
TAGS = ("TagA", "polygenelubricants", "Aa", "BB", "é", "😀", "two words", "", "tag-\U0001f680-ä")


@dataclass(frozen=True)
class Story(Kept):
    """What the command told at the end, and how many messages went with their topics, by group."""

    topics: list[Any] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    deleted: Counter[str] = field(default_factory=Counter)


def assorted() -> list[Message]:
    """Messages of every kind that a client can send."""
    properties = {"färbe": "größe 🚀 = 1"}
    kinds = [
        Message("orders", b""),
        Message("orders", bytes(range(256)), flag=7),
        Message("orders", os.urandom(250_000), tag="big", flag=-(2**31)),
        Message("bills", "grüße 🚀".encode(), keys=("k1", "k2"), properties=properties),
        Message("bills", b"\x00\x01\x02", properties={"a": " ", "b": "x" * 20_000}),
    ]
    tagged = [Message("orders", tag.encode(), tag=tag, keys=("tagged",)) for tag in TAGS]
    return [*kinds, *tagged]


def numbered(topic: str, count: int, body_bytes: int) -> list[Message]:
    """Messages for every queue of both brokers in turn."""
    queues = [QueueRef(topic, number, name) for number in range(QUEUES[topic]) for name in GROUPS]
    return [
        Message(
            topic,
            b"%08d" % number * (body_bytes // 8),
            tag=TAGS[number % len(TAGS)],
            queue=queues[number % len(queues)],
        )
        for number in range(count)
    ]


def play(cluster: Cluster, story: Story) -> None:
    """Send, stop; start, send, kill one broker; start it, send, stop."""
    cluster.up(brokers=2)
    for topic, count in QUEUES.items():
        flush = "sync" if topic == "bills" else "async"
        cluster.command("topic", "create", topic, "--queues", str(count), "--flush", flush)
    cluster.command("topic", "create", "bills", "--queues", "2", "--reserve-hours", "48")
    cluster.send_by_command("bills", b"by hand\n", "TagA", "hand-1")
    cluster.send([*assorted(), *numbered("orders", 2000, 1000), *numbered("gone", 40, 80)])
    cluster.consume("orders", "readers", 2000)
    cluster.command("topic", "update", "bills", "--send-quota", "1000000/0")
    policy = ["--retry-policy", "10s 1m", "--read-quota", "1000000", "--orderly"]
    cluster.command("group", "update", "readers", *policy)
    cluster.command("topic", "delete", "gone", "--yes")
    gone = [place for place, sent in cluster.sent.items() if sent.topic == "gone"]
    for name, _ in gone:
        story.deleted[name] += 1
    for place in gone:
        del cluster.sent[place]
    cluster.command("topic", "create", "gone", "--queues", "1")
    cluster.send(numbered("gone", 20, 16))
    cluster.down()
    story.keep("stopped", cluster, *GROUPS)

    cluster.up(brokers=2)
    cluster.send([*assorted(), *numbered("bills", 300, 400), *numbered("gone", 10, 8)])
    cluster.kill("g1")
    story.keep("killed", cluster, "g1")
    cluster.up(brokers=2)
    cluster.send([*assorted(), *numbered("orders", 500, 1000)])
    cluster.consume("orders", "readers", 10)
    cluster.consume("bills", "readers", 10)
    story.topics.extend(cluster.command("topic", "list"))
    story.progress.update(cluster.command("group", "progress", "readers"))
    cluster.down()
    story.keep("recovered", cluster, *GROUPS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("independent")
    story, cluster = Story(folder / "kept"), Cluster(folder / "cluster")
    try:
        play(cluster, story)
    except BaseException:
        cluster.down()
        raise
    return story


# --- the quick tests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("stopped", "g1"),
        ("stopped", "g2"),
        ("killed", "g1"),
        ("recovered", "g1"),
        ("recovered", "g2"),
    ],
)
def test_every_message_is_where_its_receipt_says(story: Story, moment: str, name: str) -> None:
    sent = {place: one for place, one in story.sent[moment].items() if place[0] == name}
    with story.store(moment, name) as store:
        assert store.clean == (moment != "killed")
        assert store.log.ends_because == "nothing written"
        expect_equal(found_in(store, name), sent)
        assert store.log.deleted["gone"] == story.deleted[name] > 0


@pytest.mark.parametrize("name", GROUPS)
def test_born_and_stored_by_whom_and_when(story: Story, name: str) -> None:
    with story.store("recovered", name) as store:
        messages = [one for key in store.queues() for one in store.messages(*key)]
    assert {one.born_host.address for one in messages} == {"127.0.0.1"}
    assert {one.store_host.address for one in messages} == {"127.0.0.1"}
    assert all(story.started_ms <= one.born_time_ms <= one.store_time_ms for one in messages)


@pytest.mark.parametrize("name", GROUPS)
def test_unique_ids_count_each_streams_messages(story: Story, name: str) -> None:
    """As ids.md tells them; the command's messages and the SDK's are streams of their own."""
    with story.store("recovered", name) as store:
        messages = [one for key in store.queues() for one in store.messages(*key)]
    streams: dict[bytes, list[int]] = {}
    for message in sorted(messages, key=lambda one: one.log_offset):
        text = message.properties.get("UNIQ_KEY")
        if text is not None:
            assert re.fullmatch("01[0-9A-F]{32}", text)
            unique_id = bytes.fromhex(text)
            streams.setdefault(unique_id[:13], []).append(int.from_bytes(unique_id[13:], "big"))
            began_s = int.from_bytes(unique_id[9:13], "big") + SECONDS_TO_2021
            assert story.started_ms // 1000 <= began_s <= message.store_time_ms // 1000
    assert len(streams) > 1
    assert all(numbers == sorted(numbers) for numbers in streams.values())


@pytest.mark.parametrize(("name", "epoch_count"), [("g1", 3), ("g2", 2)])
def test_each_start_of_a_broker_is_an_epoch(story: Story, name: str, epoch_count: int) -> None:
    with story.store("recovered", name) as store:
        assert [epoch.number for epoch in store.epochs] == list(range(1, epoch_count + 1))
        assert len(list(store.log.row.files())) > 1, "the log should have several files"


@pytest.mark.parametrize("name", GROUPS)
def test_the_exports_show_the_end_of_the_log(story: Story, name: str) -> None:
    with story.store("recovered", name) as store:
        assert store.config.keys() == EXPORTS.keys()
        shown = {made["cometmq"]["position"] for made in store.config.values()}
        assert shown == {store.log.end}


def state_of(story: Story, name: str) -> State:
    with story.store("recovered", name) as store:
        assert store.state is not None
        return store.state


@pytest.mark.parametrize("name", GROUPS)
def test_the_topics_are_those_that_the_command_lists(story: Story, name: str) -> None:
    listed = {row["topic"]: row for row in story.topics if row["broker_group"] == name}
    state = state_of(story, name)
    assert state.topics.keys() == listed.keys()
    for topic, row in listed.items():
        found = state.topics[topic]
        assert found.read_queues == row["read_queue_count"]
        assert found.write_queues == row["write_queue_count"]
        assert {6: "rw", 4: "r", 2: "w"}[found.permission] == row["permission"]
        assert {1: "async", 2: "sync"}[found.flush_mode] == row["flush_mode"]


@pytest.mark.parametrize("name", GROUPS)
def test_the_committed_offsets_are_those_that_the_command_shows(story: Story, name: str) -> None:
    state = state_of(story, name)
    committed = {}
    for row in story.progress["queues"]:
        if row["broker_group"] == name and row["committed_offset"] is not None:
            key = ("readers", row["topic"], row["queue_id"])
            committed[key] = (row["committed_generation"], row["committed_offset"])
            history = state.topics[row["topic"]].histories[row["queue_id"]]
            assert history[-1][0] == row["generation"]
    assert state.offsets == committed
    assert committed
    assert state.groups.keys() == {"readers"}


@pytest.mark.parametrize("name", GROUPS)
def test_policies_and_quotas_are_those_that_were_given(story: Story, name: str) -> None:
    state = state_of(story, name)
    assert state.quotas == {"bills": [1_000_000, 0]}
    policy = {"o": True, "t": 15, "m": 1, "rs": [10_000, 10_000, 10_000, 60_000]}
    assert state.policies == {"readers": {**policy, "q": [1_000_000, 0]}}


# --- the reader itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "raised_to", "raised"),
    [
        ([(1, 0)], (2, 0), [(1, 0), (2, 0)]),
        ([(1, 0), (3, 60)], (4, 60), [(1, 0), (4, 60)]),
        ([(1, 0), (3, 60)], (4, 61), [(1, 0), (3, 60), (4, 61)]),
        (
            [(number, number - 1) for number in range(1, 17)],
            (17, 16),
            [(1, 0), (3, 1), *((number, number - 1) for number in range(4, 18))],
        ),
    ],
)
def test_the_histories_that_the_document_gives(
    history: list[tuple[int, int]], raised_to: tuple[int, int], raised: list[tuple[int, int]]
) -> None:
    raise_history(history, *raised_to)
    assert history == raised


# --- the reader must be able to say no ----------------------------------------------------------


def change(path: Path, at: int, byte: int | None = None) -> None:
    """Another byte at ``at``; negative places count from the end."""
    data = bytearray(path.read_bytes())
    data[at] = data[at] ^ 1 if byte is None else byte
    path.write_bytes(data)


def mark(store: Path, at: int) -> None:
    """Another byte of the checkpoint's mark, which is sealed again."""
    path = store / "checkpoint"
    change(path, at)
    data = bytearray(path.read_bytes())
    data[300:304] = zlib.crc32(data[256:300]).to_bytes(4, "big")
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def later(path: Path) -> None:
    """Its name is a millisecond more."""
    path.rename(path.with_name(str(int(path.name) + 1)))


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), count=1)
    assert count, f"{pattern} is not in {path.name}"
    path.write_text(text)


def _first(store: Path, folder: str) -> Path:
    return min((store / folder).iterdir())


def _log(store: Path, at: int) -> None:
    change(_first(store, "commitlog"), at)


def _unit(store: Path, at: int) -> None:
    change(_first(store, "consumequeue/bills/0"), at)


def _index(store: Path, at: int) -> None:
    change(_first(store, "index"), at)


ENTRY_0_AT = 40 + 4 * INDEX_SHAPE.slots
ENTRY_5_AT = ENTRY_0_AT + 5 * 20
DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "a body": lambda store: _log(store, 90),
    "a queue offset": lambda store: _log(store, 27),
    "a log offset": lambda store: _log(store, 35),
    "a store time": lambda store: _log(store, 57),
    "behind the log's end": lambda store: change(max((store / "commitlog").iterdir()), -1),
    "a file's name": lambda store: (store / "commitlog" / "notes").write_text("x"),
    "a unit's size": lambda store: _unit(store, 11),
    "a unit's tag": lambda store: _unit(store, 19),
    "a unit too many": lambda store: change(max((store / "consumequeue/bills/0").iterdir()), -9),
    "a queue lost": lambda store: shutil.rmtree(store / "consumequeue" / "bills" / "0"),
    "a queue too many": lambda store: shutil.copytree(
        store / "consumequeue" / "bills" / "0", store / "consumequeue" / "bills" / "7"
    ),
    "an epoch": lambda store: edit(store / "cometmq.epochs", "1 0", "1 1"),
    "a checkpoint": lambda store: change(store / "checkpoint", 4000),
    "a checkpoint ahead": lambda store: change(store / "checkpoint", 0, 1),
    "a checkpoint behind": lambda store: change(store / "checkpoint", 15),
    "a checkpoint's end": lambda store: change(store / "checkpoint", 41),
    "a mark's end": lambda store: mark(store, 264 + 7),
    "a mark's record": lambda store: mark(store, 287),
    "a mark's queues": lambda store: mark(store, 291),
    "a mark's units": lambda store: mark(store, 299),
    "a clean mark": lambda store: edit(store / "cometmq.json", r'"end": \d', r'"end": 9'),
    "another's visit": lambda store: edit(
        store / "cometmq.json", r'"clean": \{[^}]*\}', '"clean": null'
    ),
    "a store id": lambda store: edit(store / "cometmq.json", r'"store_id": "..', '"store_id": "'),
    "a name in the root": lambda store: (store / "cometmq.new").write_text(""),
    "a draft of a log file": lambda store: (store / "cometmq.next").write_bytes(b"\0\0\1"),
    "a reserve that is something": lambda store: change(store / "cometmq.reserve", 100),
    "what a log file begins with": lambda store: edit(store / "cometmq.heads", r"^0 \d+", "0 9999"),
    "a name among the tables": lambda store: (store / "config" / "notes.json").write_text("{}"),
    "an elder of nothing": lambda store: (store / "config" / "topics.json").unlink(),
    "the log's last file too short": lambda store: shorten(max((store / "commitlog").iterdir())),
    "an index file's name": lambda store: later(max((store / "index").iterdir())),
    "an index entry": lambda store: _index(store, ENTRY_5_AT + 11),
    "an index entry's hash": lambda store: _index(store, ENTRY_5_AT + 3),
    "an index entry's seconds": lambda store: _index(store, ENTRY_5_AT + 15),
    "an index entry's chain": lambda store: _index(store, ENTRY_5_AT + 19),
    "an index entry 0": lambda store: _index(store, ENTRY_0_AT),
    "an index slot": lambda store: _index(store, 40 + 4 * 7 + 3),
    "an index's begin time": lambda store: _index(store, 7),
    "an index's end offset": lambda store: _index(store, 31),
    "an index's used slots": lambda store: _index(store, 35),
    "an index's next entry": lambda store: change(max((store / "index").iterdir()), 39),
    "an index file's length": lambda store: shorten(_first(store, "index")),
    "an index file within lost": lambda store: sorted((store / "index").iterdir())[1].unlink(),
    "an index file at the end lost": lambda store: max((store / "index").iterdir()).unlink(),
    "an index file lost": lambda store: _first(store, "index").unlink(),
    "an index lost": lambda store: shutil.rmtree(store / "index"),
    "a lock": lambda store: (store / "lock").write_text("key"),
    "an offset": lambda store: edit(
        store / "config/consumerOffset.json", r"\d+(?=\n\t\t})", "12345"
    ),
    "a topic": lambda store: edit(store / "config/topics.json", r'"perm":6', '"perm":4'),
    "a change counter": lambda store: edit(
        store / "config/topics.json", r'"counter":\d+', '"counter":0'
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_seen(story: Story, tmp_path: Path, what: str) -> None:
    # Of which the reader has nothing to complain: test_every_message_is_where_its_receipt_says.
    store = shutil.copytree(story.folder / "recovered" / "g1", tmp_path / "store")
    DAMAGES[what](store)
    with pytest.raises(Broken):
        Store(store, INDEX_SHAPE)


def remains(store: Path) -> None:
    """What a crash at another moment would have left, too."""
    (store / "cometmq.next").write_bytes(bytes(1000))
    (store / "cometmq.json.new").write_text("{")
    (store / "cometmq.trash.3" / "0").mkdir(parents=True)
    (store / "lost+found").mkdir()
    (store / "abort").write_text("failed 77")
    files = sorted((store / "commitlog").iterdir())
    (store / "commitlog" / f"{int(files[-1].name) + (1 << 20):020}").write_bytes(b"")
    (store / "commitlog" / ".hidden").write_text("")
    files[-1].write_bytes(files[-1].read_bytes().rstrip(b"\0") + bytes(8))
    max((store / "consumequeue/bills/1").iterdir()).write_bytes(b"")


LATER_DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "the text of abort": lambda store: (store / "abort").write_text("lost"),
    "another's visit": lambda store: (store / "abort").unlink(),
    "a log file": lambda store: sorted((store / "commitlog").iterdir())[1].unlink(),
    "a unit": lambda store: _unit(store, 11),
    "a record before the mark": lambda store: _log(store, 90),
    "a mark's units": lambda store: mark(store, 299),
    "an index file that is full": lambda store: _index(store, 40 + 4 * 7 + 3),
}


def test_what_a_crash_may_leave(story: Story, tmp_path: Path) -> None:
    store = shutil.copytree(story.folder / "killed" / "g1", tmp_path / "store")
    with Store(store, INDEX_SHAPE) as read:
        wanted = found_in(read, "g1")
    remains(store)
    with Store(store, INDEX_SHAPE) as read:
        assert found_in(read, "g1") == wanted
        assert read.log.row.mended


@pytest.mark.parametrize("what", LATER_DAMAGES)
def test_damage_is_seen_after_a_crash(story: Story, tmp_path: Path, what: str) -> None:
    store = shutil.copytree(story.folder / "killed" / "g1", tmp_path / "store")
    LATER_DAMAGES[what](store)
    with pytest.raises(Broken):
        Store(store, INDEX_SHAPE)


def test_what_a_repair_wrote_off_is_lost_and_nothing_else(story: Story, tmp_path: Path) -> None:
    store = shutil.copytree(story.folder / "recovered" / "g1", tmp_path / "store")
    with Store(store, INDEX_SHAPE) as before:
        messages = list(before.messages("orders", 3))
        keys = before.queues()
        left = {key: list(before.messages(*key)) for key in keys}
    for gone in (messages[0], messages[10], messages[11]):
        _log(store, gone.log_offset + BODY_CRC_AT)
        left["orders", 3].remove(gone)
    places = [f"{one.log_offset}-{one.log_offset + one.size}" for one in messages]
    options = [word for number in (0, 10, 11) for word in ("--write-off", places[number])]
    shape = ("--hash-slots", str(INDEX_SHAPE.slots), "--index-entries", str(INDEX_SHAPE.entries))
    Cluster(tmp_path).command("store", "repair", *options, *shape, str(store))
    with Store(store, INDEX_SHAPE) as after:
        assert len(after.log.lost) == 3
        assert {key: list(after.messages(*key)) for key in after.queues()} == left
        assert after.bounds("orders", 3) == (1, len(messages))
