"""From a folder to an open store with its state: recovery, generations, the epoch's state snapshot.
Blocking.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from cometmq.clock import Clock
from cometmq.errors import ConfigInvalid, StoreDamaged, StoreForeignFile
from cometmq.format import delayed, queueunit
from cometmq.format.batch import BatchLimits
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import HALF_QUEUE, HALF_TOPIC, OP_TOPIC, op_records
from cometmq.format.indexfile import Sizes
from cometmq.format.timerlog import decode_check
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.config import MemberConfig
from cometmq.member.state import adoption
from cometmq.member.state.follower import FollowerState
from cometmq.member.state.halves import now_of, open_halves
from cometmq.member.state.keeper import MOVED_TO
from cometmq.member.state.pop_adoption import PopAdoption
from cometmq.member.state.statelog import (
    Counted,
    append_now,
    load,
    load_what_is_left,
    rebuild_advice,
    refuse_lost_changes,
    refuse_short_queues,
    topic_deletions,
)
from cometmq.member.state.tail import progress_of
from cometmq.member.state.timer_adoption import adopt_timers
from cometmq.member.state.timer_handover import TimerHandover
from cometmq.messaging import rebuilding
from cometmq.messaging.adoption import Tables
from cometmq.messaging.changes import DelaysReached, TopicDropped
from cometmq.messaging.delay import DelayProgress
from cometmq.messaging.handle_secrets import SECRET_BYTES
from cometmq.messaging.queuechanges import QueueChanges
from cometmq.messaging.rebuilding import Commits
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC, BrokerState, change_records
from cometmq.messaging.topics import is_system
from cometmq.model import DELAY_LEVEL_MAX, TopicConfig
from cometmq.replication.epoch_history import EpochBranches, common_end
from cometmq.store.base import BaseStore
from cometmq.store.follower import FollowerStore
from cometmq.store.layout import CONFIG, TIMER_CHECK
from cometmq.store.recovery.opening import Preview
from cometmq.store.recovery.recovery import Progress
from cometmq.store.writer import MessageStore, StoreOptions
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

NewState: TypeAlias = Callable[[], BrokerState]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store, the state in its log, and how long it took. ``delays``: how far each
    level of delayed messages was delivered, up to the log's last record. ``stored_ms``: the store
    time of the last record before this opening; 0: there was none.
    """

    store: MessageStore
    state: BrokerState
    delays: DelayProgress
    stored_ms: int
    seconds: float


def open_writer(
    config: MemberConfig,
    limits: BatchLimits,
    host: bytes,
    clock: Clock,
    *,
    epoch_floor: int = 0,
    log_end: int | None = None,
    keeps_positions: bool = True,
    branches: EpochBranches = (),
    progress: Progress | None = None,
    follower: FollowerStore | None = None,
) -> Opened:
    """Open the store for writing, in an epoch above ``epoch_floor``. ``log_end``: where the writer
    before handed its log over, of which we have everything. ``keeps_positions`` False: consumers
    may have seen messages of other logs, so positions are fenced from where our log parts from
    those, by ``branches``. ``progress`` hears how far recovery is. ``follower``: the store as this
    member had it open until now, see :func:`can_lead`; it is given up.

    Raises what ``MessageStore.open`` raises, StateTooNew and StoreDamaged; then the folder is free
    again.
    """
    started_s = clock.monotonic_s()
    approval = _WriterApproval(_new_state(config), config.store_path, log_end)
    options = _store_options(config, limits)
    begin = (
        partial(MessageStore.of_follower, follower, options)
        if follower is not None
        else partial(
            MessageStore.open,
            config.store_path,
            options,
            observer=QueueChanges(),
            progress=progress,
        )
    )
    store = begin(clock=clock, epoch_floor=epoch_floor, approve=approval)
    state, stored_ms = approval.state, store.last_store_time_ms
    try:
        assert log_end is None or store.appended_offset == log_end
        is_other = store.state_lost is not None or store.adoption is not None
        # What was appended but not flushed may be gone, although consumers have seen it.
        lost_its_end = store.has_damage or (not store.clean_start and log_end is None)
        if is_other or not keeps_positions or lost_its_end:
            common = common_end(store.epochs, branches, state.generations.last_fork)
            # A writer of which this log has nothing may have gone on from it too.
            state.generations.count_in(store.epoch)
            if store.state_lost is not None:
                _rebuild(store, state, approval, config)
            if store.adoption is not None:
                adoption.adopt_tables(store, store.adoption, approval.tables, state, config, common)
            else:
                _raise_generations(store, state, common)
        if store.adoption is not None:
            _adopt_what_waits(store, state, config, clock)
        stored = {topic for topic, _ in store.queues()}
        delays = progress_of(store, state, clock.monotonic_s())
        _fit_levels(store, state, stored, delays)
        state.apply(DelaysReached(delays.offsets))
        delays.written = delays.offsets
        _open_halves(store, state, config, host, clock)
        _add_topics_moved_to(state)
        for change in state.plan_secret(clock.wall_ms(), os.urandom(SECRET_BYTES)):
            state.apply(change)
        orphans = {topic for topic in stored if not _is_known(topic, state)}
        records = state.snapshot_records(
            next_offset_of=lambda *queue: store.queue_bounds(*queue)[1]
        )
        if orphans:
            records = [*change_records(map(TopicDropped, sorted(orphans))), *records]
        append_now(store, records, host, clock.wall_ms())
        # The process ended between a deletion's record and the removal of the files, or another
        # program deleted the topic. A new topic of that name would go on in those files.
        for topic in orphans:
            store.drop_topic(topic)
        store.keep_room(state.copy_bytes())
        store.settle_state()
        if store.adoption is not None:
            adoption.settle(store, state, config, clock)
        _begin_handover(TimerHandover(store, state, config, clock))
    except BaseException:
        store.abandon()
        raise
    seconds = _log_opened(store, clock.monotonic_s() - started_s)
    return Opened(store, state, delays, stored_ms, seconds)


