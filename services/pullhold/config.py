"""Options of a pullhold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cometmq.config import MIB, ServiceConfig, about
from cometmq.model import PORT_MAX
from cometmq.names import check_cluster
from cometmq.rpc.addresses import parse_addresses


@dataclass(frozen=True, kw_only=True)
class PullholdConfig(ServiceConfig):
    """``python -m services.pullhold --help`` prints them."""

    cluster: str = field(default="DefaultCluster", metadata=about("Name of the cluster."))
    namesrv: tuple[str, ...] = field(
        default=("127.0.0.1:9876",),
        metadata=about("Name servers, host:port;host:port.", rocketmq="namesrvAddr"),
    )
    port: int = field(
        default=10921,
        metadata=about("Port for clients; 0 = any free one.", minimum=0, maximum=PORT_MAX),
    )
    advertised_host: str = field(
        default="", metadata=about("Host that clients connect to; empty = listen_host.")
    )
    internal_secret_file: Path | None = field(
        default=None,
        metadata=about(
            "File with the cluster's secret, of several one a line. This process and the "
            "brokers and name servers it calls prove to each other that they know one. "
            "None: they want no proof."
        ),
    )
    register_namesrv_period: int = field(
        default=30_000,
        metadata=about("Time between registrations.", unit="ms", minimum=100, maximum=60_000),
    )

    # --- limits ---
    holds_max: int = field(
        default=200_000, metadata=about("Held pulls.", minimum=1, maximum=10_000_000)
    )
    holds_per_client_max: int = field(
        default=20_000, metadata=about("Held pulls of one connection.", minimum=1)
    )
    holds_per_stream_max: int = field(
        default=10_000, metadata=about("Held pulls of one stream.", minimum=1)
    )
    holds_per_peer_max: int = field(
        default=100_000,
        metadata=about("Held pulls of one address, whatever its connections.", minimum=1),
    )
    streams_per_peer_max: int = field(
        default=10_000, metadata=about("Open calls with holds of one address.", minimum=1)
    )
    clients_max: int = field(
        default=20_000, metadata=about("Connections that hold pulls.", minimum=1)
    )
    broker_groups_max: int = field(
        default=1_000,
        metadata=about("Broker groups whose queues are watched.", minimum=1, maximum=100_000),
    )
    pulls_per_broker_max: int = field(
        default=8, metadata=about("Concurrent pulls at one broker.", minimum=1, maximum=4_096)
    )
    unsent_bytes_per_stream_max: int = field(
        default=8 * MIB,
        metadata=about(
            "Answers that a client has not taken; above it a hold ends with NOT_FOUND.",
            unit="bytes",
            minimum=1,
        ),
    )
    unsent_bytes_max: int = field(
        default=256 * MIB,
        metadata=about("Untaken answers of all clients together.", unit="bytes", minimum=1),
    )

    # --- times ---
    safety_check_interval_s: float = field(
        default=5.0,
        metadata=about(
            "Time between checks of all queues' ends, which find a lost arrival.",
            unit="s",
            minimum=0.05,
            maximum=3_600,
        ),
    )
    unreachable_grace_s: float = field(
        default=1.0,
        metadata=about(
            "How long holds wait for a broker that cannot be reached.",
            unit="s",
            minimum=0.01,
            maximum=60,
        ),
    )
    watch_linger_s: float = field(
        default=2.0,
        metadata=about(
            "How long a queue is watched after its last hold.", unit="s", minimum=0, maximum=600
        ),
    )

    def __post_init__(self) -> None:
        check_cluster(self.cluster)
        parse_addresses(self.namesrv)
