"""One servicer of a role for each service of the contract."""

from __future__ import annotations

from typing import NamedTuple

from cometmq.member.listen import Ports
from cometmq.member.rpc.admin_servicer import AdminReadServicer
from cometmq.member.rpc.broker_servicer import ReadServicer
from cometmq.member.rpc.lease_rights import UNDER_LEASE
from cometmq.member.rpc.member_servicer import MemberServicer
from cometmq.rpc.calls import BeforeAnswer
from cometmq.rpc.guard import CallObserver
from cometmq.v1.broker_pb2_grpc import (
    add_BrokerAdminServiceServicer_to_server,
    add_BrokerServiceServicer_to_server,
)
from cometmq.v1.member_pb2_grpc import add_MemberServiceServicer_to_server


class Servicers(NamedTuple):
    """Clients reach the first, members and operators the other two, on the internal port.
    ``until_certain``: of a writer, waits until no other member can be it; None: a follower needs no
    right for what it answers.
    """

    clients: ReadServicer
    admin: AdminReadServicer
    members: MemberServicer
    until_certain: BeforeAnswer | None = None

    def add_to(self, ports: Ports, observer: CallObserver) -> None:
        """Serve them from now on."""
        clients, internal = ports.clients, ports.internal
        rights: dict[str, BeforeAnswer] = {}
        if self.until_certain is not None:
            rights = dict.fromkeys(UNDER_LEASE, self.until_certain)
        clients.add(
            add_BrokerServiceServicer_to_server,
            self.clients,
            observer=observer,
            before_answers=rights,
        )
        internal.add(
            add_BrokerAdminServiceServicer_to_server,
            self.admin,
            observer=observer,
            before_answers=rights,
        )
        internal.add(add_MemberServiceServicer_to_server, self.members, observer=observer)
