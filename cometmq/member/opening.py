"""From a folder to an open store with its state: recovery, generations, the epoch's full copy.
Blocking.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.errors import StoreDamaged
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.copying import StateCopy
from cometmq.member.statelog import DeletedTopics, append_now, load
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC, BrokerState
from cometmq.messaging.topics import is_system
from cometmq.store.base import BaseStore
from cometmq.store.engine import MessageStore, StoreOptions
from cometmq.store.following import FollowerStore
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store, the state that its log tells, and how long it took."""

    store: MessageStore
    state: BrokerState
    seconds: float


def open_writer(
    config: MemberConfig,
    limits: BatchLimits,
    host: bytes,
    clock: Clock,
    *,
    epoch_floor: int = 0,
    log_end: int | None = None,
) -> Opened:
    """Open the store for writing, in an epoch above ``epoch_floor``. ``log_end``: where the writer
    before handed its log over, of which we have everything.

    Raises what ``MessageStore.open`` raises, StateTooNew and StoreDamaged; then the folder is free
    again.
    """
    started_s = clock.monotonic_s()
    store = MessageStore.open(
        config.store_path,
        _store_options(config, limits),
        clock=clock,
        epoch_floor=epoch_floor,
        observer=DeletedTopics(),
    )
    try:
        if log_end is not None and store.appended_offset != log_end:
            raise StoreDamaged(
                f"the log was handed over up to {log_end} and ends at {store.appended_offset}"
            )
        state = load(store, lambda: _new_state(config))
        _drop_orphans(store, state)
        if not store.clean_start and log_end is None:
            _raise_generations(store, state)
        append_now(store, state.full_copy(), host, clock.wall_ms())
    except BaseException:
        store.abandon()
        raise
    return Opened(store, state, _log_opened(store, clock.monotonic_s() - started_s))


@dataclass(frozen=True, slots=True)
class OpenedCopy:
    """An open store of a follower with its state, and how long it took."""

    store: FollowerStore
    state: StateCopy
    seconds: float


def open_copy(config: MemberConfig, clock: Clock) -> OpenedCopy:
    """Open the store for following. Errors as of :func:`open_writer`."""
    started_s = clock.monotonic_s()
    store = FollowerStore.open(
        config.store_path, _store_options(config, BatchLimits()), observer=DeletedTopics()
    )
    try:
        state = _load_copy(store, config)
    except BaseException:
        store.abandon()
        raise
    return OpenedCopy(store, state, _log_opened(store, clock.monotonic_s() - started_s))


def _load_copy(store: FollowerStore, config: MemberConfig) -> StateCopy:
    def new_state() -> BrokerState:
        return _new_state(config)

    try:
        state = load(store, new_state)
    except StoreDamaged as error:
        # The log was cut below its last complete copy of the state. It is a copy itself, so it can
        # be had again.
        log.error("the log is copied anew", extra=fields(reason=str(error)))
        store.start_anew(store.min_offset)
        state = new_state()
    _, state_records = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    return StateCopy(state, new_state, whole=store.min_offset == 0 or state_records > 0)


def _new_state(config: MemberConfig) -> BrokerState:
    return BrokerState(config.topics_max, config.groups_max)


def _store_options(config: MemberConfig, limits: BatchLimits) -> StoreOptions:
    return StoreOptions(
        commit_log_file_bytes=config.mapped_file_size_commit_log,
        consume_queue_file_bytes=config.mapped_file_size_consume_queue,
        open_files_max=config.open_files_max,
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


def _drop_orphans(store: MessageStore, state: BrokerState) -> None:
    """Remove the queues of topics that the state does not know.

    A deletion is first a record and then a change of files. When the process ended between the two,
    and recovery had no reason to read as far back as the record, the files are still there; a new
    topic of the name would go on in them.
    """
    for topic in {topic for topic, _ in store.queues()}:
        if topic not in state.topics and not is_system(topic):
            store.drop_topic(topic)


def _raise_generations(store: MessageStore, state: BrokerState) -> None:
    # What was appended but not flushed may be gone, and its offsets are about to be given to other
    # messages. The full copy that follows carries the new generation: no change of its own is
    # needed, and before the copy is complete nobody has been answered with it.
    for change in state.plan_raise(lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1]):
        state.apply(change)
