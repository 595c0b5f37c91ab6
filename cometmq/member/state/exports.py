"""Exports of the state into ``config/*.json``, where RocketMQ and people look for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from cometmq.store.disk.files import FILE_MODE, make_folders


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


class Exporter:
    """Writes the exports; from any thread, one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write each file whole or not at all, and keep the previous one as ``.bak``, as RocketMQ
        does. Raises OSError.
        """
        with self._one_at_a_time:
            make_folders(self._directory)
            for name, content in files.items():
                path = self._directory / name
                draft = path.with_name(f"{name}.tmp")
                # Synced although the state in the log is the truth: after a power cut an empty file
                # under this name would look like another program's, and the store would not open.
                draft.unlink(missing_ok=True)
                with open(draft, "wb", opener=_opened) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                # The file is its own backup for a moment. Were it missing beside an older backup of
                # RocketMQ's, that backup would seem to be what counts.
                link = path.with_name(f"{name}.bak.tmp")
                link.unlink(missing_ok=True)
                if path.exists():
                    os.link(path, link)
                    link.replace(path.with_name(f"{name}.bak"))
                draft.replace(path)
            # So that after a power cut the tables of RocketMQ that these replace do not come back.
            folder = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
