"""What the operations answer: frozen rows, ready to be shown as a table or written as JSON.

The field names are the keys of ``--output json`` and a promise: docs/cli.md lists them, and a test
compares. Units are in the names; times are milliseconds since 1970-01-01 UTC, 0 = never.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemberView:
    """A registered member of a broker group. What only the member itself knows is None while it
    does not answer."""

    cluster: str
    broker_group: str
    member_id: int
    role: str  # writer or follower
    address: str  # host:port for clients
    internal_address: str  # host:port for administration
    epoch: int
    topic_count: int
    last_heard_ms: int
    reachable: bool
    error: str | None = None  # name of the error with which it refuses to answer
    version: str | None = None
    store_id: str | None = None
    started_ms: int | None = None
    log_min_offset: int | None = None
    log_appended_offset: int | None = None
    log_flushed_offset: int | None = None
    refusal: str | None = None  # why sends are refused for want of room; empty: they are not
    clock_skew_ms: int | None = None  # ahead of what most clocks show; None too: it knows no other


@dataclass(frozen=True, slots=True)
class BrokerMemberView:
    """A member of a broker group. What only the member itself knows is None while it does not
    answer; ``behind_bytes`` also while the writer does not."""

    broker_group: str
    member_id: int
    role: str  # writer or follower
    epoch: int
    address: str
    reachable: bool
    error: str | None  # name of the error with which it refuses to answer
    log_min_offset: int | None
    log_appended_offset: int | None
    log_flushed_offset: int | None
    behind_bytes: int | None  # of the writer's log
    refusal: str | None  # why sends are refused for want of room; empty: they are not
    clock_skew_ms: int | None  # ahead of what most clocks show; None too: it knows no other


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatusView:
    """A broker group at a glance. What no member that answers knows is None."""

    broker_group: str
    status: str  # ok, degraded, refusing, waiting or no writer
    writer: int | None = None  # member id
    epoch: int  # the highest that is known
    reason: str | None = None  # why that member leads
    since_ms: int | None = None
    in_sync: list[int] | None = None  # member ids; without a writer as followers read the lease
    electable: list[int] | None = None
    min_in_sync: int | None = None
    members: list[int]  # that are registered
    missing: list[int]  # that should be, by the option peers or the lease
    silent: list[int]  # that are registered and do not answer, or refuse
    troubles: list[str]  # what is amiss with which member
    behind_bytes_max: int | None = None  # of the follower that is furthest behind
    clock_skew_ms_max: int | None = None  # of the member that is furthest from most clocks
    advice: str  # what to do; empty: nothing


@dataclass(frozen=True, slots=True)
class ElectedView:
    """What `broker elect` has come to."""

    broker_group: str
    member_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CleanedView:
    """What `broker clean` removed at a member."""

    broker_group: str
    member_id: int
    role: str
    log_file_count: int
    log_bytes: int
    queue_file_count: int
    topics: list[str]  # that do not exist, and had left queues behind
    log_min_offset: int


@dataclass(frozen=True, slots=True)
class HandoverView:
    """A planned hand-over that is complete."""

    broker_group: str
    from_member: int
    to_member: int
    log_end_offset: int  # where the one ended and the other began
    epoch: int  # of the new writer


@dataclass(frozen=True, slots=True)
class TraceEntryView:
    """A stage that a process's flight recorder noted."""

    stage: str
    begin_ms: float  # CLOCK_MONOTONIC: the processes of a machine line up
    duration_ms: float
    number: int  # what it means depends on the stage


@dataclass(frozen=True, slots=True)
class LogChecksumView:
    """A member's log, compared with that of the group's other members."""

    broker_group: str
    member_id: int
    role: str
    from_offset: int  # the highest minimum of the members
    to_offset: int  # the lowest end
    sha256: str
    equal: bool  # to the checksums of all others
    # Members by the option peers that are not registered, so were not compared.
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TopicView:
    """The settings of a topic on one broker group."""

    topic: str
    broker_group: str
    read_queue_count: int
    write_queue_count: int
    permission: str  # rw, r or w
    flush_mode: str  # async or sync
    replication_mode: str  # async, appended or flushed
    reserve_time_ms: int  # older messages are not shown; 0 = whatever the log has is
    message_type: str  # unspecified, normal, fifo, delay, transaction or mixed
    is_ordered: bool  # over all broker groups
    send_quota: str  # of each client, messages/bytes a second; empty: none


