"""Options of a member of a broker group. ``services.broker`` and ``services.haslave`` read the same
ones.

RocketMQ's names in snake_case where it has the option (milliseconds there, as in RocketMQ); our own
carry the unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from cometmq.config import ServiceConfig, about
from cometmq.errors import ConfigInvalid, TopicNameInvalid
from cometmq.messaging.topics import check_name
from cometmq.model import MESSAGE_BODY_BYTES_MAX, QUEUES_PER_TOPIC_MAX, FlushMode
from cometmq.rpc.channels import parse_addresses

MIB = 1024 * 1024


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

    # --- sending ---
    max_message_size: int = field(
        default=MESSAGE_BODY_BYTES_MAX,
        metadata=about("Largest body.", unit="bytes", minimum=1, maximum=MESSAGE_BODY_BYTES_MAX),
    )
    send_in_flight_bytes_max: int = field(
        default=64 * MIB,
        metadata=about(
            "Bytes of all batches that wait for their acknowledgement; above it FLOW_CONTROL.",
            unit="bytes",
            minimum=MIB,
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
        metadata=about("Time between state records of committed offsets.", unit="s", minimum=0.01),
    )
    state_copy_interval_bytes: int = field(
        default=1024 * MIB,
        metadata=about(
            "Log written between two full copies of the state.", unit="bytes", minimum=MIB
        ),
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
        default=15.0,
        metadata=about(
            "How long a released lease waits for its new holder before the old one takes it back.",
            unit="s",
            minimum=0.1,
        ),
    )
    lease_renew_s: float = field(
        default=5.0, metadata=about("Time between renewals of the lease.", unit="s", minimum=0.05)
    )
    lease_poll_s: float = field(
        default=1.0,
        metadata=about("Time between looks of a follower at the lease.", unit="s", minimum=0.02),
    )

    # --- process ---
    register_namesrv_period: int = field(
        default=30_000,
        metadata=about("Time between registrations.", unit="ms", minimum=1_000, maximum=60_000),
    )
    cpu_affinity: tuple[str, ...] = field(
        default=(), metadata=about("CPUs of this process, e.g. 0;1. None: the system decides.")
    )

    def __post_init__(self) -> None:
        for name in ("broker_group", "cluster"):
            _check_name(name, getattr(self, name))
        if self.namesrv:
            parse_addresses(self.namesrv)
        if self.mapped_file_size_consume_queue % 20:
            raise ConfigInvalid("option mapped_file_size_consume_queue: must be a multiple of 20")
        if not all(cpu.isdecimal() for cpu in self.cpu_affinity):
            raise ConfigInvalid("option cpu_affinity: CPU numbers, such as 0;1")


def _check_name(option: str, name: str) -> None:
    # Group names stand in message ids before a slash and as parts of topic names: the same
    # characters will do.
    try:
        check_name(name)
    except TopicNameInvalid as error:
        raise ConfigInvalid(f"option {option}: {error}") from None
