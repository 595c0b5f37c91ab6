"""Reads the end of a log that is opened for writing: :mod:`cometmq.messaging.tail`. Blocking."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cometmq.errors import LimitExceeded, MessageNotFound, StoreDamaged
from cometmq.format import record
from cometmq.format.delayed import SCHEDULE_TOPIC, queue_id_of
from cometmq.format.timers import TIMER_QUEUE
from cometmq.format.timers import due_ms as due_of
from cometmq.member.read.records import is_in_queue
from cometmq.member.state.statelog import newest_progress
from cometmq.messaging.delay import DelayProgress
from cometmq.messaging.resends import ResentKey
from cometmq.messaging.state import BrokerState
from cometmq.messaging.tail import Tail
from cometmq.messaging.timers import Timer, TimerTable
from cometmq.store.writer import MessageStore

# What has changed further back is in the state: a writer looks often whether progress is due.
TAIL_BYTES_MAX = 128 * 1024 * 1024
# The ids that stubs gave their messages are in no state: so much further back they are read too.
SENT_BYTES_MAX = 4 * 1024 * 1024


def progress_of(store: MessageStore, state: BrokerState, now_s: float) -> DelayProgress:
    """How far the levels of delayed messages were delivered, by the state and the log's end. What
    producers sent goes into the state's streams, what groups sent back into its attempts, and the
    marks of messages that were sent again are completed. What became of half messages goes into
    the state's halves, what of the timers is done into its timers.
    """

    def end_of(level: int) -> int:
        return store.queue_bounds(SCHEDULE_TOPIC, queue_id_of(level))[1]

    progress = DelayProgress(state.delays, end_of)
    state.delay_drops.limit(end_of)
    if store.adoption is not None:  # RocketMQ's tables know all that it did
        return progress
    tail = Tail(state.streams, state.attempts, state.sent_ids, now_s)
    _read(store, tail)
    state.halves.log_end = tail.ended_halves
    _skip_timers(store, state.timers, progress, tail.timer_sources)
    for source in tail.delivered.values():
        # Retention may have removed the source, and damage its unit.
        with suppress(MessageNotFound, StoreDamaged):
            found = record.decode(store.read_record(source))
            if found.topic == SCHEDULE_TOPIC and is_in_queue(store, found):
                progress.reached(found.queue_id, found.queue_offset)
    for source, group in tail.resent.items():
        # Where there are too many marks, an operator may send it again: better than no start.
        with suppress(MessageNotFound, StoreDamaged, LimitExceeded):
            found = record.decode(store.read_record(source))
            key = ResentKey(found.topic, found.queue_id, group)
            # Its topic may have been deleted since, and created again.
            if is_in_queue(store, found) and not state.resent.holds(key, found.queue_offset):
                state.resent.put(key, state.resent.plan(key, [found.queue_offset], low=0))
    return progress


def _skip_timers(
    store: MessageStore, timers: TimerTable, levels: DelayProgress, sources: Sequence[int]
) -> None:
    """What the log's end has of these messages of the timer queue, and of delay levels, is all that
    is to be done.
    """
    timers.limit(store.queue_bounds(*TIMER_QUEUE)[1])
    for source in sources:
        with suppress(MessageNotFound, StoreDamaged):
            found = record.decode(store.read_record(source))
            if found.topic == SCHEDULE_TOPIC and is_in_queue(store, found):
                levels.reached(found.queue_id, found.queue_offset)
            elif (found.topic, found.queue_id) == TIMER_QUEUE and is_in_queue(store, found):
                due_ms = due_of(found.raw_properties)
                if due_ms is not None:
                    timers.skip(Timer(due_ms, found.queue_offset))


def _read(store: MessageStore, tail: Tail) -> None:
    start = 0 if store.state_lost is not None else newest_progress(store)
    before = store.appended_offset - start + SENT_BYTES_MAX
    if before <= TAIL_BYTES_MAX:
        for log_offset, data in store.good_records(before, 0):
            if log_offset >= start:
                break
            tail.observe_sent(data, log_offset, start)
    for log_offset, data in store.good_records(TAIL_BYTES_MAX, start):
        tail.observe(data, log_offset)
