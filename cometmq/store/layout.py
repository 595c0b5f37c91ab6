"""Names of files and folders of a store, both ways: the only place that makes or parses one.
``docs/format/store-layout.md``.
"""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from pathlib import Path

from cometmq.errors import StoreForeignFile, TopicNameInvalid
from cometmq.model import TOPIC_NAME

COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
INDEX = "index"
CONFIG = "config"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"
IDENTITY = "cometmq.json"
EPOCHS = "cometmq.epochs"
HEADS = "cometmq.heads"
NEXT_LOG_FILE = "cometmq.next"
RESERVE = "cometmq.reserve"
SPARE = "cometmq.spare"
TIMERS = "cometmq.timers"
LOST_AND_FOUND = "lost+found"
CUT_OFF = "lost"
TRASH_PREFIX = "cometmq.trash."
# RocketMQ 5's timers: a folder, a file, and one under config/.
TIMER_LOG, TIMER_WHEEL, TIMER_CHECK = "timerlog", "timerwheel", "timercheck"
SNAPSHOTS = ("topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json")

OFFSET_DIGITS = 20
OFFSET_MAX = 2**63 - 1  # that records and units can hold
# The last year of four digits, in every time zone. No clock has ever given more: a record
# that is stored later is damaged, in a field that no checksum covers.
STORE_TIME_MS_MAX = 253_402_128_000_000
OFFSET_NAME = re.compile(r"[0-9]{20}")
INDEX_DIGITS = 17
INDEX_NAME = re.compile(r"[0-9]{17}")
QUEUE_ID_NAME = re.compile(r"0|[1-9][0-9]{0,9}")


class StorePaths:
    """Every path under one store's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit_log = root / COMMIT_LOG
        self.consume_queue = root / CONSUME_QUEUE
        self.index = root / INDEX
        self.config = root / CONFIG
        self.checkpoint = root / CHECKPOINT
        self.abort = root / ABORT
        self.lock = root / LOCK
        self.identity = root / IDENTITY
        self.epochs = root / EPOCHS
        self.heads = root / HEADS
        self.next_log_file = root / NEXT_LOG_FILE
        self.reserve = root / RESERVE
        self.spare = root / SPARE
        self.timers = root / TIMERS

    @property
    def cut_off(self) -> Path:
        """What was cut off the log because the group went on without it."""
        return self.root / CUT_OFF

    def topic(self, topic: str) -> Path:
        """The folder of a topic's queues; a name that could be anything else is refused."""
        return self.consume_queue / checked_topic(topic)

    def queue(self, topic: str, queue_id: int) -> Path:
        assert queue_id >= 0, queue_id
        return self.topic(topic) / str(queue_id)

    def trash(self, number: int) -> Path:
        """Where a deleted topic's folder waits for its removal."""
        return self.root / f"{TRASH_PREFIX}{number}"


def root_of(folder: Path) -> Path:
    """The store that the folder of its log, or of one of its queues, belongs to."""
    return folder.parent if folder.name == COMMIT_LOG else folder.parents[2]


def repair_command(root: Path, options: str = "") -> str:
    """What errors advise to call for the store at ``root``."""
    return f"cometmq store repair {shlex.quote(str(root))} {options}".rstrip()


def is_ignored(name: str) -> bool:
    """What is in a folder without being the store's, and does no harm: hidden files, which desktops
    and editors make, and what a file system makes at its root.
    """
    return name.startswith(".") or name == LOST_AND_FOUND


def checked_topic(topic: str) -> str:
    """``topic`` itself, or :class:`TopicNameInvalid`."""
    if not TOPIC_NAME.fullmatch(topic):
        raise TopicNameInvalid(f"a queue cannot be kept for the topic {topic[:200]!r}")
    return topic


def offset_name(offset: int) -> str:
    """``4096`` → ``00000000000000004096``."""
    assert offset >= 0, offset
    name = f"{offset:0{OFFSET_DIGITS}d}"
    assert len(name) == OFFSET_DIGITS, offset
    return name


def parse_offset_name(name: str, directory: Path) -> int:
    """The inverse of :func:`offset_name`; any other name is :class:`StoreForeignFile`."""
    if not OFFSET_NAME.fullmatch(name):
        raise StoreForeignFile(
            f"{directory / name} is not a file of a store: its name is not an offset of 20 digits: "
            "move it out of the store"
        )
    return int(name)


def index_name(time_ms: int) -> str:
    """The name of an index file that begins at this time: the year to the millisecond, local. For
    times that cannot be named, the first or the last that can.
    """
    time_ms = min(max(0, time_ms), STORE_TIME_MS_MAX)
    moment = datetime.fromtimestamp(time_ms // 1000)
    return f"{moment:%Y%m%d%H%M%S}{time_ms % 1000:03d}"


def parse_queue_id(name: str, directory: Path) -> int:
    """A queue's number from the name of its folder."""
    if not QUEUE_ID_NAME.fullmatch(name):
        raise StoreForeignFile(
            f"{directory / name} is not a queue of a store: its name is not a number: "
            "move it out of the store"
        )
    return int(name)


def parse_topic(name: str, directory: Path) -> str:
    """A topic from the name of its folder."""
    if not TOPIC_NAME.fullmatch(name):
        raise StoreForeignFile(
            f"{directory / name} is not a topic of a store: topics have no such name: "
            "move it out of the store"
        )
    return name
