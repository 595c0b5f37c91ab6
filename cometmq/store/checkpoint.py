"""RocketMQ's ``checkpoint``: up to which store time log and queues are on the disk.
``docs/format/checkpoint.md``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.store.files import Files, replace

CHECKPOINT_BYTES = 4096
# RocketMQ's: records of one file may be stored while its checkpoint is being written
MARGIN_MS = 3_000

LAYOUT = struct.Struct(
    ">"
    "q"  # physicMsgTimestamp: every record with an older store time is on the disk
    "q"  # logicsMsgTimestamp: and so is its unit in its consume queue
    "q"  # indexMsgTimestamp: and so are its keys in an index file
    "q"  # masterFlushedOffset of RocketMQ 5
    "q"  # confirmPhyOffset of RocketMQ 5
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Store times in ms since 1970; 0 means that nothing is known to be on the disk."""

    log_time_ms: int = 0
    queue_time_ms: int = 0
    index_time_ms: int = 0

    @property
    def restart_time_ms(self) -> int:
        """Log files that start no later than this hold nothing, before their start, that is not on
        the disk.
        """
        return max(0, min(self.log_time_ms, self.queue_time_ms) - MARGIN_MS)

    def encode(self) -> bytes:
        return LAYOUT.pack(self.log_time_ms, self.queue_time_ms, self.index_time_ms, 0, 0).ljust(
            CHECKPOINT_BYTES, b"\0"
        )


def decode(content: bytes, path: Path) -> Checkpoint:
    """The times in a checkpoint's ``content``; any length but RocketMQ's one page is refused."""
    if len(content) != CHECKPOINT_BYTES:
        raise StoreForeignFile(f"{path} has {len(content)} bytes instead of {CHECKPOINT_BYTES}")
    log_ms, queue_ms, index_ms, _, _ = LAYOUT.unpack_from(content)
    return Checkpoint(log_ms, queue_ms, index_ms)


def load(files: Files, path: Path) -> Checkpoint:
    """The checkpoint at ``path``; one of zeros when there is none."""
    content = files.read(path)
    return Checkpoint() if content is None else decode(content, path)


class CheckpointFile:
    """Writes a store's checkpoint in place: its 40 bytes lie in one sector, which a disk writes
    whole or not at all.
    """

    def __init__(self, files: Files, path: Path) -> None:
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
        """As :meth:`write`, before the log is cut: its times go back."""
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
