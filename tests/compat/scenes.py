"""Folders that CometMQ wrote, one of every kind that RocketMQ has to open; and messages of every
kind that RocketMQ writes.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from cometmq.clock import SystemClock
from cometmq.format import compression, properties, record
from cometmq.store.follower import FollowerStore
from cometmq.store.writer import MessageStore
from tests.compat.listing import LOG_FILE_BYTES, OPTIONS, open_ours
from tests.compat.rocketmq import Command, batch, put
from tests.support.stores.copies import Watcher

V4 = record.host_bytes("127.0.0.1", 10911)
V6 = record.host_bytes("2001:db8::7", 10911)
ZLIB_NAMED = compression.SYS_FLAG_COMPRESSED | 3 << compression.SYS_FLAG_COMPRESSION_SHIFT

Message = tuple[str, int, bytes]  # topic, queue, body


def append(
    store: MessageStore,
    messages: Sequence[Message],
    *,
    host: bytes = V4,
    flag: int = 0,
    sys_flag: int = 0,
    **names: str,
) -> None:
    """One batch; ``names`` are properties."""
    encoded = [
        record.encode(
            topic.encode(),
            queue_id,
            body,
            properties.encode(names),
            born_time_ms=SystemClock().wall_ms(),
            born_host=host,
            store_host=host,
            flag=flag,
            sys_flag=sys_flag,
        )
        for topic, queue_id, body in messages
    ]
    runs = [(topic, queue_id, 1) for topic, queue_id, _ in messages]
    store.append(b"".join(encoded), runs, born_host=host, store_host=host)


# --- the scenes -----------------------------------------------------------------------------------


def fill(store: MessageStore) -> None:
    """Files that roll over, many queues, batches, tags, keys, compressed bodies, both addresses."""
    for number in range(40):
        run = [("orders", number % 4, bytes([number]) * size) for size in (0, 1, 700, 3000)]
        append(store, run, TAGS=f"Tag{number % 3}", KEYS=f"k{number} even{number % 2}")
        append(store, [("orders", 3, b"id")], UNIQ_KEY=f"{number:034X}", a="b", MSG_TYPE="x")
    for queue_id in range(150):
        append(store, [("many", queue_id, b"%d" % queue_id), ("many", 0, b"again")])
    for number in range(30):
        append(store, [("wide", 0, b"six")], host=V6, TAGS="Größe 寸法 \U0001f4cf", flag=-number)
    packed = zlib.compress(b"long " * 100)
    append(store, [("packed", 0, packed)], sys_flag=compression.SYS_FLAG_COMPRESSED, KEYS="p q")
    append(store, [("packed", 0, packed)], sys_flag=ZLIB_NAMED)
    append(store, [("%RETRY%group", 0, b"later"), ("a-b_c|d%e", 7, b"name")])
    append(store, [("orders", 0, bytes(LOG_FILE_BYTES - 500))], TAGS="Huge")


def clean(folder: Path) -> None:
    store = open_ours(folder)
    fill(store)
    store.close()


def reopened(folder: Path) -> None:
    """Several epochs, of which one ended in a crash."""
    clean(folder)
    store = open_ours(folder)
    append(store, [("orders", 0, b"second")], KEYS="second")
    store.abandon()
    store = open_ours(folder)
    append(store, [("orders", 0, b"third")], KEYS="third")
    store.close()


def crashed(folder: Path) -> None:
    """Killed while half of it was on the disk."""
    store = open_ours(folder)
    fill(store)
    store.flush_log()
    while store.index_some():
        pass
    store.flush_queues()
    append(store, [("orders", 1, b"%d" % number) for number in range(50)], KEYS="late")
    store.abandon()


def torn(folder: Path) -> None:
    """Killed in the middle of a write."""
    store = open_ours(folder)
    fill(store)
    end = store.appended_offset
    whole = store.read_record(store.last_record()[0])
    store.abandon()
    file = sorted((folder / "commitlog").iterdir())[end // LOG_FILE_BYTES]
    with file.open("r+b") as log:
        log.seek(end % LOG_FILE_BYTES)
        log.write(whole[:60])


def killed_twice(folder: Path) -> None:
    """Killed again right after recovery: tails were cut and written anew."""
    torn(folder)
    store = open_ours(folder)
    append(store, [("orders", 2, b"after")] * 3)
    store.abandon()


def deleted(folder: Path) -> None:
    """A topic was deleted and made again."""
    store = open_ours(folder)
    fill(store)
    store.drop_topic("many")
    append(store, [("many", 0, b"anew"), ("many", 2, b"anew")])
    store.drop_topic("wide")
    store.close()


def late(folder: Path) -> None:
    """Old log files are gone and the queues were made anew: some begin with filler."""
    clean(folder)
    store = open_ours(folder)
    store.cleaner.forget_before(2 * LOG_FILE_BYTES)
    for _ in range(2):
        store.cleaner.remove_first()
    store.close()
    shutil.rmtree(folder / "consumequeue")
    shutil.rmtree(folder / "index")
    open_ours(folder).close()


class RawLog:
    """Records with any fields, as a follower gets them from a writer."""

    def __init__(self, folder: Path) -> None:
        self.store = FollowerStore.open(folder, OPTIONS)
        self.store.adopt_epochs([(1, 0)])
        self._clock = SystemClock()
        self._next: dict[tuple[str, int], int] = {}

    def append(
        self, topic: str, queue_id: int, body: bytes, names: dict[str, str], **fields: int
    ) -> int:
        """Answers the log offset. Only what has a queue counts there."""
        at = self.store.appended_offset
        key = (topic, queue_id)
        is_queued = fields.get("sys_flag", 0) & 0b1100 in (0, 0b1000)
        offset = self._next.get(key, 0) if is_queued else 0
        self._next[key] = self._next.get(key, 0) + is_queued
        now_ms = self._clock.wall_ms()
        raw = record.encode(
            topic.encode(),
            queue_id,
            body,
            properties.encode(names),
            born_time_ms=now_ms,
            born_host=V4,
            store_host=V4,
            queue_offset=offset,
            log_offset=at,
            store_time_ms=now_ms,
            **fields,
        )
        self.store.append(at, raw, Watcher())
        return at


def special(folder: Path) -> None:
    """Delayed and transactional messages, deliveries again."""
    log = RawLog(folder)
    for level in ("17", "18", "99"):
        queue_id = min(int(level), 18) - 1
        names = {"DELAY": level, "REAL_TOPIC": "orders", "REAL_QID": "2", "TAGS": "TagA"}
        log.append("SCHEDULE_TOPIC_XXXX", queue_id, b"delayed", names)
    # In a queue of no level: RocketMQ delivers nothing from there.
    log.append("SCHEDULE_TOPIC_XXXX", 30, b"no level", {"TAGS": "TagA"})
    log.append("SCHEDULE_TOPIC_XXXX", 30, b"none either", {"TAGS": "TagA", "DELAY": "0"})
    log.append("SCHEDULE_TOPIC_XXXX", 30, b"a known one", {"TAGS": "TagA", "DELAY": "3"})
    half = {"TRAN_MSG": "true", "PGROUP": "p", "REAL_TOPIC": "orders", "REAL_QID": "0"}
    prepared = log.append("RMQ_SYS_TRANS_HALF_TOPIC", 0, b"half", half | {"KEYS": "t"})
    log.append("orders", 0, b"half", half | {"KEYS": "t"}, sys_flag=8, prepared_offset=prepared)
    log.append("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0, b"0", {"TAGS": "d"})
    log.append("orders", 0, b"old style, prepared", half, sys_flag=4)
    log.append("orders", 0, b"old style, rolled back", half, sys_flag=12)
    log.append("orders", 0, b"old style, committed", {"TAGS": "TagB"}, sys_flag=8)
    names = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "7F00000100002A9F" + "0" * 16}
    log.append("%RETRY%group", 0, b"again", names, reconsume_times=3)
    log.append("%DLQ%group", 0, b"dead", names, reconsume_times=16)
    log.store.close()


SCENES: dict[str, Callable[[Path], None]] = {
    scene.__name__: scene
    for scene in (clean, reopened, crashed, torn, killed_twice, deleted, late, special)
}
AFTER_A_CRASH = {"crashed", "torn", "killed_twice"}


# --- what RocketMQ is told to write ---------------------------------------------------------------

THEIR_V6 = "2001:db8::7 10911"


def everything_of_theirs() -> list[Command]:
    """Messages of every kind: plain, batches, delayed, transactional, compressed, IPv6, long."""
    packed = zlib.compress(b"long " * 50)
    commands = [
        put("orders", 3, b"", properties={"TAGS": "TagA"}),
        batch("orders", 0, [b"one"]),
        # Early: 4.9 gives those that it dispatches while it recovers no time of delivery.
        put("orders", 2, b"delayed", properties={"DELAY": "18", "TAGS": "TagA"}),
        put("orders", 2, b"delayed", properties={"DELAY": "17", "KEYS": "soon"}),
        put("SCHEDULE_TOPIC_XXXX", 30, b"no level", properties={"DELAY": "0", "TAGS": "TagA"}),
    ]
    for number in range(60):
        names = {"TAGS": f"Tag{number % 3}", "KEYS": f"k{number} even{number % 2}"}
        names |= {"UNIQ_KEY": f"{number:032X}", "CLUSTER": "c", "Größe": "寸法"}
        commands.append(put("orders", number % 4, bytes(number * 40), properties=names))
        commands.append(put("many", number * 2, b"%d" % number, flag=-1))
    commands += [batch("orders", 1, [b"%d" % number for number in range(30)]) for _ in range(5)]
    commands += [
        put("packed", 0, packed, sys=compression.SYS_FLAG_COMPRESSED),
        put("wide", 0, b"six", born=THEIR_V6, store=THEIR_V6, properties={"KEYS": "six"}),
        put("wide", 0, b"half", born=THEIR_V6),
        put("RMQ_SYS_TRANS_HALF_TOPIC", 0, b"half", properties={"TRAN_MSG": "true", "PGROUP": "p"}),
        put("orders", 0, b"committed", sys=8, prepared=77, properties={"TRAN_MSG": "true"}),
        put("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0, b"0", properties={"TAGS": "d"}),
        put("orders", 0, b"prepared", sys=4, properties={"TRAN_MSG": "true"}),
        put("orders", 0, b"rolled back", sys=12),
        put("%RETRY%group", 0, b"again", reconsume=3, properties={"RETRY_TOPIC": "orders"}),
        put("orders", 0, bytes(50_000)),
        put("orders", 0, b"last"),
    ]
    return commands
