"""What Apache RocketMQ left in the folder becomes the writer's state: docs/compatibility.md.
Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cometmq.clock import Clock
from cometmq.errors import StoreDamaged, StoreFailed, StoreForeignFile
from cometmq.member.config import FlushDiskType, MemberConfig
from cometmq.member.state.exports import Exporter
from cometmq.messaging import adoption, rocketmq_tables
from cometmq.messaging.adoption import Queues, Tables
from cometmq.messaging.state import BrokerState
from cometmq.messaging.topics import is_system
from cometmq.store import layout
from cometmq.store.base import BaseStore
from cometmq.store.recovery.adoption import Adoption
from cometmq.store.writer import MessageStore
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


def adopt_tables(
    store: BaseStore,
    found: Adoption,
    tables: Tables,
    state: BrokerState,
    config: MemberConfig,
    common: int,
) -> None:
    """Let ``state`` hold RocketMQ's ``tables``. From ``common`` on the log may differ from that of
    another CometMQ writer.
    """
    sure = min(found.verified, common)
    assert 0 <= sure <= store.appended_offset
    for entry in tables.left_out:
        log.warning("left out of RocketMQ's tables", extra=fields(entry=entry))
    queues = Queues(
        known=list(store.queues()),
        verified=lambda topic, queue_id: store.queue_offset_at(topic, queue_id, sure),
        maximum=lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1],
    )
    # RocketMQ has no durability of a topic: its broker's default is ours for the topics it made.
    flush = config.flush_disk_type or FlushDiskType.ASYNC_FLUSH
    adoption.adopt_tables(state, tables, queues, flush.value)
    deleted = {topic for topic, _ in queues.known if topic not in state.topics}
    log.warning(
        "adopted what another program wrote",
        extra=fields(
            verified=found.verified,
            tables=" ".join(sorted(found.tables)),
            deleted_topics=" ".join(sorted(topic for topic in deleted if not is_system(topic))),
        ),
    )


def read(candidates: Mapping[str, Sequence[bytes]]) -> Tables:
    """The tables of each file's first candidate that parses, as RocketMQ reads them. Raises
    StoreDamaged, StoreForeignFile.
    """
    chosen = {}
    for name, contents in candidates.items():
        assert contents, name
        readable = [content for content in contents if _reads(content)]
        if len(readable) < len(contents):
            log.warning("config/%s of RocketMQ does not parse", name)
        chosen[name] = (readable or contents)[0]
    return adoption.read(chosen)


def read_exported(folder: Path) -> Tables:
    """The tables of our own exports; nothing of a file that does not parse."""
    found: dict[str, bytes] = {}
    for name in layout.SNAPSHOTS:
        for path in (folder / name, folder / f"{name}.bak"):
            if name not in found and path.is_file():
                content = path.read_bytes()
                with suppress(StoreDamaged, StoreForeignFile):
                    adoption.read({name: content})
                    found[name] = content
    return adoption.read(found)


def _reads(content: bytes) -> bool:
    try:
        rocketmq_tables.parse(content)
    except StoreDamaged:
        return False
    return True


def settle(store: MessageStore, state: BrokerState, config: MemberConfig, clock: Clock) -> None:
    """The state snapshot is on the disk: write the exports, so that the next start does not adopt
    RocketMQ's tables once more, and note the end of the adoption. Raises StoreFailed.
    """
    assert store.flushed_offset == store.appended_offset
    mark = rocketmq_tables.SnapshotMark(store.epoch, store.appended_offset)
    try:
        Exporter(config.store_path / "config").write(
            rocketmq_tables.export(state, mark, clock.wall_ms())
        )
    except OSError as error:
        raise StoreFailed(f"config/*.json cannot be written: {error}") from error
    store.finish_adoption()
