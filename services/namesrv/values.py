"""The key-value table and its file, ``kvConfig.json`` in RocketMQ's form.

The file is replaced as a whole (draft, sync, rename, sync of the folder). The content before stays
as ``kvConfig.json.bak``, which is read when the file is damaged. A change is answered when it is on
disk; the table in memory is never ahead of the file.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

from cometmq.errors import DiskFull, InvalidRequest, LimitExceeded, StoreDamaged, StoreFailed
from cometmq.messaging import order
from cometmq.messaging.order import OrderedQueues
from cometmq.messaging.topics import check_name

NAME_BYTES_MAX = 255
VALUE_BYTES_MAX = 65_536
TABLE_BYTES_MAX = 16 * 1024 * 1024  # of all names and values together: each change writes them all

Table = dict[str, dict[str, str]]


class Values:
    """Namespace → key → value. There is one change at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: Table = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Reads the file, if there is one. StoreDamaged: the file and its copy are damaged."""
        self._table = await asyncio.to_thread(read_table, self._path)

    def of(self, namespace: str) -> dict[str, str]:
        """All values of a namespace, by key. InvalidRequest."""
        _check_name("namespace", namespace)
        return dict(sorted(self._table.get(namespace, {}).items()))

    def order_of(self, topic: str) -> tuple[OrderedQueues, ...]:
        """The fixed queues of an ordered topic; empty: it has none, or the file says nonsense."""
        text = self._table.get(order.NAMESPACE, {}).get(topic)
        try:
            return () if text is None else order.parse(text)
        except InvalidRequest:
            return ()

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Stores a value. InvalidRequest, TopicNameInvalid, LimitExceeded, DiskFull, StoreFailed:
        nothing changed.
        """
        _check_name("namespace", namespace)
        _check_name("key", key)
        if len(value.encode()) > VALUE_BYTES_MAX:
            raise InvalidRequest(f"value: more than {VALUE_BYTES_MAX} bytes")
        if namespace == order.NAMESPACE:
            check_name(key)
            order.parse(value)
        async with self._changing:
            values = {**self._table.get(namespace, {}), key: value}
            await self._replace({**self._table, namespace: values})

    async def delete(self, namespace: str, key: str) -> None:
        """Removes a value; an absent one is no error. Errors as :meth:`put`."""
        _check_name("namespace", namespace)
        _check_name("key", key)
        async with self._changing:
            values = dict(self._table.get(namespace, {}))
            if values.pop(key, None) is None:
                return
            table = {name: known for name, known in self._table.items() if name != namespace}
            await self._replace({**table, namespace: values} if values else table)

    async def _replace(self, table: Table) -> None:
        text = encode_table(table)
        if len(text) > TABLE_BYTES_MAX:
            raise LimitExceeded(f"the key-value table would exceed {TABLE_BYTES_MAX} bytes")
        # Shielded: a caller that goes away must not leave the file ahead of the table.
        await asyncio.shield(self._write(text, table))

    async def _write(self, text: bytes, table: Table) -> None:
        try:
            await asyncio.to_thread(write_file, self._path, text)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreFailed
            raise kind(f"{self._path} cannot be written: {error.strerror}") from error
        self._table = table


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise InvalidRequest(f"{what}: 1 to {NAME_BYTES_MAX} bytes")


# --- the file -------------------------------------------------------------------------------------


def encode_table(table: Table) -> bytes:
    """As fastjson prints it: tabs, keys in order, no blank after the colon."""
    text = json.dumps(
        {"configTable": table},
        indent="\t",
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    return text.encode()


def decode_table(data: bytes) -> Table:
    """The table in a file's content. ValueError: it has none."""
    content = json.loads(data)
    table = content.get("configTable") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not all(_is_namespace(values) for values in table.values()):
        raise ValueError("not a key-value table")
    return table


def _is_namespace(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def read_table(path: Path) -> Table:
    """The table of ``path``, else of its copy; empty when neither file exists. StoreDamaged."""
    damaged: list[Path] = []
    for candidate in (path, _copy_of(path)):
        try:
            return decode_table(candidate.read_bytes())
        except FileNotFoundError:
            continue
        except (ValueError, OSError):
            damaged.append(candidate)
    if damaged:
        raise StoreDamaged(f"{damaged[0]} cannot be read as a key-value table")
    return {}


def write_file(path: Path, data: bytes) -> None:
    """Replaces ``path``, whole or not at all; its content before becomes the copy. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        spare = path.with_name(path.name + ".bak.tmp")
        spare.unlink(missing_ok=True)
        spare.hardlink_to(path)
        spare.replace(_copy_of(path))
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + ".bak")
