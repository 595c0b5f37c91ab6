"""What Kubernetes shows of a group that lives in pods: events, the role as a label, the holder."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import NoFollower
from cometmq.member.lease.stores import record_of
from cometmq.member.pod.role_label import LABEL
from cometmq.model import ReplicationMode
from cometmq.replication.follower import Replica
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import member_pb2
from tests.support.cluster.broker import ASYNC, refusal
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.kube.lease_api import LeaseApi, lease_api
from tests.support.waiting import until

PODS = ("prod-broker-a-0", "prod-broker-a-1")
QUICK: dict[str, Any] = {
    "lease_duration_s": 1.0,
    "lease_renew_s": 0.1,
    "lease_poll_s": 0.05,
    "in_sync_lag_s_max": 0.5,
    "replication_mode": ReplicationMode.APPENDED,
}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LeaseApi]:
    with lease_api() as found:
        config = {
            "clusters": [{"name": "c", "cluster": {"server": found.address}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "now", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "now",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setattr(PodGroup, "api", found, raising=False)
        yield found


class PodGroup(LiveGroup):
    """Its lease is an object of the API, and each member has a pod."""

    api: LeaseApi

    def __getitem__(self, member_id: int) -> LiveMember:
        member = super().__getitem__(member_id)
        if not member.config.pod_name:
            member.reconfigure(pod_name=PODS[member_id], pod_uid=f"uid-{member_id}")
        return member

    def lease_record(self) -> dict[str, Any]:
        found = record_of(self.api.leases["queues", "prod-broker-a"])
        assert found is not None
        return found.fields()

    def in_sync(self) -> list[int]:
        return [replica_id.member_id for replica_id in self.lease_record()["in_sync"]]


@asynccontextmanager
async def pods(directory: Path, **options: Any) -> AsyncIterator[LiveGroup]:
    """A group of two, in sync; member 0 writes, in a topic that waits for copies."""
    place = {"lease": "kubernetes://queues/prod-broker-a"}
    async with live_group(directory, kind=PodGroup, **{**QUICK, **place, **options}) as group:
        await group.all_in_sync(0, 1)
        await group[0].client.put_topic("T", 1, ASYNC)
        yield group


def notes(api: LeaseApi, reason: str) -> list[str]:
    return [event["note"] for event in api.events.values() if event["reason"] == reason]


def roles(api: LeaseApi) -> list[str | None]:
    return [api.labels.get(name, {}).get(LABEL) for name in PODS]


def holder(api: LeaseApi) -> str:
    found: str = api.leases["queues", "prod-broker-a"]["spec"]["holderIdentity"]
    return found


async def test_a_fail_over_is_an_event_and_moves_the_label(api: LeaseApi, tmp_path: Path) -> None:
    async with pods(tmp_path) as group:
        assert holder(api) == PODS[0]
        await until(lambda: (PODS[0], "WriterElected") in api.reasons())
        joined = ["member 1 is in sync; in sync, the writer included: 2"]
        await until(lambda: notes(api, "InSyncMemberJoined") == joined)
        await until(lambda: roles(api) == ["writer", "follower"])
        await group[0].crash()
        await group[1].until_role("writer")
        await until(lambda: roles(api)[1] == "writer")
        await until(lambda: (PODS[1], "FailedOver") in api.reasons())
        assert holder(api) == PODS[1]
        await group[0].start("follower")
        await until(lambda: roles(api) == ["follower", "writer"])


async def test_a_hand_over_is_an_event_on_both_sides(api: LeaseApi, tmp_path: Path) -> None:
    async with pods(tmp_path) as group:
        await group[0].members.StepDown(member_pb2.StepDownRequest())
        await group[1].until_role("writer")
        await until(lambda: roles(api) == ["follower", "writer"])
        await until(lambda: "the role of the writer goes to member 1" in str(api.events))
        await until(lambda: (PODS[1], "WriterElected") in api.reasons())
        assert "FailedOver" not in str(api.events)


async def test_an_order_that_failed_is_an_event(api: LeaseApi, tmp_path: Path) -> None:
    async with pods(tmp_path) as group:
        await group[1].stop()
        refused = await refusal(group[0].members.StepDown(member_pb2.StepDownRequest()))
        assert isinstance(refused, NoFollower)
        await until(lambda: notes(api, "HandOverFailed"))
        await until(lambda: group.in_sync() == [0])
        await group[0].retire()
        await until(lambda: notes(api, "StoppedWithoutSuccessor"))
        assert "no other member has everything" in notes(api, "StoppedWithoutSuccessor")[0]


async def test_refused_sends_begin_and_end(api: LeaseApi, tmp_path: Path) -> None:
    async with pods(tmp_path, min_in_sync_replicas=2) as group:
        await group[1].crash()
        await until(lambda: notes(api, "SendsRefused"))
        assert "min_in_sync_replicas" in notes(api, "SendsRefused")[0]
        await until(lambda: notes(api, "InSyncMemberLeft"))
        await group[1].start("follower")
        await until(lambda: notes(api, "SendsTaken"))


async def test_a_follower_that_falls_out_of_sync_is_an_event_on_both_sides(
    api: LeaseApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that catches up is none."""
    async with pods(tmp_path, slave_timeout=300) as group:
        await until(lambda: roles(api) == ["writer", "follower"])
        assert not notes(api, "FollowerNotReady")
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "acked", lambda *_: None)  # it is not heard any more
            await group[0].client.send("T", 0, b"a")
            await until(lambda: (PODS[0], "InSyncMemberLeft") in api.reasons())
            await until(lambda: (PODS[1], "FollowerNotReady") in api.reasons())
        await until(lambda: (PODS[1], "FollowerReady") in api.reasons())


async def test_no_send_waits_for_an_api_that_is_away(api: LeaseApi, tmp_path: Path) -> None:
    """Of the events; the writer's lease lasts by the promise of its follower."""
    async with pods(tmp_path) as group:
        await until(lambda: roles(api) == ["writer", "follower"])
        api.failing = 500
        for number in range(20):
            result = await group[0].client.send("T", 0, b"%d" % number)
            assert result.status == pb.SEND_STATUS_SEND_OK
        api.failing = 0