def _fit_levels(
    store: MessageStore, state: BrokerState, stored: set[str], delays: DelayProgress
) -> None:
    """A queue for each delay level. Raises ConfigInvalid while messages wait in levels that the
    list has no more.
    """
    count = delayed.level_count()
    for level in range(count + 1, DELAY_LEVEL_MAX + 1):
        low, end = store.queue_bounds(SCHEDULE_TOPIC, delayed.queue_id_of(level))
        waiting = end - max(low, delays.offsets.get(level, 0))
        if waiting > 0:
            raise ConfigInvalid(
                f"option message_delay_level: it has {count} levels, and {waiting} messages wait "
                f"in level {level}. Give it at least {level} levels until they are delivered"
            )
    known = state.topics.find(SCHEDULE_TOPIC)
    # RocketMQ wrote it, and its tables need not name it; or the list has more levels than it had.
    if known.write_queue_count < count if known else SCHEDULE_TOPIC in stored:
        config = replace(known or TopicConfig(SCHEDULE_TOPIC), read_queue_count=count)
        change = state.plan_topic(replace(config, write_queue_count=count), by_system=True)
        state.apply(change)


def _adopt_what_waits(
    store: MessageStore, state: BrokerState, config: MemberConfig, clock: Clock
) -> None:
    """What RocketMQ left to be delivered at its time, and what members have not acknowledged."""
    pops = PopAdoption(store, state)
    path = config.store_path / CONFIG / TIMER_CHECK
    check = decode_check(path.read_bytes() if path.is_file() else None)
    count = adopt_timers(store, state.timers, check, clock.wall_ms(), pops.takes)
    if count:
        log.warning("adopted timers", extra=fields(waiting=count, checkpoint=check is not None))
    _, end = store.queue_bounds(*TIMER_QUEUE)
    if end and TIMER_TOPIC not in state.topics:  # RocketMQ's tables need not name it
        state.apply(state.plan_topic(TopicConfig(TIMER_TOPIC, 1, 1), by_system=True))
    pops.read()
    if received := pops.settle(store.epoch):
        log.warning("adopted received messages", extra=fields(unacknowledged=received))


def _begin_handover(timers: TimerHandover) -> None:
    try:
        timers.begin()
    except OSError as error:  # RocketMQ would repeat more of what we deliver from now on
        log.warning("RocketMQ's timer files are as before", extra=fields(reason=error.strerror))