@dataclass(frozen=True, slots=True)
class QuotaView:
    """What an address or a topic may send and read at one broker group, messages/bytes a second."""

    scope: str  # address or topic
    name: str  # empty: each that has no quota of its own
    broker_group: str
    send: str  # 0/0: no limit; empty: as each
    read: str


@dataclass(frozen=True, slots=True)
class CreatedTopicView:
    """What `topic create` or `topic update` did on one broker group."""

    topic: str
    broker_group: str
    read_queue_count: int
    write_queue_count: int
    permission: str
    flush_mode: str
    replication_mode: str
    reserve_time_ms: int
    message_type: str
    is_ordered: bool
    send_quota: str
    created: bool  # False: it was there, and has these settings now


@dataclass(frozen=True, slots=True)
class OrderView:
    """The fixed queues of an ordered topic on one broker group, as one name server has them."""

    topic: str
    namesrv: str
    broker_group: str
    queue_count: int


@dataclass(frozen=True, slots=True)
class ShrunkTopicView:
    """How far `topic shrink` has come on one broker group."""

    topic: str
    broker_group: str
    read_queue_count: int
    write_queue_count: int
    # Consumer group → its messages in the queues that go; empty: nothing is waited for.
    waiting: dict[str, int]


@dataclass(frozen=True, slots=True)
class AllocatedQueueView:
    """The member that would read a queue."""

    client_id: str
    topic: str
    broker_group: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class DeletedTopicView:
    """A broker group that deleted a topic."""

    topic: str
    broker_group: str


