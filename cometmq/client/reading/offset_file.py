"""The offset file of a broadcasting consumer: how far it is in each queue, on its own disk.

JSON with a checksum, replaced as a whole: a crash leaves the file before or the file after.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from cometmq.errors import ConfigInvalid
from cometmq.model import Position, QueueRef
from cometmq.telemetry import fields, logger

VERSION = 1
FILE_BYTES_MAX = 64 << 20

_log = logger(__name__)


class OffsetFile:
    """The offsets of one consumer group. A path that is empty: they are kept in memory only."""

    def __init__(self, path: str, group: str) -> None:
        self._path = Path(path) if path else None
        self._group = group
        self._positions: dict[QueueRef, Position] = {}
        self._is_told = False  # that it cannot be written
        # A write that was cancelled goes on in its thread: the next one waits for it.
        self._writing = threading.Lock()
        self._begun = 0  # writes
        self._written = 0  # the newest one of them that was

    def read(self) -> None:
        """Read the file, once. One that is damaged is put aside, and the consumer begins as if
        there were none. Raises ConfigInvalid for the file of another group, and for one that
        cannot be read.
        """
        if self._path is None:
            return
        try:
            if self._path.stat().st_size > FILE_BYTES_MAX:
                raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
            group, self._positions = _decode(self._path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigInvalid(f"offset_file {self._path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            _log.error(
                "offset file is damaged: the consumer begins where a new one would",
                extra=fields(file=str(self._path), kept_as=str(aside), reason=str(error)),
            )
            self._positions = {}
            with suppress(OSError):  # the next one that is written replaces it
                os.replace(self._path, aside)
            return
        if group != self._group:
            raise ConfigInvalid(
                f"offset_file {self._path} is of group {group!r}, not of {self._group!r}: give "
                "each consumer a file of its own"
            )

    async def load(self, queues: Sequence[QueueRef]) -> dict[QueueRef, Position]:
        """Where the consumer goes on, in those queues that it has read before."""
        return {queue: self._positions[queue] for queue in queues if queue in self._positions}

    async def store(self, positions: Mapping[QueueRef, Position]) -> None:
        """Keep these, and all that was kept before. A file that cannot be written is logged once,
        and written with the next positions.
        """
        self._positions |= positions
        if self._path is None:
            return
        try:
            self._begun += 1
            data = _encode(self._group, self._positions)
            await asyncio.to_thread(self._write, self._path, self._begun, data)
        except OSError as error:
            if not self._is_told:
                _log.error(
                    "offset file is not written: a restart goes on at older offsets",
                    extra=fields(file=str(self._path), reason=error.strerror),
                )
            self._is_told = True
        else:
            self._is_told = False

    def _write(self, path: Path, number: int, data: bytes) -> None:
        """In a thread; an older write than the last one changes nothing."""
        with self._writing:
            if number > self._written:
                _replace(path, data)
                self._written = number


def _encode(group: str, positions: Mapping[QueueRef, Position]) -> bytes:
    rows = [
        [queue.topic, queue.broker_group, queue.queue_id, position.generation, position.offset]
        for queue, position in sorted(positions.items())
    ]
    body = json.dumps({"group": group, "offsets": rows}, separators=(",", ":"))
    return b'{"version":%d,"crc32":%d,"body":%s}\n' % (VERSION, crc32(body.encode()), body.encode())


def _decode(data: bytes) -> tuple[str, dict[QueueRef, Position]]:
    """Raises ValueError, TypeError, KeyError, RecursionError for what is no offset file."""
    whole = json.loads(data)
    if whole["version"] != VERSION:
        raise ValueError(f"its version is {whole['version']!r}, this program reads {VERSION}")
    body = json.dumps(whole["body"], separators=(",", ":"))
    if crc32(body.encode()) != whole["crc32"]:
        raise ValueError("its checksum is wrong")
    return whole["body"]["group"], {
        QueueRef(topic, queue_id, broker_group): Position(generation, offset)
        for topic, broker_group, queue_id, generation, offset in whole["body"]["offsets"]
    }


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
