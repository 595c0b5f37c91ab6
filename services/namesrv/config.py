"""Options of a name server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cometmq.config import ServiceConfig, about
from cometmq.model import PORT_MAX
from services.namesrv.watches import STREAMS_PER_PEER_MAX, TOPICS_PER_PEER_MAX


@dataclass(frozen=True, kw_only=True)
class NamesrvConfig(ServiceConfig):
    """``python -m services.namesrv --help`` prints them."""

    port: int = field(
        default=9876,
        metadata=about(
            "Port to listen on; 0 = any free one.",
            minimum=0,
            maximum=PORT_MAX,
            rocketmq="listenPort",
        ),
    )
    internal_secret_file: Path | None = field(
        default=None,
        metadata=about(
            "File with the cluster's secret, of several one a line. Callers that register"
            " or change anything must prove that they know one. None: every caller may."
        ),
    )
    kv_config_path: Path = field(
        default=Path("~/.cometmq/namesrv/kvConfig.json"),
        metadata=about(
            "File of the key-value table; each name server has its own.", rocketmq="kvConfigPath"
        ),
    )
    member_silence_max_s: float = field(
        default=120.0,
        metadata=about(
            "Silence after which a member leaves the routes.", unit="s", minimum=1, maximum=3_600
        ),
    )
    scan_interval_s: float = field(
        default=10.0,
        metadata=about(
            "Time between searches for silent members.",
            unit="s",
            minimum=0.001,
            maximum=60,
            rocketmq="scanNotActiveBrokerInterval (ms)",
        ),
    )
    members_max: int = field(
        default=10_000, metadata=about("Registered members.", minimum=1, maximum=1_000_000)
    )
    holds_max: int = field(
        default=10_000, metadata=about("Registered pull-holds.", minimum=1, maximum=100_000)
    )
    topics_max: int = field(
        default=1_000_000,
        metadata=about("Topics of all broker groups together.", minimum=1, maximum=10_000_000),
    )
    watch_streams_max: int = field(
        default=20_000, metadata=about("Open watch streams.", minimum=1, maximum=1_000_000)
    )
    watch_topics_max: int = field(
        default=10_000, metadata=about("Topics of one watch stream.", minimum=1, maximum=100_000)
    )
    watch_streams_per_peer_max: int = field(
        default=STREAMS_PER_PEER_MAX,
        metadata=about("Open watch streams of one address.", minimum=1, maximum=1_000_000),
    )
    watch_topics_per_peer_max: int = field(
        default=TOPICS_PER_PEER_MAX,
        metadata=about(
            "Topics of all watch streams of one address together.", minimum=1, maximum=100_000_000
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_config_path", self.kv_config_path.expanduser())
