"""Random changes of a broker's state."""

from __future__ import annotations

from hypothesis import strategies as st

from cometmq.messaging.changes import (
    Change,
    GenerationsCounted,
    GenerationsRaised,
    GroupDropped,
    GroupLeft,
    GroupPolicyPut,
    GroupPut,
    LimitsPut,
    OffsetsCommitted,
    OffsetsReset,
    QueuesCounted,
    QueuesLocked,
    QueuesUnlocked,
    TopicDropped,
    TopicPut,
    TopicQuotaPut,
    TopicReserved,
    TopicSnapshot,
    TopicTyped,
)
from cometmq.messaging.generations import History
from cometmq.messaging.group_policy import (
    ConsumeMode,
    CustomizedRetry,
    ExponentialRetry,
    GroupPolicy,
)
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.locks import Grant, GrantRun
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.quotas import Limits, Quota, Scope
from cometmq.model import FlushMode, MessageType, Position, TopicConfig

NAMES = st.text("%|abcXYZ019_-", min_size=1, max_size=12)
COUNTS = st.integers(1, 1024)
UINT64 = st.integers(0, 2**64 - 1)
OFFSETS = st.integers(0, 2**63 - 1)

ATTRIBUTES = ((), (("cleanup.policy", "DELETE"), ("x", "")))

CONFIGS = st.builds(
    TopicConfig,
    name=NAMES,
    read_queue_count=COUNTS,
    write_queue_count=COUNTS,
    permission=st.sampled_from([2, 4, 6]),
    flush_mode=st.sampled_from(FlushMode),
)
SETTINGS = st.builds(
    GroupSettings,
    name=NAMES,
    consume_enable=st.booleans(),
    consume_from_min_enable=st.booleans(),
    consume_broadcast_enable=st.booleans(),
    retry_queue_count=st.integers(0, 100),
    retry_times_max=st.integers(0, 100),
    broker_id=st.integers(0, 9),
    broker_id_when_slow=st.integers(0, 9),
    notify_members_enable=st.booleans(),
)

QUOTAS = st.builds(Quota, st.integers(0, 2**40), st.integers(0, 2**40))
POLICIES = st.builds(
    GroupPolicy,
    is_orderly=st.booleans(),
    retry=st.one_of(
        st.none(),
        st.builds(CustomizedRetry, st.lists(OFFSETS, min_size=1, max_size=9).map(tuple)),
        st.builds(ExponentialRetry, OFFSETS, COUNTS, OFFSETS),
    ),
    consume_timeout_min=COUNTS,
    mode=st.sampled_from(ConsumeMode),
    read_quota=QUOTAS,
    dlq_reserve_ms=OFFSETS,
    system_flag=st.integers(0, 9),
    attributes=st.dictionaries(NAMES, st.text(max_size=5)).map(lambda a: tuple(sorted(a.items()))),
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History(((draw(st.integers(1, 2**60)), 0),))
    for rise, start in draw(st.lists(st.tuples(st.integers(1, 9), OFFSETS), max_size=20)):
        history = history.raised(history.current + rise, start)
    return history


def commits(positions: st.SearchStrategy[Position]) -> st.SearchStrategy[OffsetsCommitted]:
    """Many at once, in the order in which a record keeps them: by group, topic."""
    one = st.builds(CommittedOffset, NAMES, NAMES, st.integers(0, 1023), positions)
    return st.lists(one, max_size=8, unique_by=lambda c: (c.group, c.topic, c.queue_id)).map(
        lambda found: OffsetsCommitted(tuple(sorted(found, key=lambda c: (c.group, c.topic))))
    )


QUEUES = st.dictionaries(NAMES, st.lists(st.integers(0, 1023), max_size=4).map(tuple), max_size=4)
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(TopicPut, CONFIGS, UINT64),
    st.builds(TopicReserved, NAMES, OFFSETS),
    st.builds(
        TopicTyped, NAMES, st.sampled_from(MessageType), st.booleans(), st.sampled_from(ATTRIBUTES)
    ),
    st.builds(TopicQuotaPut, NAMES, QUOTAS),
    st.builds(
        LimitsPut,
        st.sampled_from([Scope.ADDRESS, Scope.TOPIC]),
        NAMES | st.just(""),
        st.builds(Limits, st.none() | QUOTAS, st.none() | QUOTAS),
    ),
    st.builds(TopicDropped, NAMES),
    st.builds(TopicSnapshot, CONFIGS, st.lists(histories(), max_size=4).map(tuple)),
    st.builds(QueuesCounted, NAMES, st.lists(OFFSETS, max_size=4).map(tuple)),
    st.builds(
        GenerationsRaised,
        UINT64,
        st.dictionaries(NAMES, st.lists(OFFSETS, max_size=4).map(tuple), max_size=4),
    ),
    st.builds(GenerationsCounted, UINT64),
    st.builds(GroupPut, SETTINGS),
    st.builds(GroupPolicyPut, NAMES, POLICIES),
    st.builds(GroupDropped, NAMES),
    st.builds(GroupLeft, NAMES, NAMES),
    commits(st.builds(Position, UINT64, OFFSETS)),
    st.builds(
        QueuesLocked,
        st.builds(GrantRun, NAMES, st.builds(Grant, st.text(max_size=9), OFFSETS), QUEUES),
    ),
    st.builds(QueuesUnlocked, NAMES, QUEUES),
    st.builds(
        lambda number, change: OffsetsReset(number, change.commits),
        UINT64,
        commits(st.builds(Position, UINT64, OFFSETS)),
    ),
)
