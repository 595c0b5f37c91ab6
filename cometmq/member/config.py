"""Options of a member of a broker group. ``services.broker`` and ``services.haslave`` read the same
ones.

RocketMQ's names in snake_case where it has the option (milliseconds there, as in RocketMQ); our own
carry the unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from cometmq.config import MIB, ServiceConfig, about
from cometmq.errors import ConfigInvalid, TopicNameInvalid
from cometmq.member.leaseplace import place_of
from cometmq.messaging.topics import check_name
from cometmq.model import MESSAGE_BODY_BYTES_MAX, QUEUES_PER_TOPIC_MAX, FlushMode, ReplicationMode
from cometmq.rpc.channels import parse_addresses

# One is being written, the next is ready, one is left to read: below that a quota would be full
# whatever went.
QUOTA_LOG_FILES_MIN = 5


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
        default="broker-a", metadata=about("Name of the broker group (RocketMQ's broker name).")
    )
    cluster: str = field(default="DefaultCluster", metadata=about("Name of the cluster."))
    member_id: int = field(
        default=0,
        metadata=about("Number of this member within its group.", minimum=0, maximum=1_000),
    )
    namesrv: tuple[str, ...] = field(
        default=(), metadata=about("Name servers, host:port;host:port. None: nobody is told of us.")
    )
    store_path: Path = field(
        default=Path("store"), metadata=about("Folder of the store; made when it is missing.")
    )
    port: int = field(
        default=10911,
        metadata=about("Port for clients; 0 = any free one.", minimum=0, maximum=65_535),
    )
    internal_port: int = field(
        default=10912,
        metadata=about("Port for administration; 0 = any free one.", minimum=0, maximum=65_535),
    )
    advertised_host: str = field(
        default="", metadata=about("Host that clients are told; empty = listen_host.")
    )
    internal_secret_file: Path | None = field(
        default=None,
        metadata=about(
            "File with the cluster's secret, of several one a line: who calls the internal port has"
            " to prove that it knows one, and so have the processes that are called from here."
            " None: anybody is served."
        ),
    )

    # --- topics and groups ---
    auto_create_topic_enable: bool = field(
        default=False, metadata=about("Create a topic at the first message sent to it.")
    )
    auto_create_subscription_group: bool = field(
        default=True, metadata=about("Create a consumer group when its first member joins.")
    )
    default_topic_queue_nums: int = field(
        default=8,
        metadata=about("Queues of a new topic.", minimum=1, maximum=QUEUES_PER_TOPIC_MAX),
    )
    flush_disk_type: FlushDiskType = field(
        default=FlushDiskType.ASYNC_FLUSH, metadata=about("Flush mode of new topics.")
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
            "Consumer groups that one address may make at once, by joining or committing.",
            minimum=1,
            maximum=100_000,
        ),
    )
    group_creation_interval_s: float = field(
        default=5.0,
        metadata=about(
            "Time after which an address that has made that many may make one more.",
            unit="s",
            minimum=0.001,
            maximum=86_400,
        ),
    )
    topic_creations_per_peer_max: int = field(
        default=500,
        metadata=about(
            "Topics that one address may make at once by sending to them.",
            minimum=1,
            maximum=100_000,
        ),
    )
    topic_creation_interval_s: float = field(
        default=5.0,
        metadata=about(
            "Time after which an address that has made that many may make one more.",
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
        metadata=about("Largest body.", unit="bytes", minimum=1, maximum=MESSAGE_BODY_BYTES_MAX),
    )
    send_in_flight_bytes_max: int = field(
        default=64 * MIB,
        metadata=about(
            "Bytes of all batches that wait for copies, and of all others that wait for their "
            "acknowledgement; above it FLOW_CONTROL.",
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
        ),
    )

    # --- reading ---
    catch_up_bytes_per_s: int = field(
        default=64 * MIB,
        metadata=about(
            "While producers send, consumers far behind together get this much, or twice what "
            "comes in when that is more. 0: as much as they can take.",
            unit="bytes",
        ),
    )
    slave_read_enable: bool = field(
        default=False,
        metadata=about(
            "Send consumers that are far behind to a follower, as their group's settings say. (A "
            "follower answers whoever comes, also without it.)"
        ),
    )
    access_message_in_memory_max_ratio: float = field(
        default=40.0,
        metadata=about(
            "Far behind is more of the log than this part of the memory.",
            unit="%",
            minimum=0,
            maximum=100,
        ),
    )

    # --- store ---
    mapped_file_size_commit_log: int = field(
        default=1024 * MIB,
        metadata=about("Size of a commit log file.", unit="bytes", minimum=64 * 1024),
    )
    mapped_file_size_consume_queue: int = field(
        default=6_000_000,
        metadata=about("Size of a consume queue file, a multiple of 20.", unit="bytes", minimum=20),
    )
    message_index_enable: bool = field(
        default=True,
        metadata=about("Keep the key index, by which messages are found by key and unique id."),
    )
    max_hash_slot_num: int = field(
        default=5_000_000,
        metadata=about(
            "Hash slots of an index file, 4 bytes each.", minimum=1, maximum=2_147_483_647
        ),
    )
    max_index_num: int = field(
        default=20_000_000,
        metadata=about(
            "Entries of an index file, 20 bytes each; the first is never used.",
            minimum=2,
            maximum=2_147_483_647,
        ),
    )
    open_files_max: int = field(
        default=4_096, metadata=about("Store files held open at a time.", minimum=16)
    )
    flush_interval_commit_log: int = field(
        default=500, metadata=about("Time between syncs of the log.", unit="ms", minimum=1)
    )
    flush_commit_log_least_pages: int = field(
        default=4,
        metadata=about("Pages (4 KiB) that make an interval sync worth while.", minimum=0),
    )
    flush_commit_log_thorough_interval: int = field(
        default=10_000,
        metadata=about("Time after which fewer pages are synced too.", unit="ms", minimum=1),
    )
    transient_store_pool_enable: bool = field(
        default=False,
        metadata=about(
            "Keep what is appended in private memory and write it later. Faster for many small "
            "batches; what waits there is lost when the process dies, acknowledged or not."
        ),
    )
    transient_store_pool_bytes_max: int = field(
        default=64 * MIB,
        metadata=about("What may wait there; more is written at once.", unit="bytes", minimum=MIB),
    )
    commit_interval_commit_log: int = field(
        default=200,
        metadata=about("Time after which it is written.", unit="ms", minimum=1, maximum=10_000),
    )
    flush_interval_consume_queue: int = field(
        default=1_000, metadata=about("Time between syncs of the queues.", unit="ms", minimum=10)
    )
    flush_consumer_offset_interval: int = field(
        default=5_000,
        metadata=about(
            "Time between exports of config/*.json, when changed.", unit="ms", minimum=100
        ),
    )
    offset_record_interval_s: float = field(
        default=1.0,
        metadata=about(
            "Time between looks whether a full copy of the state is due, and attempts to write "
            "commits that a full disk did not take.",
            unit="s",
            minimum=0.01,
        ),
    )
    state_copy_interval_bytes: int = field(
        default=1024 * MIB,
        metadata=about(
            "Log written between two full copies of the state.", unit="bytes", minimum=MIB
        ),
    )

    # --- retention ---
    file_reserved_time: int = field(
        default=72,
        metadata=about("How long messages are kept.", unit="h", minimum=1, maximum=1_000_000),
    )
    delete_when: tuple[str, ...] = field(
        default=("04",),
        metadata=about(
            "Hours of the local day at which expired log files go, e.g. 02;14. A disk that fills "
            "does not wait for them."
        ),
    )
    disk_max_used_space_ratio: float = field(
        default=75.0,
        metadata=about(
            "Above it expired log files go at any hour.", unit="%", minimum=1, maximum=99
        ),
    )
    disk_space_clean_forcibly_ratio: float = field(
        default=85.0,
        metadata=about(
            "Above it the oldest log files go, expired or not.", unit="%", minimum=1, maximum=99
        ),
    )
    disk_space_warning_level_ratio: float = field(
        default=90.0,
        metadata=about(
            "Above it sends are refused, until there is room again.",
            unit="%",
            minimum=2,
            maximum=99,
        ),
    )
    store_quota_bytes: int = field(
        default=0,
        metadata=about(
            "Room of the store on a volume that it shares: the ratios above count of it too. "
            "0: the whole volume.",
            unit="bytes",
            minimum=0,
        ),
    )
    clean_resource_interval: int = field(
        default=10_000, metadata=about("Time between two looks.", unit="ms", minimum=10)
    )
    delete_file_batch_max: int = field(
        default=10, metadata=about("Log files that go at one look.", minimum=1, maximum=1_000)
    )
    delete_commit_log_files_interval: int = field(
        default=100, metadata=about("Time between two log files that go.", unit="ms", minimum=0)
    )
    destroy_mapped_file_interval_forcibly: int = field(
        default=120_000,
        metadata=about("How long a log file that is read may stay for that.", unit="ms", minimum=0),
    )

    # --- role ---
    lease: str = field(
        default="",
        metadata=about(
            "Who writes: file:///path or kubernetes://namespace/name, the same for all members of "
            "the group. Empty: this member, always."
        ),
    )
    lease_duration_s: float = field(
        default=6.0,
        metadata=about(
            "How long a lease that nobody renews is waited for before another member takes it.",
            unit="s",
            minimum=0.1,
        ),
    )
    lease_renew_s: float = field(
        default=2.0, metadata=about("Time between renewals of the lease.", unit="s", minimum=0.05)
    )
    lease_poll_s: float = field(
        default=0.5,
        metadata=about("Time between looks of a follower at the lease.", unit="s", minimum=0.02),
    )
    hand_over_at_stop: bool = field(
        default=True,
        metadata=about(
            "A writer that is told to stop (SIGTERM) hands its role to a follower first, if one "
            "has caught up."
        ),
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "All members of the group, id@host:internal_port;... They are asked before a lost "
            "lease, or a group whose machines have all failed, goes on. None: an operator decides."
        ),
    )

    # --- replication ---
    replication_mode: ReplicationMode = field(
        default=ReplicationMode.ASYNC,
        metadata=about("Which copies messages of new topics wait for."),
    )
    min_in_sync_replicas: int = field(
        default=1,
        metadata=about(
            "Members, this one included, that must be in sync; with fewer, sends to topics that "
            "wait for copies are refused.",
            minimum=1,
            maximum=16,
        ),
    )
    in_sync_lag_s_max: float = field(
        default=3.0,
        metadata=about(
            "A follower that has not had everything for so long is waited for no more.",
            unit="s",
            minimum=0.1,
        ),
    )
    slave_timeout: int = field(
        default=3_000,
        metadata=about(
            "Time after which a batch that waits for copies is answered FLUSH_SLAVE_TIMEOUT.",
            unit="ms",
            minimum=1,
        ),
    )
    promote_async: PromoteAsync = field(
        default=PromoteAsync.BOUNDED,
        metadata=about(
            "Whether a follower may take over in a group none of whose topics waits for copies: "
            "what it does not have yet is then lost."
        ),
    )
    async_promote_lag_max: int = field(
        default=64 * MIB,
        metadata=about("How far behind it may be.", unit="bytes", minimum=0),
    )
    async_promote_silence_max: float = field(
        default=5.0,
        metadata=about("How long ago it may have been heard.", unit="s", minimum=0.1),
    )
    copy_bytes_per_s: int = field(
        default=64 * MIB,
        metadata=about(
            "While producers send, followers far behind together get this much, or twice what "
            "comes in when that is more. 0: as much as they can take.",
            unit="bytes",
            minimum=0,
        ),
    )

    # --- process ---
    register_namesrv_period: int = field(
        default=30_000,
        metadata=about("Time between registrations.", unit="ms", minimum=1_000, maximum=60_000),
    )
    cpu_affinity: tuple[str, ...] = field(
        default=(), metadata=about("CPUs of this process, e.g. 0;1. None: the system decides.")
    )

    @property
    def transient_bytes_max(self) -> int:
        """Bytes of the transient store pool; 0 without one."""
        return self.transient_store_pool_bytes_max if self.transient_store_pool_enable else 0

    def __post_init__(self) -> None:
        for name in ("broker_group", "cluster"):
            _check_name(name, getattr(self, name))
        if self.namesrv:
            parse_addresses(self.namesrv)
        if self.mapped_file_size_consume_queue % 20:
            raise ConfigInvalid("option mapped_file_size_consume_queue: must be a multiple of 20")
        if self.transient_store_pool_enable and self.flush_disk_type is FlushDiskType.SYNC_FLUSH:
            raise ConfigInvalid(
                "option transient_store_pool_enable: keeps in memory what flush_disk_type "
                "SYNC_FLUSH wants on the disk; use one of the two"
            )
        if not all(cpu.isdecimal() for cpu in self.cpu_affinity):
            raise ConfigInvalid("option cpu_affinity: CPU numbers, such as 0;1")
        if self.transient_store_pool_enable and self.replication_mode is not ReplicationMode.ASYNC:
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
                "option min_in_sync_replicas: without the option lease this member stands alone; "
                "set lease, or leave it at 1"
            )
        if not self.peers:
            return
        if not self.lease and len(self.peers) > 1:
            raise ConfigInvalid(
                "option peers: without the option lease this member stands alone; set lease, or "
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
                raise ConfigInvalid(f"option peers: {address} stands there for two members")
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


def _check_name(option: str, name: str) -> None:
    # Group names stand in message ids before a slash and as parts of topic names: the same
    # characters will do.
    try:
        check_name(name)
    except TopicNameInvalid as error:
        raise ConfigInvalid(f"option {option}: {error.message}") from None
