"""Records that another program stored, appended as they are."""

from __future__ import annotations

from typing import NamedTuple

from cometmq.format import record
from tests.support.stores.small_stores import HOST


class ForeignRecord(NamedTuple):
    """See :class:`cometmq.format.relay.OwnRecord`; its unit holds no tag."""

    topic: str
    body: bytes = b"x"
    properties: bytes = b""
    queue_id: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.encode(0, 0, 0, HOST))

    def tags_code(self, store_time_ms: int) -> int:
        return 0

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        return record.encode(
            self.topic.encode(),
            self.queue_id,
            self.body,
            self.properties,
            born_time_ms=5,
            born_host=store_host,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
        )