@dataclass(frozen=True, slots=True)
class RouteView:
    """One broker group's share of a topic's route."""

    topic: str
    broker_group: str
    read_queue_count: int
    write_queue_count: int
    permission: str
    flush_mode: str
    replication_mode: str
    writer: str  # its address; empty = nothing can be sent there now
    followers: list[str]


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue of a topic."""

    topic: str
    broker_group: str
    queue_id: int
    generation: int
    min_offset: int
    max_offset: int
    appended_offset: int
    message_count: int  # max_offset - min_offset
    last_store_time_ms: int


@dataclass(frozen=True, slots=True)
class QueueTimeView:
    """What a time means in one queue."""

    topic: str
    broker_group: str
    queue_id: int
    generation: int
    offset: int
    store_time_ms: int  # of the message there; 0: there is none


@dataclass(frozen=True, slots=True)
class GroupView:
    """A consumer group. Fields that broker groups of an older release do not send are None."""

    group: str
    broker_groups: list[str]  # where it is known
    member_count: int | None = None  # also those away, at the broker group that has most
    away_count: int | None = None  # of these, static ones that are away
    queue_count: int | None = None  # that it has committed for
    idle_ms: int | None = None  # without member and commit, since the writers' start at most
    retry_count: int | None = None  # messages in its retry topic
    dead_letter_count: int | None = None


@dataclass(frozen=True, slots=True)
class DeletedGroupView:
    """A broker group that deleted a consumer group."""

    group: str
    broker_group: str
    topics: list[str]  # of the group, deleted with it


@dataclass(frozen=True, slots=True)
class GroupSettingsView:
    """Settings of a consumer group at one broker group."""

    group: str
    broker_group: str
    consume_enable: bool
    consume_broadcast_enable: bool
    consume_from_min_enable: bool
    notify_members_enable: bool
    consume_orderly: bool
    retry_times_max: int
    retry_queue_count: int
    retry_policy: str  # as the option of `group update` takes it
    consume_timeout_min: int
    mode: str  # "pull" or "pop"
    read_messages_per_s: int  # of each client; 0: no limit
    read_bytes_per_s: int
    dlq_reserve_time_ms: int  # 0: as all messages
    broker_id: int
    broker_id_when_slow: int
    attributes: list[str]  # RocketMQ's, kept for it: name=value
    created: bool


@dataclass(frozen=True, slots=True)
class GroupMemberView:
    """A member of a consumer group. Fields from ``address`` on are of brokers that send them."""

    client_id: str
    # Topic → tags, or one SQL92 expression; none = every message.
    subscriptions: dict[str, list[str]]
    message_model: str  # "clustering", "broadcasting", or "pop": it receives
    allocation: str  # how it divides the queues; empty: it sends none
    held_queue_count: int  # queues that it reads, or is about to; 0: none, or not sent
    session_ms: int = 0  # how long it stays a member when it has gone; 0: it is no static member
    is_away: bool = False  # it has gone, and is a member still
    address: str = ""  # host:port that it has called from
    member_ms: int = 0  # for how long it has been a member
    away_ms: int = 0  # for how long it has been away
    session_left_ms: int = 0  # how long nobody else gets its queues


@dataclass(frozen=True, slots=True)
class RemovedMemberView:
    """A member of a consumer group that was to be removed."""

    group: str
    client_id: str
    broker_groups: list[str]  # where it was away, and is a member no more
    connected: list[str]  # broker groups where it has a stream, and stays


@dataclass(frozen=True, slots=True)
class ClientView:
    """A stream of a client at a broker group. The address is the network's; names, language and
    version are what the client says.
    """

    kind: str  # "member" or "producer"
    broker_group: str
    group: str  # of a member
    client_id: str  # of a member
    address: str  # host:port
    language: str  # empty: not known
    version: str  # program or library, and its version
    since_ms: int  # when the stream was opened
    is_away: bool  # a static member without a stream
    agent: str  # all that the client's connection says of its program


@dataclass(frozen=True, slots=True)
class ClientTopicView:
    """The filter with which a client reads a topic."""

    topic: str
    tags: list[str]  # empty: all
    sql: str  # empty: none


@dataclass(frozen=True, slots=True)
class ClientQueueView:
    """A queue that a client reads. Offsets are None while it knows none."""

    topic: str
    broker_group: str
    queue_id: int
    committed_offset: int | None
    next_offset: int | None  # of the next pull
    cached_count: int  # messages pulled and not done
    cached_bytes: int  # of the pull answers that these came in
    call_count: int  # listener calls with its messages
    lock_number: int | None  # of a client in order
    is_locked: bool
    last_pull_ago_ms: int | None  # since a pull was answered; None = never
    is_paused: bool


@dataclass(frozen=True, slots=True)
class ClientLeasesView:
    """The messages of a broker group (POP) that a client has and has not acknowledged."""

    broker_group: str
    held_count: int
    held_bytes: int
    call_count: int
    last_receive_ago_ms: int | None  # None = never


@dataclass(frozen=True, slots=True)
class ClientSendingView:
    """How a producer sends to a broker group."""

    broker_group: str
    is_connected: bool
    in_flight_count: int  # batches
    waiting_count: int  # messages, those in flight included
    waiting_bytes: int
    stored_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class ClientRatesView:
    """Messages per second of a topic, and the mean time of a listener call."""

    topic: str
    pulled_per_s: float
    done_per_s: float
    failed_per_s: float
    process_ms: float


@dataclass(frozen=True, slots=True)
class ClientCallView:
    """A listener call that runs, or a receive of a simple consumer whose messages are in work."""

    topic: str
    broker_group: str
    queue_id: int
    queue_offset: int  # of the first message
    message_count: int
    age_ms: int
    is_late: bool  # it takes longer than the consume timeout
    stack: str  # empty: not asked for, or its thread or task has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientDescriptionView:
    """The description that a running client gives; the broker's own knowledge of it comes first."""

    client_id: str
    group: str  # of a member
    broker_group: str  # which has asked it
    address: str  # host:port
    agent: str
    since_ms: int  # when the stream was opened
    role: str  # push, push_orderly, push_pop, pull, simple, producer; empty: not known
    version: str
    language: str
    start_time_ms: int  # by its clock
    time_ms: int  # when it answered, by its clock
    options: dict[str, str]
    is_suspended: bool
    subscriptions: list[ClientTopicView]
    queues: list[ClientQueueView]
    queue_count: int  # queues that it reads; may be more than ``queues`` lists
    leases: list[ClientLeasesView]
    sending: list[ClientSendingView]
    rates: list[ClientRatesView]
    rates_window_ms: int  # the time that they are of
    calls: list[ClientCallView]  # those that run longest, the oldest first
    call_count: int  # calls that run


@dataclass(frozen=True, slots=True)
class ClientStacksView:
    """The listener calls that run in a client, or its receives whose messages are in work."""

    client_id: str
    group: str
    role: str
    call_count: int
    calls: list[ClientCallView]  # those that run longest, the oldest first


@dataclass(frozen=True, slots=True)
class ListenerResultView:
    """How a client's listener has consumed a message that it was asked to."""

    message_id: str
    group: str
    client_id: str
    verdict: str  # success, later or exception
    text: str  # of an exception its traceback, of later what the listener returned
    spent_ms: int
    is_orderly: bool


