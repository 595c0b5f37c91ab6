"""Options of a member of a broker group. ``services.broker`` and ``services.haslave`` read the same
ones.

RocketMQ's names in snake_case where it has the option (milliseconds there, as in RocketMQ); our own
carry the unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from cometmq.config import MIB, ServiceConfig, about
from cometmq.errors import ConfigInvalid
from cometmq.format.delayed import DEFAULT_LEVELS, DELAY_S_MAX, parse_levels
from cometmq.member.lease_place import place_of
from cometmq.messaging.transactions import CheckRules
from cometmq.model import (
    BROKER_GROUP_NAME,
    BROKER_GROUP_NAME_LENGTH_MAX,
    MESSAGE_BODY_BYTES_MAX,
    QUEUES_PER_TOPIC_MAX,
    FlushMode,
    ReplicationMode,
    TopicConfig,
)
from cometmq.names import check_cluster
from cometmq.rpc.addresses import parse_addresses

# One is being written, the next is ready, one is left to read: below that a quota would be full
# whatever went.
QUOTA_LOG_FILES_MIN = 5
_POD_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")


class PromoteAsync(Enum):
    """Whether asynchronous groups fail over by themselves."""

    BOUNDED = "bounded"
    NEVER = "never"


class FlushDiskType(Enum):
    """RocketMQ's names for the flush mode that new topics get."""

    ASYNC_FLUSH = FlushMode.ASYNC
    SYNC_FLUSH = FlushMode.SYNC


