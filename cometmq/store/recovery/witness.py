"""What shows that a log has lost its end though no mark speaks of it: units of the queues.

A unit is written after its record. So while the machine has kept all that was written, as when only
the process died, a queue has no unit without a record; and such a unit shows that records were
there, synced and acknowledged or not, and which messages they were. After a loss of power that is
not so: the kernel writes both when it likes. Until the next mark nothing else shows that a record
was there, and nothing has to be written for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from cometmq.model import QueueKey
from cometmq.store.disk.files import Files
from cometmq.store.log.scan import Stretch
from cometmq.store.metadata.identity import Identity
from cometmq.store.queues.consumequeue import Tail
from cometmq.store.recovery.replay import Loss

NAMED_MAX = 20  # queues

NextOffset = Callable[[str, int], int]
Tails = Mapping[QueueKey, Tail]


class Counted:
    """How far the queues with a tail have counted in the log, for a reader of the log without
    queues.
    """

    def __init__(self, tails: Tails) -> None:
        self._tails = tails
        self._next_offsets = dict.fromkeys(tails, 0)

    def take(self, stretch: Stretch) -> None:
        """The next records of the log."""
        for run in stretch.run.queues if self._tails else ():
            if (run.topic, run.queue_id) in self._tails:
                next_offset = run.first_queue_offset + run.unit_count
                self._next_offsets[run.topic, run.queue_id] = next_offset

    def missing(self, end: int) -> list[Loss]:
        """See :func:`missing`."""
        return list(missing(self._tails, end, lambda *key: self._next_offsets[key]))

    @property
    def log_end(self) -> int:
        """End of the last record that a queue has a unit for."""
        return max((tail.log_end for tail in self._tails.values()), default=0)


def same_boot(files: Files, known: Identity) -> bool:
    """The page cache is still that which the store was open with."""
    return known.boot_id == files.boot_id() != ""


def kept_all(files: Files, known: Identity, *, disk_failed: bool) -> bool:
    """After a crash: all that was written is there. The page cache is still that which the store
    was open with, the disk refused nothing, and nothing waited in private memory.
    """
    in_memory = known.options is not None and known.options.transient_bytes_max > 0
    return same_boot(files, known) and not disk_failed and not in_memory


def missing(tails: Tails, end: int, next_offset: NextOffset) -> Iterator[Loss]:
    """The messages that queues have units for, behind those that were found in the log, which was
    read up to ``end``. A unit that is damaged, and points too far, has its record before that.
    """
    for (topic, queue_id), tail in tails.items():
        first = max(tail.first_offset, next_offset(topic, queue_id))
        if first < tail.next_offset and end < tail.log_end:
            yield Loss(topic, queue_id, first, tail.next_offset - first, end)


def in_words(losses: list[Loss]) -> str:
    """Which messages they are."""
    found = [
        (f"message {first}" if count == 1 else f"messages {first} to {first + count - 1}")
        + f" of queue {queue_id} of {topic}"
        for topic, queue_id, first, count, _ in losses[:NAMED_MAX]
    ]
    if len(losses) > NAMED_MAX:
        found.append(f"and messages of {len(losses) - NAMED_MAX} other queues")
    return ", ".join(found)