def _open_halves(
    store: MessageStore, state: BrokerState, config: MemberConfig, host: bytes, clock: Clock
) -> None:
    """The half messages that are open. Ended ones that a crash left without an op record get one:
    only this start reads their ends from the end of the log.
    """
    low, end = store.queue_bounds(*HALF_QUEUE)
    if low < end:
        for topic in (HALF_TOPIC, OP_TOPIC):
            if topic not in state.topics:  # RocketMQ's tables need not name them
                state.apply(state.plan_topic(TopicConfig(topic, 1, 1), by_system=True))
    table = state.halves
    rules = config.check_rules()
    if missing := open_halves(store, table, table.log_end, rules, now_of(clock)):
        ops = op_records(missing, host)
        appended = store.append_relayed(ops, host)
        table.told(appended.queue_offsets[-1] + 1, missing)
    table.log_end = {}
    table.written = table.progress  # the snapshot that follows has it


def _add_topics_moved_to(state: BrokerState) -> None:
    """An earlier release, or RocketMQ, may have made only the topics where messages wait."""
    for topic, moved_to in MOVED_TO.items():
        if topic in state.topics and moved_to not in state.topics:
            state.apply(state.plan_topic(TopicConfig(moved_to, 1, 1), by_system=True))


class _WriterApproval:
    """Reads the state from the store's log and another program's tables, while the folder is as the
    last stop left it: a refusal leaves no trace.
    """

    def __init__(self, new_state: NewState, folder: Path, log_end: int | None) -> None:
        self.state = new_state()
        self.tables = Tables()
        self.exported = Tables()  # by us
        self.commits: Commits = {}  # that are readable in a damaged log
        self._new_state = new_state
        self._folder = folder
        self._log_end = log_end

    def __call__(self, store: Preview) -> None:
        if self._log_end is not None and store.appended_offset != self._log_end:
            raise StoreDamaged(
                f"the log was handed over up to {self._log_end} and ends at {store.appended_offset}"
            )
        if store.state_lost is not None:
            self.state, self.commits = load_what_is_left(store, self._new_state)
            self.exported = adoption.read_exported(self._folder / "config")
        else:
            refuse_lost_changes(store, has_other_tables=store.adoption is not None)
            self._load(store)
        if store.adoption is not None:
            try:
                self.tables = adoption.read(store.adoption.tables)
            except StoreDamaged as error:
                said = error.message.replace("config/", f"{self._folder}/config/", 1)
                raise StoreForeignFile(said) from error

    def _load(self, store: Preview) -> None:
        if store.adoption is not None:
            try:
                self.state = load(store, self._new_state)
            except StoreDamaged:
                # RocketMQ's retention does not know what of our log has to stay; its tables do.
                log.warning("the log has no complete snapshot of our state any more")
            return
        low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
        if low == high and store.has_state:
            raise StoreDamaged(
                f"the log has lost its snapshots of the state. {rebuild_advice(store)}"
            )
        counted: Counted = {}
        self.state = load(store, self._new_state, counted)
        if store.may_lack_queues:
            refuse_short_queues(store, counted)
        _refuse_unknown_queues(store, self.state)


def _is_known(topic: str, state: BrokerState) -> bool:
    return topic in state.topics or is_system(topic)


def _refuse_unknown_queues(store: Preview, state: BrokerState) -> None:
    """Raise StoreDamaged when a queue has messages of a topic that is neither in the state nor
    deleted by the log: a writer removes the queues of such topics.
    """
    ends: dict[tuple[str, int], int] = {}  # log offset of the last message, by topic and queue id
    for topic, queue_id in store.queues():
        low, high = store.queue_bounds(topic, queue_id)
        if low < high and not _is_known(topic, state):
            last, _, _ = next(queueunit.iterate(store.read_units(topic, queue_id, high - 1, 1)))
            if last >= store.min_offset:
                ends[topic, queue_id] = last
    deleted_at = topic_deletions(store, min(ends.values())) if ends else {}
    for (topic, queue_id), last in ends.items():
        if deleted_at.get(topic, -1) < last:
            raise StoreDamaged(
                f"queue {queue_id} of {topic} has messages, and the state in the log neither knows "
                f"the topic nor its deletion: a part of the log is lost, or another "
                f"store's. {rebuild_advice(store)}"
            )


