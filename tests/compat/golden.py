"""Writes the golden stores of ``tests/format/golden``: ``python -m tests.compat.golden``.

Each is a folder that a RocketMQ wrote, and what it then read of it itself. Written once per
version; they must open for ever, without Java.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path

from cometmq.messaging import rocketmq_tables
from cometmq.store.writer import StoreOptions
from tests.compat.listing import INDEX, QUEUE_FILE_BYTES
from tests.compat.rocketmq import HALT, Command, RocketMq, batch, group, offset, put, topic
from tests.compat.scenes import everything_of_theirs

GOLDEN = Path(__file__).resolve().parents[1] / "format" / "golden"
STORES = {
    f"rocketmq-{number}-{end}": (version, end)
    for version, number in (("v4", "4.9.8"), ("v5", "5.5.1"))
    for end in ("stopped", "halted")
}
LOG_FILE_BYTES = 16 * 1024
BODY_BYTES_MAX = 1000
OPTIONS = StoreOptions(
    commit_log_file_bytes=LOG_FILE_BYTES,
    consume_queue_file_bytes=QUEUE_FILE_BYTES,
    index_sizes=INDEX,
)
LISTING = "listing.json"
LEFT_OUT = {"rocksdbstore", "compaction"}  # empty databases of 5.x, which nothing here reads


def commands() -> list[Command]:
    """A few of each kind."""
    kinds = everything_of_theirs()
    chosen = [*kinds[:20], *kinds[-17:], batch("orders", 1, [b"a", b"b", b"c"])]
    return [
        *(c for c in chosen if len(c.fields.get("body", "")) <= 2 * BODY_BYTES_MAX),
        *(put("orders", 0, bytes(BODY_BYTES_MAX)) for _ in range(30)),
    ]


TABLES = [
    *(topic("orders"), topic("many", 20, 4), topic("TBW102", 8, 7)),
    *(topic("packed", 1), topic("wide", 1)),
    *(group("billing", 5), offset("billing", "orders", 0, 7), offset("billing", "orders", 1, 2)),
]


TYPED = "rocketmq-5.5.1-topics.json"
TYPED_TOPICS = [
    topic("fifo", is_ordered=True, attributes={"+message.type": "FIFO"}),
    topic("late", attributes={"+message.type": "DELAY", "+cleanup.policy": "DELETE"}),
    topic("plain"),
]


def typed() -> bytes:
    """The topics with attributes, as 5.5.1 writes them."""
    mq = RocketMq("v5", LOG_FILE_BYTES, QUEUE_FILE_BYTES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "store"
        mq.config(folder, TYPED_TOPICS)
        return (folder / "config" / rocketmq_tables.TOPICS).read_bytes()


def write(name: str) -> bytes:
    """The archive of one golden store."""
    version, end = STORES[name]
    mq = RocketMq(version, LOG_FILE_BYTES, QUEUE_FILE_BYTES)
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "store"
        mq.config(folder, TABLES)
        mq.write(folder, [*commands(), *([HALT] if end == "halted" else [])])
        with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
            archive.add(folder, "store", filter=_plain)
            listing = json.dumps(mq.read(folder).lines, indent=0).encode()
            info = tarfile.TarInfo(LISTING)
            info.size = len(listing)
            archive.addfile(info, io.BytesIO(listing))
    return packed.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without what only tells of the machine that wrote it."""
    if LEFT_OUT & set(Path(info.name).parts):
        return None
    return info.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


def main() -> None:
    for name in STORES:
        (GOLDEN / f"{name}.tar.xz").write_bytes(write(name))
        print(name)
    (GOLDEN / TYPED).write_bytes(typed())
    print(TYPED)


if __name__ == "__main__":
    main()
