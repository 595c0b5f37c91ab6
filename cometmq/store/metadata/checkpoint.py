"""RocketMQ's ``checkpoint``: up to which store time log and queues are on the disk; and, in bytes
that RocketMQ leaves alone, our mark of it: ``docs/format/checkpoint.md``.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.store import layout
from cometmq.store.disk.files import Files, replace
from cometmq.store.metadata.recovery_point import RecoveryPoint

CHECKPOINT_BYTES = 4096
SECTOR_BYTES = 512
# RocketMQ's: records of one file may be stored while its checkpoint is being written
MARGIN_MS = 3_000

TIMES = struct.Struct(
    ">"
    "q"  # physicMsgTimestamp: every record with an older store time is on the disk
    "q"  # logicsMsgTimestamp: and so is its unit in its consume queue
    "q"  # indexMsgTimestamp: and so are its keys in an index file
    "q"  # masterFlushedOffset of RocketMQ 5; not ours, but kept
    "q"  # confirmPhyOffset of RocketMQ 5; not ours, but kept
    "q"  # logicsPhysicalOffset of RocketMQ 5.5: before it log and queues are on the disk
)
MARK_AT = 256  # well behind what RocketMQ may come to use
MARK_MAGIC = b"cometmq1"
MARK = struct.Struct(
    ">"
    "8s"  # MARK_MAGIC
    "q"  # end
    "q"  # last_offset
    "i"  # last_bytes
    "I"  # last_crc32
    "i"  # queue_count; -1: unknown
    "q"  # unit_count; -1: unknown
)
SEAL = struct.Struct(">I")  # CRC-32 of the bytes before it: the mark, the reach
REACH_AT = MARK_AT + MARK.size + SEAL.size
REACH = struct.Struct(">q")
START_AT = 384
START = struct.Struct(">q")
UNKNOWN_START = -1
assert REACH_AT + REACH.size + SEAL.size <= START_AT
assert TIMES.size <= MARK_AT
assert START_AT + START.size + SEAL.size <= SECTOR_BYTES, "written whole or not at all"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Store times in ms since 1970; 0 means that nothing is known to be on the disk.

    ``reach``: log offset from which on nothing but zeros was ever written to the log's files; 0:
    that is not known. ``log_start``: log offset of the oldest byte that retention did not remove;
    :data:`UNKNOWN_START`: that is not known.
    """

    log_time_ms: int = 0
    queue_time_ms: int = 0
    index_time_ms: int = 0
    master_flushed_offset: int = 0
    confirm_offset: int = 0
    durable_offset: int = 0
    mark: RecoveryPoint | None = None
    reach: int = 0
    log_start: int = UNKNOWN_START

    @property
    def restart_time_ms(self) -> int:
        """Log files that start no later than this hold nothing, before their start, that is not on
        the disk.
        """
        return max(0, min(self.log_time_ms, self.queue_time_ms) - MARGIN_MS)

    @property
    def known_time_ms(self) -> int:
        """Records of this store time were on the disk, behind the mark too; 0: that is not known.
        Nothing seals a time, so where nothing was on the disk behind the mark, that alone counts.
        """
        is_all = self.mark is not None and self.mark.end == self.durable_offset
        return 0 if is_all else self.log_time_ms

    def not_after(self, time_ms: int) -> Checkpoint:
        """The same of a log whose youngest record is of ``time_ms``."""
        return dataclasses.replace(
            self,
            log_time_ms=min(self.log_time_ms, time_ms),
            queue_time_ms=min(self.queue_time_ms, time_ms),
        )

    def encode(self) -> bytes:
        times = TIMES.pack(
            self.log_time_ms,
            self.queue_time_ms,
            self.index_time_ms,
            self.master_flushed_offset,
            self.confirm_offset,
            self.durable_offset,
        )
        mark = b"" if self.mark is None else _sealed(MARK.pack(MARK_MAGIC, *astuple(self.mark)))
        reach = _sealed(REACH.pack(self.reach)) if self.reach else b""
        start = _sealed(START.pack(self.log_start)) if self.log_start >= 0 else b""
        content = (times.ljust(MARK_AT, b"\0") + mark).ljust(REACH_AT, b"\0") + reach
        content = content.ljust(START_AT, b"\0") + start
        return content.ljust(CHECKPOINT_BYTES, b"\0")


def _sealed(content: bytes) -> bytes:
    return content + SEAL.pack(zlib.crc32(content))


def decode(content: bytes, path: Path) -> Checkpoint:
    """What a checkpoint's ``content`` says; any length but RocketMQ's one page is StoreDamaged. A
    mark that does not fit its seal is none.
    """
    if len(content) != CHECKPOINT_BYTES:
        raise StoreDamaged(
            f"{path} has {len(content)} bytes instead of {CHECKPOINT_BYTES}. It says up to where "
            "the log is on the disk, and can be done without: "
            f"{layout.repair_command(path.parent)} looks through all of the log and writes another"
        )
    times = Checkpoint(*TIMES.unpack_from(content))
    return dataclasses.replace(
        times, mark=_mark(content), reach=_reach(content), log_start=_start(content)
    )


def _mark(content: bytes) -> RecoveryPoint | None:
    sealed = content[MARK_AT : MARK_AT + MARK.size]
    (seal,) = SEAL.unpack_from(content, MARK_AT + MARK.size)
    magic, *fields = MARK.unpack(sealed)
    return RecoveryPoint(*fields) if magic == MARK_MAGIC and zlib.crc32(sealed) == seal else None


def _reach(content: bytes) -> int:
    """A reach that does not fit its seal is not known."""
    (reach,) = REACH.unpack_from(content, REACH_AT)
    is_sealed = content.startswith(_sealed(REACH.pack(reach)), REACH_AT)
    return reach if is_sealed and reach > 0 else 0


def _start(content: bytes) -> int:
    (start,) = START.unpack_from(content, START_AT)
    return start if content.startswith(_sealed(START.pack(start)), START_AT) else UNKNOWN_START


def load(files: Files, path: Path) -> Checkpoint:
    """The checkpoint at ``path``; one of zeros when there is none."""
    content = files.read(path)
    return Checkpoint() if content is None else decode(content, path)


class CheckpointFile:
    """Writes a store's checkpoint in place: what it says lies in one sector, which a disk writes
    whole or not at all.

    A caller that copies fields of ``current`` into what it writes holds ``changing``.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self.path = path
        self.changing = threading.Lock()
        self.current = load(files, path)
        if not files.exists(path):
            replace(files, path, self.current.encode())
        self._file = files.open(path)

    def write(self, checkpoint: Checkpoint) -> None:
        """Store ``checkpoint``, on the disk at return. Times do not go back."""
        assert checkpoint.log_time_ms >= self.current.log_time_ms, (checkpoint, self.current)
        assert checkpoint.queue_time_ms >= self.current.queue_time_ms, (checkpoint, self.current)
        self._store(checkpoint)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """As :meth:`write`, before the log is cut or the queues are rebuilt: times go back."""
        assert checkpoint.log_time_ms <= self.current.log_time_ms, (checkpoint, self.current)
        assert checkpoint.queue_time_ms <= self.current.queue_time_ms, (checkpoint, self.current)
        self._store(checkpoint)

    def _store(self, checkpoint: Checkpoint) -> None:
        if checkpoint != self.current:
            self._file.pwrite(checkpoint.encode(), 0)
            self._file.sync()
            self.current = checkpoint

    def close(self) -> None:
        self._file.close()