@dataclass(frozen=True, kw_only=True)
class MemberConfig(ServiceConfig):
    """All options of a member."""

    broker_group: str = field(
        default="broker-a",
        metadata=about(
            "Name of the broker group (RocketMQ's broker name), or room@name.",
            rocketmq="brokerName",
        ),
    )
    cluster: str = field(
        default="DefaultCluster",
        metadata=about("Name of the cluster.", rocketmq="brokerClusterName"),
    )
    member_id: int = field(
        default=0,
        metadata=about(
            "Number of this member within its group.", minimum=0, maximum=1_000, rocketmq="brokerId"
        ),
    )
    namesrv: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Name servers, host:port;host:port. None: the member registers nowhere.",
            rocketmq="namesrvAddr",
        ),
    )
    store_path: Path = field(
        default=Path("store"),
        metadata=about(
            "Folder of the store. The member makes a missing one.", rocketmq="storePathRootDir"
        ),
    )
    port: int = field(
        default=10911,
        metadata=about(
            "Port for clients; 0 = any free one.", minimum=0, maximum=65_535, rocketmq="listenPort"
        ),
    )
    internal_port: int = field(
        default=10912,
        metadata=about(
            "Port for replication and administration; 0 = any free one.", minimum=0, maximum=65_535
        ),
    )
    advertised_host: str = field(
        default="",
        metadata=about("Host that clients connect to; empty = listen_host.", rocketmq="brokerIP1"),
    )
    internal_secret_file: Path | None = field(
        default=None,
        metadata=about(
            "File with the cluster's secret, of several one a line. Callers of the "
            "internal port must prove that they know one; this process proves it to the "
            "processes it calls. None: the internal port serves every caller."
        ),
    )

    # --- topics and groups ---
    auto_create_topic_enable: bool = field(
        default=False,
        metadata=about(
            "Create a topic at the first message sent to it.", rocketmq="autoCreateTopicEnable"
        ),
    )
    trace_topic_enable: bool = field(
        default=False,
        metadata=about(
            "Make the topic RMQ_SYS_TRACE_TOPIC at the start, for trace records of clients.",
            rocketmq="traceTopicEnable",
        ),
    )
    auto_create_subscription_group: bool = field(
        default=True,
        metadata=about(
            "Create a consumer group when its first member joins.",
            rocketmq="autoCreateSubscriptionGroup",
        ),
    )
    default_topic_queue_nums: int = field(
        default=8,
        metadata=about(
            "Queues of a new topic.",
            minimum=1,
            maximum=QUEUES_PER_TOPIC_MAX,
            rocketmq="defaultTopicQueueNums",
        ),
    )
    flush_disk_type: FlushDiskType | None = field(
        default=None,
        metadata=about(
            "Flush mode of new topics. None: SYNC_FLUSH; with a transient store pool ASYNC_FLUSH.",
            rocketmq="flushDiskType",
        ),
    )
    topics_max: int = field(
        default=10_000, metadata=about("Topics on this member.", minimum=1, maximum=100_000)
    )
    groups_max: int = field(
        default=10_000,
        metadata=about("Consumer groups on this member.", minimum=1, maximum=100_000),
    )
    group_creations_per_peer_max: int = field(
        default=500,
        metadata=about(
            "Consumer groups that one address may create at once, by joining or committing.",
            minimum=1,
            maximum=100_000,
        ),
    )
    group_creation_interval_s: float = field(
        default=5.0,
        metadata=about(
            "Time after which an address at that limit may create one more group.",
            unit="s",
            minimum=0.001,
            maximum=86_400,
        ),
    )
    topic_creations_per_peer_max: int = field(
        default=500,
        metadata=about(
            "Topics that one address may create at once by sending to them.",
            minimum=1,
            maximum=100_000,
        ),
    )
    topic_creation_interval_s: float = field(
        default=5.0,
        metadata=about(
            "Time after which an address at that limit may create one more topic.",
            unit="s",
            minimum=0.001,
            maximum=86_400,
        ),
    )
    streams_per_peer_max: int = field(
        default=5_000,
        metadata=about(
            "Send streams, and memberships in groups, that one address may have open.",
            minimum=1,
            maximum=100_000,
        ),
    )

    # --- sending ---
    max_message_size: int = field(
        default=MESSAGE_BODY_BYTES_MAX,
        metadata=about(
            "Largest body.",
            unit="bytes",
            minimum=1,
            maximum=MESSAGE_BODY_BYTES_MAX,
            rocketmq="maxMessageSize",
        ),
    )
    send_in_flight_bytes_max: int = field(
        default=64 * MIB,
        metadata=about(
            "Bytes of the batches that wait for replication, and separately of those that"
            " wait for the disk; above it FLOW_CONTROL.",
            unit="bytes",
            minimum=MIB,
        ),
    )
    sync_flush_timeout: int = field(
        default=5_000,
        metadata=about(
            "Time after which a batch that waits for the disk is answered FLUSH_DISK_TIMEOUT.",
            unit="ms",
            minimum=1,
            rocketmq="syncFlushTimeout",
        ),
    )

    message_delay_level: str = field(
        default=DEFAULT_LEVELS,
        metadata=about(
            "Times of the delay levels from 1 on, at most 64; the same for all members. Add levels"
            " at the end: messages that wait keep their level.",
            rocketmq="messageDelayLevel",
        ),
    )
    timer_max_delay_sec: int = field(
        default=3 * 86_400,
        metadata=about(
            "The longest time that a message may wait for a time of its own; the same for all"
            " members.",
            unit="s",
            minimum=1,
            maximum=DELAY_S_MAX,
            rocketmq="timerMaxDelaySec",
        ),
    )
    timer_messages_per_second_max: int = field(
        default=0,
        metadata=about(
            "Messages that may wait for the same second; above it FLOW_CONTROL. 0: no limit.",
            unit="messages",
            minimum=0,
            rocketmq="timerCongestNumEachSlot",
        ),
    )

    # --- transactions ---
    transaction_time_out: int = field(
        default=6_000,
        metadata=about(
            "How old a half message is before its producers are asked about it, unless it says"
            " otherwise.",
            unit="ms",
            minimum=0,
            maximum=3_600_000,
            rocketmq="transactionTimeOut",
        ),
    )
    transaction_check_interval: int = field(
        default=30_000,
        metadata=about(
            "How long the producers of a half message have to answer before they are asked again.",
            unit="ms",
            minimum=1_000,
            maximum=3_600_000,
            rocketmq="transactionCheckInterval",
        ),
    )
    transaction_check_max: int = field(
        default=15,
        metadata=about(
            "How often the producers are asked before a half message is given up.",
            unit="checks",
            minimum=1,
            maximum=10_000,
            rocketmq="transactionCheckMax",
        ),
    )

    # --- reading ---
    catch_up_bytes_per_s: int = field(
        default=64 * MIB,
        metadata=about(
            "While producers send, consumers far behind together read at this rate, or at"
            " twice the incoming rate if that is more. 0: no limit.",
            unit="bytes",
            minimum=0,
        ),
    )
    slave_read_enable: bool = field(
        default=False,
        metadata=about(
            "The writer sends consumers that are far behind to a follower, as their "
            "group's settings say. A follower answers pulls with or without it.",
            rocketmq="slaveReadEnable",
        ),
    )
    access_message_in_memory_max_ratio: float = field(
        default=40.0,
        metadata=about(
            "A consumer is far behind when it lags by more than this part of the memory.",
            unit="%",
            minimum=0,
            maximum=100,
            rocketmq="accessMessageInMemoryMaxRatio",
        ),
    )

    # --- store ---
    mapped_file_size_commit_log: int = field(
        default=1024 * MIB,
        metadata=about(
            "Size of a commit log file.",
            unit="bytes",
            minimum=64 * 1024,
            rocketmq="mappedFileSizeCommitLog",
        ),
    )
    mapped_file_size_consume_queue: int = field(
        default=6_000_000,
        metadata=about(
            "Size of a consume queue file, a multiple of 20.",
            unit="bytes",
            minimum=20,
            rocketmq="mappedFileSizeConsumeQueue",
        ),
    )
    mapped_file_size_timer_log: int = field(
        default=100 * MIB,
        metadata=about(
            "Size of the file in which a clean stop lists for RocketMQ 5 which timers wait.",
            unit="bytes",
            minimum=4096,
            maximum=2**31 - 1,
            rocketmq="mappedFileSizeTimerLog",
        ),
    )
    message_index_enable: bool = field(
        default=True,
        metadata=about(
            "Keep the key index, by which messages are found by key and unique id.",
            rocketmq="messageIndexEnable",
        ),
    )
    max_hash_slot_num: int = field(
        default=5_000_000,
        metadata=about(
            "Hash slots of an index file, 4 bytes each.",
            minimum=1,
            maximum=2_147_483_647,
            rocketmq="maxHashSlotNum",
        ),
    )
    max_index_num: int = field(
        default=20_000_000,
        metadata=about(
            "Entries of an index file, 20 bytes each; the first is never used.",
            minimum=2,
            maximum=2_147_483_647,
            rocketmq="maxIndexNum",
        ),
    )
    open_files_max: int = field(
        default=4_096, metadata=about("Store files held open at a time.", minimum=16)
    )
    flush_interval_commit_log: int = field(
        default=500,
        metadata=about(
            "Time between syncs of the log.",
            unit="ms",
            minimum=1,
            rocketmq="flushIntervalCommitLog",
        ),
    )
    flush_commit_log_least_pages: int = field(
        default=4,
        metadata=about(
            "Pages (4 KiB) that an interval sync waits for.",
            minimum=0,
            rocketmq="flushCommitLogLeastPages",
        ),
    )
    flush_commit_log_thorough_interval: int = field(
        default=10_000,
        metadata=about(
            "Time after which the log is synced even with fewer pages.",
            unit="ms",
            minimum=1,
            rocketmq="flushCommitLogThoroughInterval",
        ),
    )
    transient_store_pool_enable: bool = field(
        default=False,
        metadata=about(
            "Keep appends in private memory and write them later. Faster for many small "
            "batches; what waits there is lost when the process dies, acknowledged or "
            "not.",
            rocketmq="transientStorePoolEnable",
        ),
    )
    transient_store_pool_bytes_max: int = field(
        default=64 * MIB,
        metadata=about(
            "Size of the transient store pool; the member writes what exceeds it at once.",
            unit="bytes",
            minimum=MIB,
            rocketmq="transientStorePoolSize (in buffers)",
        ),
    )
    commit_interval_commit_log: int = field(
        default=200,
        metadata=about(
            "Longest time that an append stays in the transient store pool.",
            unit="ms",
            minimum=1,
            maximum=10_000,
            rocketmq="commitIntervalCommitLog",
        ),
    )
    flush_interval_consume_queue: int = field(
        default=1_000,
        metadata=about(
            "Time between syncs of the queues.",
            unit="ms",
            minimum=10,
            rocketmq="flushIntervalConsumeQueue",
        ),
    )
    flush_consumer_offset_interval: int = field(
        default=5_000,
        metadata=about(
            "Time between exports of config/*.json, if they changed.",
            unit="ms",
            minimum=100,
            rocketmq="flushConsumerOffsetInterval",
        ),
    )
    offset_record_interval_s: float = field(
        default=1.0,
        metadata=about(
            "Time between checks whether a state snapshot is due, and between attempts to"
            " write commits that a full disk refused.",
            unit="s",
            minimum=0.01,
        ),
    )
    message_dedup_enable: bool = field(
        default=True,
        metadata=about("Whether a batch that a producer sends again is stored once."),
    )
    state_copy_interval_bytes: int = field(
        default=1024 * MIB,
        metadata=about("Log bytes between two state snapshots.", unit="bytes", minimum=MIB),
    )

    # --- retention ---
    file_reserved_time: int = field(
        default=72,
        metadata=about(
            "How long messages are kept.",
            unit="h",
            minimum=1,
            maximum=1_000_000,
            rocketmq="fileReservedTime",
        ),
    )
    delete_when: tuple[str, ...] = field(
        default=("04",),
        metadata=about(
            "Hours of the local day at which expired log files are removed, e.g. 02;14. A"
            " filling disk does not wait for them.",
            rocketmq="deleteWhen",
        ),
    )
    disk_max_used_space_ratio: float = field(
        default=75.0,
        metadata=about(
            "Above it expired log files are removed at any hour.",
            unit="%",
            minimum=1,
            maximum=99,
            rocketmq="diskMaxUsedSpaceRatio",
        ),
    )
    disk_space_clean_forcibly_ratio: float = field(
        default=85.0,
        metadata=about(
            "Above it the oldest log files are removed, expired or not.",
            unit="%",
            minimum=1,
            maximum=99,
            rocketmq="diskSpaceCleanForciblyRatio",
        ),
    )
    disk_space_warning_level_ratio: float = field(
        default=90.0,
        metadata=about(
            "Above it the writer refuses sends until there is room again.",
            unit="%",
            minimum=2,
            maximum=99,
            rocketmq="diskSpaceWarningLevelRatio",
        ),
    )
    store_quota_bytes: int = field(
        default=0,
        metadata=about(
            "Size of the store on a shared volume; the ratios above then also count of "
            "it. 0: the whole volume.",
            unit="bytes",
            minimum=0,
        ),
    )
    drop_waiting_when_full_s: float = field(
        default=0.0,
        metadata=about(
            "A writer whose store is full refuses sends while messages that wait for their time or "
            "their end keep its oldest log files. After so long it drops these messages instead; "
            "they are lost. 0: never.",
            minimum=0,
            maximum=86_400,
        ),
    )
    clean_resource_interval: int = field(
        default=10_000,
        metadata=about(
            "Time between two checks for log files to remove.",
            unit="ms",
            minimum=10,
            rocketmq="cleanResourceInterval",
        ),
    )
    delete_file_batch_max: int = field(
        default=10,
        metadata=about(
            "Log files removed in one check.",
            minimum=1,
            maximum=1_000,
            rocketmq="deleteFileBatchMax",
        ),
    )
    delete_commit_log_files_interval: int = field(
        default=100,
        metadata=about(
            "Time between the removals of two log files.",
            unit="ms",
            minimum=0,
            rocketmq="deleteCommitLogFilesInterval",
        ),
    )
    destroy_mapped_file_interval_forcibly: int = field(
        default=120_000,
        metadata=about(
            "How long a reader may keep a log file from its removal.",
            unit="ms",
            minimum=0,
            rocketmq="destroyMapedFileIntervalForcibly",
        ),
    )

    # --- role ---
    lease: str = field(
        default="",
        metadata=about(
            "Where the group's lease is: file:///path or kubernetes://namespace/name, the"
            " same for all members. Empty: this member always writes."
        ),
    )
    lease_duration_s: float = field(
        default=6.0,
        metadata=about(
            "How long a lease must go without renewal before another member may take it.",
            unit="s",
            minimum=0.1,
        ),
    )
    lease_renew_s: float = field(
        default=2.0, metadata=about("Time between renewals of the lease.", unit="s", minimum=0.05)
    )
    clock_skew_s_max: float = field(
        default=2.0,
        metadata=about(
            "A member whose clock differs by more from what most clocks of the cluster show takes "
            "the lease only when no other can; messages are due by what most show.",
            unit="s",
            minimum=0.1,
        ),
    )
    lease_poll_s: float = field(
        default=0.5,
        metadata=about("Time between a follower's reads of the lease.", unit="s", minimum=0.02),
    )
    hand_over_at_stop: bool = field(
        default=True,
        metadata=about(
            "A writer that gets SIGTERM first hands its role to a follower that has caught up."
        ),
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "All members of the group, id@host:internal_port;... They ask each other "
            "before they continue after a lost lease, or after all machines failed. None: an"
            " operator decides."
        ),
    )

    # --- Kubernetes ---
    pod_name: str = field(
        default="",
        metadata=about(
            "The pod of this process: the holder's name in a Lease of Kubernetes. Empty: none."
        ),
    )
    pod_uid: str = field(
        default="", metadata=about("The uid of that pod, by which `kubectl describe` finds events.")
    )
    pod_events_enable: bool = field(
        default=True,
        metadata=about(
            "Write events about the pod: changes of the writer and of the in-sync set, refused "
            "sends, failed hand-overs."
        ),
    )
    pod_role_label_enable: bool = field(
        default=True, metadata=about("Keep the role as the label cometmq.io/role of the pod.")
    )

    # --- replication ---
    replication_mode: ReplicationMode | None = field(
        default=None,
        metadata=about(
            "Replication mode of new topics: which copies an acknowledgement waits for. None: "
            "APPENDED in a group with followers, else ASYNC; with a transient store pool ASYNC.",
            rocketmq="brokerRole",
        ),
    )
    min_in_sync_replicas: int = field(
        default=1,
        metadata=about(
            "Members, this one included, that must be in sync; with fewer, the writer "
            "refuses sends to topics that wait for copies.",
            minimum=1,
            maximum=16,
            rocketmq="minInSyncReplicas",
        ),
    )
    in_sync_lag_s_max: float = field(
        default=3.0,
        metadata=about(
            "A follower that was not fully caught up for so long leaves the in-sync set.",
            unit="s",
            minimum=0.1,
            rocketmq="haMaxTimeSlaveNotCatchup (ms)",
        ),
    )
    in_sync_ready_wait_s: float = field(
        default=3_600.0,
        metadata=about(
            "A follower outside of the in-sync set is not ready for health checks, for so long at "
            "most; 0 = it is ready all the same.",
            unit="s",
            minimum=0.0,
        ),
    )
    slave_timeout: int = field(
        default=3_000,
        metadata=about(
            "Time after which a batch that waits for replication is answered FLUSH_SLAVE_TIMEOUT.",
            unit="ms",
            minimum=1,
            rocketmq="slaveTimeout",
        ),
    )
    promote_async: PromoteAsync = field(
        default=PromoteAsync.BOUNDED,
        metadata=about(
            "Whether a follower may take over in a group without topics that wait for "
            "copies: messages that it lacks are then lost."
        ),
    )
    async_promote_lag_max: int = field(
        default=64 * MIB,
        metadata=about("How far behind such a follower may be.", unit="bytes", minimum=0),
    )
    async_promote_silence_max: float = field(
        default=5.0,
        metadata=about(
            "How long such a follower may have been silent to the writer.", unit="s", minimum=0.1
        ),
    )
    copy_bytes_per_s: int = field(
        default=64 * MIB,
        metadata=about(
            "While producers send, followers far behind together get this rate, or twice "
            "the incoming rate if that is more. 0: no limit.",
            unit="bytes",
            minimum=0,
        ),
    )

    # --- process ---
    register_namesrv_period: int = field(
        default=30_000,
        metadata=about(
            "Time between registrations.",
            unit="ms",
            minimum=1_000,
            maximum=60_000,
            rocketmq="registerNameServerPeriod",
        ),
    )
    cpu_affinity: tuple[str, ...] = field(
        default=(), metadata=about("CPUs of this process, e.g. 0;1. None: the system decides.")
    )

    @property
    def transient_bytes_max(self) -> int:
        """Bytes of the transient store pool; 0 without one."""
        return self.transient_store_pool_bytes_max if self.transient_store_pool_enable else 0

    @property
    def has_followers(self) -> bool:
        """Whether other members copy this one's log. The options say so, not who is connected now:
        a topic that is made while a follower is away must wait for it later.
        """
        return bool(self.lease) and len(self.peers) != 1

    @property
    def new_topic(self) -> TopicConfig:
        """What a new topic gets where a request says nothing; the name is missing. The only place
        that decides the durability of new topics.
        """
        is_in_memory = self.transient_store_pool_enable
        flush, copies = FlushMode.SYNC, ReplicationMode.APPENDED
        if is_in_memory:
            flush = FlushMode.ASYNC
        if is_in_memory or not self.has_followers:
            copies = ReplicationMode.ASYNC
        return TopicConfig(
            "",
            self.default_topic_queue_nums,
            self.default_topic_queue_nums,
            flush_mode=self.flush_disk_type.value if self.flush_disk_type else flush,
            replication_mode=self.replication_mode or copies,
        )

    def __post_init__(self) -> None:
        _check_broker_group(self.broker_group)
        check_cluster(self.cluster)
        if self.namesrv:
            parse_addresses(self.namesrv)
        self.delay_levels_s()
        if self.mapped_file_size_consume_queue % 20:
            raise ConfigInvalid("option mapped_file_size_consume_queue: must be a multiple of 20")
        if self.transient_store_pool_enable and self.flush_disk_type is FlushDiskType.SYNC_FLUSH:
            raise ConfigInvalid(
                "option transient_store_pool_enable: keeps in memory what flush_disk_type "
                "SYNC_FLUSH wants on the disk; use one of the two"
            )
        if not all(cpu.isdecimal() for cpu in self.cpu_affinity):
            raise ConfigInvalid("option cpu_affinity: CPU numbers, such as 0;1")
        if (
            self.transient_store_pool_enable
            and (self.replication_mode or 0) > ReplicationMode.ASYNC
        ):
            raise ConfigInvalid(
                "option transient_store_pool_enable: what it keeps in memory is not there for "
                "followers; use it with replication_mode ASYNC only"
            )
        self._check_lease()
        self._check_group()
        self._check_retention()

    def _check_group(self) -> None:
        """What a lease and the members by name make possible, and what they do not."""
        if self.min_in_sync_replicas > 1 and not self.lease:
            raise ConfigInvalid(
                "option min_in_sync_replicas: without the option lease there are no followers; "
                "set lease, or leave it at 1"
            )
        if not self.peers:
            return
        if not self.lease and len(self.peers) > 1:
            raise ConfigInvalid(
                "option peers: without the option lease there are no followers; set lease, or "
                "leave the others out"
            )
        if self.min_in_sync_replicas > len(self.peers):
            raise ConfigInvalid(
                f"option min_in_sync_replicas: {self.min_in_sync_replicas} can never be in sync, "
                f"peers names {len(self.peers)} members; lower it, or name all members there"
            )
        if self.lease:
            self._check_own_peer()

    def _check_own_peer(self) -> None:
        # A host has many names. The port has one number, by which this member has itself called.
        own = self._addresses().get(self.member_id)
        if own is None:
            raise ConfigInvalid(f"option peers: this member, {self.member_id}, is not among them")
        if int(own.rpartition(":")[2]) != self.internal_port:
            raise ConfigInvalid(
                f"option peers: this member's own entry, {self.member_id}@{own}, has not its "
                f"internal_port {self.internal_port}; correct the one that is wrong"
            )

    def _check_lease(self) -> None:
        if self.lease_renew_s >= self.lease_duration_s:
            raise ConfigInvalid("option lease_renew_s must be below lease_duration_s")
        if self.lease_poll_s > self.lease_duration_s:
            raise ConfigInvalid("option lease_poll_s must not be above lease_duration_s")
        if self.lease:
            place_of(self.lease)  # before a recovery, not after it
        if self.pod_name and not _POD_NAME.fullmatch(self.pod_name):
            raise ConfigInvalid(f"option pod_name: {self.pod_name!r} is no name of a pod")

    def delay_levels_s(self) -> tuple[int, ...]:
        """The times of the delay levels from 1 on, in seconds."""
        return parse_levels(self.message_delay_level)

    def check_rules(self) -> CheckRules:
        """When the producers of half messages are asked about them."""
        return CheckRules(
            self.transaction_time_out / 1000,
            self.transaction_check_interval / 1000,
            self.transaction_check_max,
        )

    def peer_addresses(self) -> dict[int, str] | None:
        """Internal addresses of the group's other members, by id; None: they are not configured."""
        if not self.peers:
            return None
        return {
            number: address
            for number, address in self._addresses().items()
            if number != self.member_id
        }

    def _addresses(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for peer in self.peers:
            number, _, address = peer.partition("@")
            if not number.isdecimal() or not address or int(number) in found:
                raise ConfigInvalid(f"option peers: {peer!r} is not id@host:port, each id once")
            parse_addresses((address,))
            if address in found.values():
                raise ConfigInvalid(f"option peers: two members have the address {address}")
            found[int(number)] = address
        return found

    def _check_retention(self) -> None:
        if not all(hour.isdecimal() and int(hour) < 24 for hour in self.delete_when):
            raise ConfigInvalid("option delete_when: hours from 00 to 23, such as 02;14")
        ratios = (
            self.disk_max_used_space_ratio,
            self.disk_space_clean_forcibly_ratio,
            self.disk_space_warning_level_ratio,
        )
        if list(ratios) != sorted(ratios):
            raise ConfigInvalid(
                "option disk_max_used_space_ratio must not be above disk_space_clean_forcibly_ratio"
                ", nor that above disk_space_warning_level_ratio"
            )
        least = QUOTA_LOG_FILES_MIN * self.mapped_file_size_commit_log
        if 0 < self.store_quota_bytes < least:
            raise ConfigInvalid(
                f"option store_quota_bytes: must be 0 or at least {least}, "
                f"{QUOTA_LOG_FILES_MIN} log files"
            )


def _check_broker_group(name: str) -> None:
    # Message ids have it before a slash.
    if not BROKER_GROUP_NAME.fullmatch(name):
        raise ConfigInvalid(
            f"option broker_group: {name[:200]!r} is not a name of at most "
            f"{BROKER_GROUP_NAME_LENGTH_MAX} characters of %|a-zA-Z0-9_-, or two with @ between "
            "them, the room and the name"
        )