@dataclass(frozen=True, slots=True)
class QueueProgressView:
    """How far a group has come in one queue."""

    topic: str
    broker_group: str
    queue_id: int
    generation: int
    committed_offset: int | None  # None: never committed here
    committed_generation: int | None
    min_offset: int
    max_offset: int
    lag_count: int | None  # messages from the committed offset on; None: never committed here


@dataclass(frozen=True, slots=True)
class GroupProgressView:
    """A consumer group: its members, and its progress in each queue."""

    group: str
    members: list[GroupMemberView]
    queues: list[QueueProgressView]
    lag_count: int  # sum over the queues with a committed offset


@dataclass(frozen=True, slots=True)
class GroupTopicView:
    """A consumer group in one topic."""

    topic: str
    broker_groups: list[str]
    queue_count: int
    new_queue_count: int  # of these, queues in which it has not committed
    member_count: int  # live members that read the topic
    lag_count: int


@dataclass(frozen=True, slots=True)
class GroupReportView:
    """A consumer group at a glance."""

    group: str
    members: list[GroupMemberView]
    disagreement: str  # what members do not have in common and should; empty: nothing
    changed_ids: str  # why client ids seem to change at restarts; empty: they do not
    topics: list[GroupTopicView]
    settings: list[GroupSettingsView]
    lag_count: int


@dataclass(frozen=True, slots=True)
class QueueResetView:
    """A group in one queue that it was reset in. ``before`` None: it had never committed."""

    broker_group: str
    topic: str
    queue_id: int
    before: int | None
    after: int
    done: bool  # False: it would be


@dataclass(frozen=True, slots=True)
class ForgottenView:
    """A group that has left a topic, at one broker group."""

    group: str
    topic: str
    broker_group: str
    queue_count: int  # in which it had a place


@dataclass(frozen=True, slots=True)
class SentView:
    """Where a message was stored."""

    message_id: str
    topic: str
    broker_group: str
    queue_id: int
    queue_offset: int
    generation: int
    store_time_ms: int


@dataclass(frozen=True, slots=True)
class MessageView:
    """A stored message."""

    message_id: str
    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    tag: str
    keys: list[str]
    properties: dict[str, str]  # all but tag and keys
    flag: int
    born_time_ms: int
    born_host: str
    store_time_ms: int
    store_host: str
    reconsume_times: int
    unique_id: str
    compressed: bool  # by the producer; the body is shown as it was before, where it can be
    body_bytes: int
    body_text: str | None  # None: not UTF-8
    body_base64: str = field(repr=False)
    withheld: bool = False  # it waits, and no client may read its content


@dataclass(frozen=True, slots=True)
class TraceEventView:
    """Something that happened to a message."""

    time_ms: int | None  # by the clock of the process that recorded it; None: not known
    event: str
    message_id: str  # the unique id, where it has one
    topic: str = ""
    group: str = ""  # of consumers, or of producers of a transaction
    client: str = ""  # address, if a trace record has it
    result: str = ""
    cost_ms: int | None = None
    detail: str = ""
    source: str = "store"  # or "trace", "offsets"


@dataclass(frozen=True, slots=True)
class DeadLetterView:
    """A message that a group gave up."""

    broker_group: str
    offset: int
    topic: str  # that it was sent to
    unique_id: str
    keys: list[str]
    tries: int
    store_time_ms: int  # when it was given up
    resent: bool  # it was sent to its group again
    body_bytes: int
    body: str  # how it begins, if it is text


@dataclass(frozen=True, slots=True)
class HalfView:
    """A message of a transaction that has no end."""

    broker_group: str
    offset: int  # among the open half messages, or among those that were given up
    producer_group: str
    topic: str  # that it is meant for
    queue_id: int
    unique_id: str  # the transaction id
    keys: list[str]
    store_time_ms: int
    check_count: int | None  # None: it was given up
    producer_count: int | None  # that can be asked; None: it was given up
    is_given_up: bool
    body_bytes: int
    body: str  # how it begins, if it is text


@dataclass(frozen=True, slots=True)
class HalvesChangedView:
    """What `transaction resume` or `transaction drop` did."""

    done_count: int
    done_before_count: int  # left out: they were resumed before


