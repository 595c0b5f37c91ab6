"""What members of a group say of their replicas: the answer of this member, questions to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from cometmq.errors import CometError
from cometmq.member.clocks import Clocks
from cometmq.member.config import MemberConfig
from cometmq.member.hosts import BrokerIdentity
from cometmq.model import EPOCH_MAX
from cometmq.replication.election import Peer
from cometmq.replication.lease import LeaseRecord, ReplicaId
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.secret import SharedSecret
from cometmq.store.base import BaseStore
from cometmq.telemetry import OutageLogger, fields
from cometmq.v1 import common_pb2, member_pb2, member_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S = 2.0


def replica_status_of(
    identity: BrokerIdentity,
    config: MemberConfig,
    store: BaseStore,
    role: common_pb2.MemberRole.ValueType,
    lease: LeaseRecord | None,
    clocks: Clocks | None = None,
    *,
    send_refusal: str = "",
) -> member_pb2.DescribeReplicaResponse:
    """What a member says of its replica and its clock, and of ``lease`` as it knows it.
    ``send_refusal``: why it has no room for sends; empty: it has.
    """
    assert store.min_offset <= store.appended_offset
    others = config.peer_addresses()
    return member_pb2.DescribeReplicaResponse(
        broker_group=identity.broker_group,
        member_id=config.member_id,
        store_id=store.store_id,
        former_store_id=store.former_store_id,
        epoch=store.epoch,
        log_min_offset=store.min_offset,
        log_end_offset=store.appended_offset,
        role=role,
        lease=None if lease is None else _view_of(lease),
        peers=() if others is None else sorted({config.member_id, *others}),
        clock_skew_ms=None if clocks is None else clocks.skew_ms,
        clock_is_off=clocks is not None and clocks.is_off,
        send_refusal=send_refusal,
    )


def _view_of(record: LeaseRecord) -> member_pb2.LeaseRecord:
    return member_pb2.LeaseRecord(
        holder=_replica_id(record.holder),
        in_sync=map(_replica_id, record.in_sync),
        electable=map(_replica_id, record.electable),
        epoch=record.epoch,
        renewals=record.renewals,
    )


def _replica_id(replica_id: ReplicaId) -> member_pb2.ReplicaId:
    return member_pb2.ReplicaId(member_id=replica_id.member_id, store_id=replica_id.store_id)


class Peers:
    """The other members of the group, by id. ``addresses`` is None when they are not configured."""

    def __init__(
        self,
        broker_group: str,
        addresses: Mapping[int, str] | None,
        secret: SharedSecret | None,
    ) -> None:
        self.ids = None if addresses is None else frozenset(addresses)
        self._broker_group = broker_group
        self._addresses = addresses or {}
        self._secret = secret
        lines = (log, logging.INFO, "no answer from a peer", "the peer answers again")
        self._outage = {member: OutageLogger(*lines) for member in self._addresses}

    async def ask(self, member_ids: Iterable[int]) -> dict[int, Peer]:
        """The replicas of these members, without those that do not answer or have no address."""
        found = await asyncio.gather(*map(self._ask, member_ids))
        return {peer.member_id: peer for peer in found if peer is not None}

    async def _ask(self, member_id: int) -> Peer | None:
        address = self._addresses.get(member_id)
        if address is None:
            return None
        assert member_id in self._outage, member_id
        try:
            async with open_channel(address, self._secret) as channel:
                with wire_errors():
                    answer = await member_pb2_grpc.MemberServiceStub(channel).DescribeReplica(
                        member_pb2.DescribeReplicaRequest(), timeout=DEADLINE_S
                    )
        except CometError as error:
            self._outage[member_id].failing(error, member=member_id)
            return None
        self._outage[member_id].recovered(member=member_id)
        if (answer.broker_group, answer.member_id) != (self._broker_group, member_id):
            log.error(
                "another member answers for a peer: see the option peers",
                extra=fields(member=member_id, answers=f"{answer.broker_group} {answer.member_id}"),
            )
            return None
        if answer.epoch > EPOCH_MAX:
            log.error("a peer reports an impossible epoch", extra=fields(member=member_id))
            return None
        return Peer(
            member_id,
            answer.store_id,
            answer.epoch,
            answer.log_end_offset,
            writes=answer.role == common_pb2.MEMBER_ROLE_WRITER,
        )
