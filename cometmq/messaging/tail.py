"""What the end of a log has that the state does not know yet.

Progress is written about once a second. After a crash the records behind the newest progress tell
the rest: a relayed record names its source, so nothing that was delivered is delivered again; other
records have the ids of their producers, so nothing that was stored is stored again. What an
operator sent again is marked.
"""

from __future__ import annotations

from cometmq.format import delayed, halves, record
from cometmq.format.properties import UNIQ_KEY
from cometmq.format.record import Record
from cometmq.format.relay import walk
from cometmq.format.timers import TIMER_OUT_MS
from cometmq.messaging.dedup import Ids, StreamTable, id_at_end
from cometmq.messaging.half_runs import EndedHalf
from cometmq.messaging.retry import AttemptTable, attempt_of
from cometmq.messaging.sent_ids import SentIds, sent_id
from cometmq.model import RETRY_PREFIX

_ID_NAME = f"{UNIQ_KEY}\x01".encode()


class Tail:
    """Takes a log's end, piece by piece. What it finds of producers goes into ``streams`` and, of
    stubs, into ``sent_ids`` as of ``now_s``; what of send-backs into ``attempts``.
    """

    def __init__(
        self, streams: StreamTable, attempts: AttemptTable, sent_ids: SentIds, now_s: float
    ) -> None:
        # Log offset of the newest delivered message of each level. A level is delivered in order.
        self.delivered: dict[int, int] = {}
        # Messages that were sent again, by the log offset of their source: the group that got
        # them, or "" for their topic. A crash may have come before their mark.
        self.resent: dict[int, str] = {}
        # Half messages that have ended, by their log offset. A crash may have come before the op
        # record that lists them.
        self.ended_halves: dict[int, EndedHalf] = {}
        # Log offsets of what records that wait, or waited, for a time of their own were made from:
        # of messages of the timer queue that are done, and of others.
        self.timer_sources: list[int] = []
        self._streams = streams
        self._attempts = attempts
        self._sent_ids = sent_ids
        self._now_s = now_s

    def observe_sent(self, chunk: bytes, log_offset: int, end: int) -> None:
        """A piece that comes before the log's end: the state knows all of it that lies below
        ``end``, but for the ids that stubs gave their messages.
        """
        for at, record_end, is_relayed in walk(chunk):
            if log_offset + at >= end:
                return
            if not is_relayed and id_at_end(chunk, record_end) is None:
                self._observe_id(chunk, at, record_end, log_offset)

    def observe(self, chunk: bytes, log_offset: int) -> None:
        """The next piece: whole records, or the end mark of a file."""
        stream, first, start, next_counter = b"", 0, 0, -1  # of the run that goes on
        for at, end, is_relayed in walk(chunk):
            found = None
            if is_relayed:
                self._observe_relayed(record.decode(chunk, at))
            else:
                found = id_at_end(chunk, end)
                if found is None:
                    self._observe_id(chunk, at, end, log_offset)
            if found == (stream, next_counter):
                next_counter += 1
                continue
            self._add(stream, first, next_counter, log_offset + start)
            stream, first = found or (b"", 0)
            start, next_counter = at, first + 1 if found else -1
        self._add(stream, first, next_counter, log_offset + start)

    def _add(self, stream: bytes, first: int, end: int, log_offset: int) -> None:
        if stream:
            self._streams.observe(Ids(stream, first, end - first), log_offset)

    def _observe_id(self, chunk: bytes, at: int, end: int, log_offset: int) -> None:
        if chunk.find(_ID_NAME, at, end) < 0:
            return
        found = record.decode(chunk, at)
        if found.unique_id:
            sent = sent_id(found.unique_id, found.born_host)
            self._sent_ids.add(sent, log_offset + at, self._now_s)

    def _observe_relayed(self, found: Record) -> None:
        assert found.prepared_offset, found.log_offset
        if found.sys_flag & halves.SYS_FLAG_TRANSACTION or found.topic == halves.GIVEN_UP_TOPIC:
            self.ended_halves[found.prepared_offset] = ended_by(found)
            return
        attempt = attempt_of(found)
        level = delayed.level_named(found.properties)
        is_timer = TIMER_OUT_MS in found.properties
        if is_timer:
            self.timer_sources.append(found.prepared_offset)
        if attempt is not None:
            self._attempts.add(attempt, found.log_offset + found.size, self._now_s)
        elif level:
            self.delivered[level] = found.prepared_offset
        elif not is_timer:
            is_retry = found.topic.startswith(RETRY_PREFIX)
            group = found.topic.removeprefix(RETRY_PREFIX) if is_retry else ""
            self.resent[found.prepared_offset] = group


def ended_by(found: Record) -> EndedHalf:
    """What became of a half, by the record that was made from it."""
    its = halves.read(found.raw_properties)
    group = "" if its is None else its.group
    return EndedHalf(
        found.prepared_offset,
        group,
        found.topic,
        found.queue_id,
        found.queue_offset,
        found.log_offset,
    )
