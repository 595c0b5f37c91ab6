"""What a member has, whatever its role: before its store is open, and around the open store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.member.background import ends_the_role
from cometmq.member.clocks import Clocks, GuardedClock
from cometmq.member.config import MemberConfig
from cometmq.member.hosts import BrokerIdentity
from cometmq.member.listen import Ports
from cometmq.member.metrics import MemberMetrics
from cometmq.member.pod.events import UNRECORDED, EventRecorder
from cometmq.member.read.reader import Reader
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.retention_metrics import RetentionCollector
from cometmq.member.state.retention import Retention, rules_of
from cometmq.member.storage.flusher import PAGE_BYTES, FlushPolicy
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.messaging.groups import MemberTable
from cometmq.messaging.state import BrokerState
from cometmq.rpc.background import Restarts
from cometmq.rpc.server import join_address
from cometmq.v1 import common_pb2, namesrv_pb2


@dataclass(frozen=True, slots=True)
class MemberContext:
    """What is there before the store is open."""

    config: MemberConfig
    identity: BrokerIdentity
    ports: Ports
    metrics: MemberMetrics
    clock: Clock
    clocks: Clocks
    events: EventRecorder = UNRECORDED

    @property
    def restarts(self) -> Restarts:
        """Runs background work."""
        failures, broker_group = self.metrics.background_failures, self.config.broker_group
        return Restarts(failures, self.clock, ends=ends_the_role, broker_group=broker_group)

    @property
    def internal_address(self) -> str:
        """Where other members reach this one."""
        return join_address(self._host, self.ports.internal.port)

    @property
    def _host(self) -> str:
        return self.config.advertised_host or self.config.listen_host

    def member_proto(self, role: common_pb2.MemberRole.ValueType, epoch: int) -> namesrv_pb2.Member:
        """This member as it registers with name servers."""
        return namesrv_pb2.Member(
            cluster=self.config.cluster,
            broker_group=self.config.broker_group,
            member_id=self.config.member_id,
            role=role,
            address=join_address(self._host, self.ports.clients.port),
            internal_address=self.internal_address,
            epoch=epoch,
        )

    def flush_policy(self) -> FlushPolicy:
        """When the log is synced."""
        return FlushPolicy(
            interval_s=self.config.flush_interval_commit_log / 1000,
            least_bytes=self.config.flush_commit_log_least_pages * PAGE_BYTES,
            thorough_s=self.config.flush_commit_log_thorough_interval / 1000,
        )


class MemberCore:
    """The open store, and the parts that serve it. ``copy``: the store is a follower's.
    ``write_snapshot`` appends a snapshot of the state; a follower has none to write.
    """

    def __init__(
        self,
        context: MemberContext,
        storage: BaseStorage,
        state: BrokerState,
        *,
        copy: bool = False,
        write_snapshot: Callable[[], None] | None = None,
    ) -> None:
        assert copy == (write_snapshot is None), "only a writer appends to its log"
        config, clock = context.config, context.clock
        self.identity = context.identity
        self.clocks = context.clocks
        self.started_ms = clock.wall_ms()
        self.storage = storage
        self.state = state
        self.members = MemberTable(config.groups_max)  # of consumer groups; empty on a follower
        ages = GuardedClock(clock, context.clocks)  # the thread of retention alone reads it
        ages.wall_ms()  # jumps count from here
        pace = CatchUpThrottle(config.catch_up_bytes_per_s)
        self.reader = Reader(storage, state, pace, clock, copy=copy)
        self.retention = Retention(
            storage,
            state,
            rules_of(config),
            ages,
            pause_s=config.delete_commit_log_files_interval / 1000,
            drop_waiting_s=config.drop_waiting_when_full_s,
            write_snapshot=write_snapshot,
        )
        self.collector = RetentionCollector(context.metrics, self.retention, clock)
