"""Who answers what a member is asked: one servicer for each service of the contract."""

from __future__ import annotations

from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.listen import Ports
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.rpc.admin_servicer import AdminReadServicer
from cometmq.member.rpc.arrivals_servicer import ArrivalCounts, ArrivalsServicer
from cometmq.member.rpc.broker_servicer import ReadServicer
from cometmq.member.rpc.member_servicer import MemberServicer, ReplicationPart
from cometmq.member.rpc.pulls_servicer import PullsServicer
from cometmq.rpc.interceptors import CallObserver
from cometmq.v1.broker_pb2_grpc import (
    add_BrokerAdminServiceServicer_to_server,
    add_BrokerServiceServicer_to_server,
)
from cometmq.v1.member_pb2_grpc import add_MemberServiceServicer_to_server


class Servicers:
    """``clients``, ``admin`` and ``replication`` are the role's own; what pullholds ask is answered
    by every member alike.
    """

    def __init__(
        self,
        context: MemberContext,
        core: MemberCore,
        groups: GroupReads,
        clients: ReadServicer,
        admin: AdminReadServicer,
        replication: ReplicationPart,
    ) -> None:
        storage, gate = core.storage, context.ports.gate
        counts = ArrivalCounts(context.metrics, groups, core.state)
        self._clients = clients
        self._admin = admin
        self._members = MemberServicer(
            arrivals=ArrivalsServicer(
                storage.arrivals, core.reader, storage.flush_now, gate, counts
            ),
            pulls=PullsServicer(clients.Pull, gate),
            replication=replication,
        )

    def add_to(self, ports: Ports, observer: CallObserver) -> None:
        """Serve them from now on."""
        clients, internal = ports.clients, ports.internal
        clients.add(add_BrokerServiceServicer_to_server, self._clients, observer=observer)
        internal.add(add_BrokerAdminServiceServicer_to_server, self._admin, observer=observer)
        internal.add(add_MemberServiceServicer_to_server, self._members, observer=observer)
