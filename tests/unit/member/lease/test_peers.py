from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.hosts import BrokerIdentity
from cometmq.member.lease.peers import Peers, replica_status_of
from cometmq.replication.election import Peer
from cometmq.replication.lease import LeaseRecord, ReplicaId
from cometmq.store.base import BaseStore
from cometmq.v1 import common_pb2, member_pb2, member_pb2_grpc
from tests.support.stores.small_stores import HOST, encoded, open_store

WRITER, FOLLOWER = common_pb2.MEMBER_ROLE_WRITER, common_pb2.MEMBER_ROLE_FOLLOWER


class Answering(member_pb2_grpc.MemberServiceServicer):
    """A member that says one thing of itself."""

    def __init__(self, answer: member_pb2.DescribeReplicaResponse) -> None:
        self._answer = answer

    async def DescribeReplica(
        self, request: Any, context: Any
    ) -> member_pb2.DescribeReplicaResponse:
        return self._answer


@asynccontextmanager
async def answering(**answer: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    told = member_pb2.DescribeReplicaResponse(**answer)
    servicer = Answering(told)  # type: ignore[abstract]  # it serves one method
    member_pb2_grpc.add_MemberServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize(("role", "writes"), [(WRITER, True), (FOLLOWER, False)])
async def test_a_peer_tells_how_it_stands(role: common_pb2.MemberRole, writes: bool) -> None:
    told = {"store_id": "store-1", "epoch": 4, "log_end_offset": 77, "role": role}
    async with answering(broker_group="g1", member_id=1, **told) as address:
        found = await Peers("g1", {1: address, 2: address}, None).ask([1, 5])
    assert found == {1: Peer(1, "store-1", 4, 77, writes=writes)}


@pytest.mark.parametrize(("group", "member_id"), [("g1", 2), ("g2", 1)])
async def test_whoever_else_answers_there_is_not_the_peer(group: str, member_id: int) -> None:
    async with answering(broker_group=group, member_id=member_id) as address:
        assert await Peers("g1", {1: address}, None).ask([1]) == {}


async def test_who_does_not_answer_is_missing() -> None:
    async with answering() as address:
        pass
    assert await Peers("g1", {1: address}, None).ask([1]) == {}


async def test_who_does_not_answer_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with answering(broker_group="g1", member_id=1) as address:
        pass
    peers = Peers("g1", {1: address}, None)
    with caplog.at_level("INFO", logger="cometmq.member.lease.peers"):
        for _ in range(3):
            assert await peers.ask([1]) == {}
    assert caplog.messages == ["no answer from a peer"]


def told_by(store: BaseStore, lease: LeaseRecord | None, *peers: str) -> Any:
    identity = BrokerIdentity("c", "g1", HOST, BatchLimits())
    config = MemberConfig(
        broker_group="g1", member_id=1, internal_port=2, lease="file:///lease", peers=peers
    )
    return replica_status_of(identity, config, store, FOLLOWER, lease)


def test_a_member_stands_by_what_it_has_appended(tmp_path: Path) -> None:
    """Who leads after all have failed is the longest log: what is not synced yet is part of it."""
    store = open_store(tmp_path)
    store.append(encoded("T", 0, b"a"), [("T", 0, 1)], born_host=HOST, store_host=HOST)
    assert store.flushed_offset < store.appended_offset
    status = told_by(store, None)
    assert (status.log_end_offset, status.epoch) == (store.appended_offset, store.epoch)
    assert status.store_id == store.store_id
    assert not status.HasField("lease")
    assert not status.peers
    store.abandon()


def test_a_member_tells_the_lease_and_whom_it_knows(tmp_path: Path) -> None:
    """Where nobody writes, operators ask followers who was in sync."""
    store = open_store(tmp_path)
    mine, other = ReplicaId(1, store.store_id), ReplicaId(0, "store-0")
    record = LeaseRecord("g1", *other, "h:1", 3, (other,), (other, mine), renewals=7)
    status = told_by(store, record, "0@h:1", "1@h:2", "2@h:3")
    lease = status.lease
    assert [(s.member_id, s.store_id) for s in lease.in_sync] == [other]
    assert [(s.member_id, s.store_id) for s in lease.electable] == [other, mine]
    assert (lease.holder.member_id, lease.epoch, lease.renewals) == (0, 3, 7)
    assert list(status.peers) == [0, 1, 2]
    store.abandon()