@dataclass(frozen=True, slots=True)
class ResentView:
    """What `dlq resend` did."""

    group: str
    resent_count: int
    resent_before_count: int  # left out: they were sent again before


@dataclass(frozen=True, slots=True)
class MessagesResentView:
    """What `message resend` did, or would do."""

    topic: str
    group: str  # that got them; empty: the topic did
    resent_count: int
    resent_before_count: int  # left out: they were sent again before, or are copies
    done: bool  # False: a dry run


@dataclass(frozen=True, slots=True)
class DelayedView:
    """A message that waits for a time of its own."""

    due_time_ms: int
    topic: str
    broker_group: str
    queue_id: int
    message_id: str
    unique_id: str
    store_time_ms: int
    size_bytes: int
    recall_handle: str


@dataclass(frozen=True, slots=True)
class DelayedCountView:
    """How many messages wait."""

    broker_group: str
    of: str  # a topic, or within how long from now
    count: int


@dataclass(frozen=True, slots=True)
class RecalledView:
    """What became of a recall."""

    broker_group: str
    topic: str
    unique_id: str
    due_time_ms: int
    recalled: bool  # False: it was too late


@dataclass(frozen=True, slots=True)
class PurgedView:
    """Dead letters that were deleted."""

    group: str
    broker_group: str


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process of the local cluster."""

    name: str
    kind: str  # namesrv or broker
    alive: bool
    pid: int
    address: str
    internal_address: str
    metrics_address: str
    log: str  # file


@dataclass(frozen=True, slots=True)
class LocalView:
    """The local cluster of a folder."""

    directory: str
    namesrv: str  # what --namesrv takes; empty = nothing is up
    internal_secret_file: str  # what --internal-secret-file takes; empty = it has none
    processes: list[ProcessView]


@dataclass(frozen=True, slots=True)
class StoppedView:
    """What `local down` did."""

    directory: str
    stopped_count: int
    purged: bool


@dataclass(frozen=True, slots=True)
class StoreView:
    """What lies in a store's folder. The parts are those of docs/format/store-layout.md."""

    directory: str
    in_use_or_crashed: bool  # a broker has it open, or the last stop was not clean
    identity: dict[str, object] | None  # None: not our store
    checkpoint: dict[str, object]
    epochs: list[dict[str, object]]
    log: dict[str, object]  # with --scan also what reading every record shows
    index: dict[str, object]
    complaints: list[str]  # files that do not belong in the log's folder
    queues: list[StoreQueueView]


@dataclass(frozen=True, slots=True)
class LogFileView:
    """A file of the log."""

    path: str
    start: int
    size_bytes: int
    disk_bytes: int
    first_store_time_ms: int


@dataclass(frozen=True, slots=True)
class PlaceView:
    """A place of the log."""

    path: str
    log_offset: int
    kind: str  # record, blank (an end mark), end (nothing was written), bad
    size_bytes: int
    reason: str  # why it is no good record
    goes_on: int  # log offset of what comes next; -1: nothing good does
    record: RecordView | None


@dataclass(frozen=True, slots=True)
class FaultView:
    """Something of a store that is not as it should be."""

    area: str  # log, queue, index or file
    path: str
    position: int | None
    what: str


@dataclass(frozen=True, slots=True)
class VerifiedView:
    """What `store verify` found."""

    directory: str
    log_start: int
    log_end: int
    end_reason: str
    record_count: int
    lost_bytes: int
    queue_count: int
    unit_count: int
    index_entry_count: int
    seconds: float
    faults: list[FaultView]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class LossView:
    """Messages of a queue that are gone."""

    topic: str
    queue_id: int
    first_queue_offset: int
    message_count: int
    log_offset: int


@dataclass(frozen=True, slots=True)
class RepairedView:
    """What `store repair` did."""

    directory: str
    actions: list[str]
    losses: list[LossView]
    log_start: int
    log_end: int
    record_count: int
    queue_count: int
    index_entry_count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreQueueView:
    """A queue as its files show it."""

    topic: str
    queue_id: int
    min_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record of the log."""

    log_offset: int
    size_bytes: int
    topic: str
    queue_id: int
    queue_offset: int
    store_time_ms: int
    tag: str
    keys: list[str]
    body_bytes: int


@dataclass(frozen=True, slots=True)
class UnitView:
    """A unit of a queue: it points at a record of the log."""

    queue_offset: int
    log_offset: int
    size_bytes: int
    tags_code: int