@dataclass(frozen=True, slots=True)
class OpenedFollower:
    """An open store of a follower with its state, and how long it took."""

    store: FollowerStore
    state: FollowerState
    seconds: float


def open_copy(
    config: MemberConfig, clock: Clock, *, progress: Progress | None = None
) -> OpenedFollower:
    """Open the store for following. Errors and ``progress`` as of :func:`open_writer`."""
    started_s = clock.monotonic_s()
    new_state = _new_state(config)
    approval = _FollowerApproval(new_state)
    store = FollowerStore.open(
        config.store_path,
        # A writer waits until this member has written the log: the pool would only delay it.
        replace(_store_options(config, BatchLimits()), transient_bytes_max=0),
        observer=QueueChanges(),
        progress=progress,
        approve=approval,
    )
    state = approval.state
    try:
        if approval.rebuild_reason:
            # The log was cut below its last complete snapshot. It is a copy: copy it again.
            log.error("the log is copied again", extra=fields(reason=approval.rebuild_reason))
            store.reset_to(store.min_offset)
            state = new_state()
        _, state_records = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
        whole = (store.min_offset == 0 or state_records > 0) and store.state_lost is None
    except BaseException:
        store.abandon()
        raise
    follower = FollowerState(state, new_state, whole=whole)
    return OpenedFollower(store, follower, _log_opened(store, clock.monotonic_s() - started_s))


def can_lead(config: MemberConfig, store: FollowerStore) -> bool:
    """Whether :func:`open_writer` can go on with a follower's open store. Without the transient
    store pool, which a follower does not have, and with nothing that an opening has to mend.
    """
    return store.is_open and not store.needs_opening and not config.transient_bytes_max


class _FollowerApproval:
    """As :class:`_WriterApproval`, of a follower."""

    def __init__(self, new_state: NewState) -> None:
        self.state = new_state()
        self.rebuild_reason = ""  # the log has to be copied from the start
        self._new_state = new_state

    def __call__(self, store: Preview) -> None:
        if store.state_lost is not None:
            self.state, _ = load_what_is_left(store, self._new_state)
            return
        # Perhaps no other member has the rest of this log: only the operator may give it up.
        refuse_lost_changes(store, has_other_tables=store.adoption is not None)
        try:
            self.state = load(store, self._new_state)
        except StoreDamaged as error:
            if store.adoption is not None:  # there is no other copy of what RocketMQ wrote
                raise
            self.rebuild_reason = str(error)


def _new_state(config: MemberConfig) -> NewState:
    return partial(BrokerState, config.topics_max, config.groups_max)


def _store_options(config: MemberConfig, limits: BatchLimits) -> StoreOptions:
    return StoreOptions(
        commit_log_file_bytes=config.mapped_file_size_commit_log,
        consume_queue_file_bytes=config.mapped_file_size_consume_queue,
        open_files_max=config.open_files_max,
        transient_bytes_max=config.transient_bytes_max,
        index_sizes=Sizes(config.max_hash_slot_num, config.max_index_num),
        index_enabled=config.message_index_enable,
        batch_limits=limits,
    )


def _log_opened(store: BaseStore, seconds: float) -> float:
    log.info(
        "store open",
        extra=fields(
            epoch=store.epoch,
            clean=store.clean_start,
            end=store.appended_offset,
            seconds=round(seconds, 3),
        ),
    )
    return seconds


def _rebuild(
    store: MessageStore, state: BrokerState, approval: _WriterApproval, config: MemberConfig
) -> None:
    for line in rebuilding.rebuild(
        state,
        approval.commits,
        approval.exported,
        [*store.queues(), *((topic, n - 1) for topic, n in (store.state_lost or {}).items() if n)],
        lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1],
        config.new_topic,
    ):
        log.warning("the state was lost in part: %s", line)


def _raise_generations(store: MessageStore, state: BrokerState, common: int) -> None:
    # The offsets of messages that are gone are about to be given to others. The state snapshot that
    # follows carries the new generation: it needs no record of its own, because no client gets an
    # answer before the snapshot is complete.
    def maximum_of(topic: str, queue_id: int) -> int:
        if common < store.epochs[-1][1]:
            return store.queue_offset_at(topic, queue_id, common)
        return store.queue_bounds(topic, queue_id)[1]

    for change in state.plan_raise(maximum_of):
        state.apply(change)
