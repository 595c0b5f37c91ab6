"""A group loses its writer: who takes over, what is kept, what happens to those who come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq import errors
from cometmq.member.config import PromoteAsync
from cometmq.member.lease.stores import FileLease
from cometmq.model import ReplicationMode
from cometmq.replication.follower import Replica
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import error_from
from cometmq.rpc.server import READY
from cometmq.store.disk.files import OsFiles
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2, member_pb2, namesrv_pb2, namesrv_pb2_grpc
from services.haslave import app as haslave_app
from tests.support.cluster.broker import ASYNC, numbered, refusal, running_namesrv
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until, until_async

QUICK: dict[str, Any] = {
    "lease_duration_s": 1.0,
    "lease_renew_s": 0.1,
    "lease_poll_s": 0.05,
    "in_sync_lag_s_max": 0.5,
}
REPLICATED: dict[str, Any] = {**QUICK, "replication_mode": ReplicationMode.APPENDED}
IMPATIENT: dict[str, Any] = {"slave_timeout": 300}
NEVER_MS = 3_600_000
UNFLUSHED: dict[str, Any] = {
    "flush_interval_commit_log": NEVER_MS,
    "flush_commit_log_thorough_interval": NEVER_MS,
}


@asynccontextmanager
async def replicated(directory: Path, members: int = 2, **options: Any) -> AsyncIterator[LiveGroup]:
    """A group, all of it in sync, with a topic T that waits for copies."""
    async with live_group(directory, members, **{**REPLICATED, **options}) as group:
        await group.all_in_sync(*range(members))
        await group[0].client.put_topic("T", 1, ASYNC)
        yield group


async def acknowledged(member: LiveMember, *bodies: bytes) -> None:
    result = await member.client.send("T", 0, *bodies)
    assert result.status == pb.SEND_STATUS_SEND_OK


def reasons(member: LiveMember) -> list[str]:
    return [change.reason for change in member.changes]


def places(result: pb.SendBatchResult) -> tuple[int, tuple[int, ...]]:
    return result.log_offset, tuple(result.queue_offsets)


async def bodies(member: LiveMember) -> list[bytes]:
    found: list[bytes] = await member.client.bodies("T", 0)
    return found


# --- the writer dies ------------------------------------------------------------------------------


async def test_what_was_copied_survives_the_writer(tmp_path: Path) -> None:
    async with replicated(tmp_path) as group:
        for number in range(50):
            await acknowledged(group[0], b"%d" % number)
        before = await group[0].client.pull("T", 0, 0)
        await group[0].crash()
        await group[1].until_role("writer")
        assert reasons(group[1]) == ["failover"]
        assert await bodies(group[1]) == [b"%d" % number for number in range(50)]
        after = await group[1].client.pull("T", 0, 0)
        assert after.next_position.generation > before.next_position.generation
        await acknowledged(group[1], b"new")

        await group[0].start("follower")
        await group.all_in_sync(0, 1)
        await acknowledged(group[1], b"newer")
        await group.in_step()


@pytest.mark.parametrize("written_each_s", [0.05, 600.0])
async def test_a_batch_that_comes_again_to_the_next_writer_has_its_place(
    tmp_path: Path, written_each_s: float
) -> None:
    """It knows them by the state, and by the log's end where the writer before wrote no state."""
    batches = [numbered(3 * n, *[b"%d" % (3 * n + m) for m in range(3)]) for n in range(40)]
    async with replicated(tmp_path, offset_record_interval_s=written_each_s) as group:
        lane = await group[0].client.lane()
        before = []
        for batch in batches:
            before.append(await lane.exchange(*batch))
            await asyncio.sleep(0.01)
        await group[0].crash()
        await group[1].until_role("writer")
        lane = await group[1].client.lane()
        after = [await lane.exchange(*batch) for batch in batches]
        assert [result.stored_count for result in after] == [3] * len(batches)
        assert list(map(places, after)) == list(map(places, before))
        longer = await lane.exchange(*numbered(117, b"117", b"118", b"119", b"120"))
        assert (longer.stored_count, places(longer)) == (3, places(before[-1]))
        assert (await lane.exchange(*numbered(120, b"120"))).stored_count == 0
        assert await bodies(group[1]) == [b"%d" % number for number in range(121)]


async def test_commits_that_were_answered_survive_the_writer(tmp_path: Path) -> None:
    """Of a topic that waits for copies: lost as soon as the last is answered."""
    async with replicated(tmp_path) as group:
        await acknowledged(group[0], *[b"."] * 30)
        assert len(await bodies(group[0])) == 30
        for offset in range(1, 31):
            [kept] = await group[0].client.commit("g", ("T", 0, 0, offset))
            assert kept.position.offset == offset
        await group[0].crash()
        await group[1].until_role("writer")
        position = await group[1].client.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 30


async def test_a_commit_below_the_floor_is_not_answered_as_taken(tmp_path: Path) -> None:
    async with replicated(tmp_path, min_in_sync_replicas=2) as group:
        await acknowledged(group[0], b"a")
        assert await bodies(group[0]) == [b"a"]
        await group[0].client.commit("g", ("T", 0, 0, 0))
        await group[1].crash()
        # Whether the writer has noticed that it is alone or not.
        refused = await refusal(group[0].client.commit("g", ("T", 0, 0, 1)))
        assert isinstance(refused, errors.SlaveNotAvailable)
        await group.all_in_sync(0)
        refused = await refusal(group[0].client.commit("g", ("T", 0, 0, 1)))
        assert isinstance(refused, errors.SlaveNotAvailable)
        await group[1].start("follower")
        await group.all_in_sync(0, 1)

        async def taken() -> bool:
            with suppress(grpc.aio.AioRpcError):
                [kept] = await group[0].client.commit("g", ("T", 0, 0, 1))
                return kept.position.offset == 1
            return False

        await until_async(taken)  # said again


async def test_of_three_one_takes_over_and_the_other_follows_it(tmp_path: Path) -> None:
    async with replicated(tmp_path, 3, min_in_sync_replicas=2) as group:
        await acknowledged(group[0], b"a")
        await group[0].crash()
        await until(lambda: "writer" in (group[1].role, group[2].role))
        new = group[1] if group[1].role == "writer" else group[2]
        await group.all_in_sync(1, 2)

        async def goes_on() -> bool:
            try:
                result = await new.client.send("T", 0, b"b")
            except grpc.aio.AioRpcError as error:  # the other is not in sync again yet
                if not isinstance(error_from(error), errors.SlaveNotAvailable):
                    raise
                return False
            return bool(result.status == pb.SEND_STATUS_SEND_OK)

        await until_async(goes_on)
        assert (await bodies(new))[:1] == [b"a"]


async def test_a_writer_that_comes_back_soon_goes_on(tmp_path: Path) -> None:
    async with replicated(tmp_path, lease_duration_s=30.0) as group:
        await acknowledged(group[0], b"a")
        await group[0].crash()
        await group[0].start("writer")
        assert (reasons(group[0]), reasons(group[1])) == (["first", "restart"], [])
        await group.all_in_sync(0, 1)
        assert await bodies(group[0]) == [b"a"]


async def test_routes_keep_a_writer_that_restarts_while_it_looks_for_its_lease(
    tmp_path: Path,
) -> None:
    options = {**REPLICATED, "lease_duration_s": 30.0}
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), **options) as group,
        open_channel(namesrv) as channel,
    ):
        stub = namesrv_pb2_grpc.NameServiceStub(channel)

        async def known() -> dict[int, tuple[int, int]]:
            found = await stub.DescribeCluster(namesrv_pb2.DescribeClusterRequest())
            return {m.member.member_id: (m.member.role, m.member.epoch) for m in found.members}

        async def is_known(epoch: int) -> bool:
            return (await known()).get(0) == (common_pb2.MEMBER_ROLE_WRITER, epoch)

        await group.all_in_sync(0, 1)
        await until_async(lambda: is_known(1))
        writer = (await known())[0]
        await group[0].crash()
        written = group.lease.read_text()
        group.lease.write_text("{")  # it cannot be read for now
        await group[0].start("follower")
        assert (await known()).get(0, writer) == writer, "it may be the writer still"
        group.lease.write_text(written)
        await group[0].until_role("writer")
        await group.all_in_sync(0, 1)
        await until_async(lambda: is_known(2))


def remembered(epoch: int) -> namesrv_pb2.RegisterMemberRequest:
    """What a writer has told that is no more."""
    member = namesrv_pb2.Member(
        cluster="DefaultCluster",
        broker_group="g1",
        member_id=7,
        role=common_pb2.MEMBER_ROLE_WRITER,
        address="127.0.0.1:7",
        epoch=epoch,
    )
    version = namesrv_pb2.DataVersion(epoch=epoch, counter=1)
    return namesrv_pb2.RegisterMemberRequest(member=member, data_version=version)


@pytest.mark.parametrize("epoch", [1, 13])
async def test_a_group_made_anew_passes_over_what_name_servers_remember(
    tmp_path: Path, epoch: int
) -> None:
    """In one step, whoever they take for its writer; and all that it has is where it was."""
    async with running_namesrv(tmp_path) as namesrv, open_channel(namesrv) as channel:
        stub = namesrv_pb2_grpc.NameServiceStub(channel)
        async with live_group(tmp_path, members=1, **REPLICATED) as group:
            await group[0].client.put_topic("T", 1, ASYNC)
            await acknowledged(group[0], b"a")
            before = await group[0].client.pull("T", 0, 0)
            await group[0].stop()
            await stub.RegisterMember(remembered(1 + epoch))
            group[0].reconfigure(namesrv=(namesrv,))
            await group[0].start()
            await until(lambda: reasons(group[0]) == ["first", "restart", "epoch", "restart"])
            await group[0].until_role("writer")

            async def registered() -> bool:
                found = await stub.DescribeCluster(namesrv_pb2.DescribeClusterRequest())
                return [(m.member.member_id, m.member.epoch) for m in found.members] == [
                    (0, 2 + epoch)
                ]

            await until_async(registered)
            after = await group[0].client.pull("T", 0, 0)
            assert after.next_position == before.next_position
            assert len(group[0].changes) == 4


async def test_an_epoch_that_no_group_has_is_not_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There would be none above."""
    async with running_namesrv(tmp_path) as namesrv, open_channel(namesrv) as channel:
        stub = namesrv_pb2_grpc.NameServiceStub(channel)
        await stub.RegisterMember(remembered(1 << 29))
        async with live_group(tmp_path, members=1, namesrv=(namesrv,), **REPLICATED) as group:
            await group[0].client.put_topic("T", 1, ASYNC)
            await acknowledged(group[0], b"a")
            assert reasons(group[0]) == ["first"]
            assert group.lease_record()["epoch"] == 1
    assert "a name server reports an impossible epoch" in caplog.text


async def test_asynchronous_groups_fail_over_and_keep_what_was_lost_aside(tmp_path: Path) -> None:
    alone = {"replication_mode": ReplicationMode.ASYNC}
    async with live_group(tmp_path, **QUICK, **UNFLUSHED, **alone) as group:
        await group[0].client.put_topic("T", 1, ASYNC)
        await acknowledged(group[0], b"kept")
        await group.all_in_sync(0, 1)
        await group.in_step()
        await group[1].stop()
        await acknowledged(group[0], b"lost " * 100)
        lost_from, lost_end = group[1].opened.appended_offset, group[0].opened.appended_offset
        await group[0].crash()
        await group[1].start("writer")
        assert await bodies(group[1]) == [b"kept"]

        await group[0].start("follower")
        await until(lambda: "cut" in reasons(group[0]))
        await group[0].until_role("follower")
        await group.in_step()
        kept = next((tmp_path / "0" / "store" / "lost").iterdir())
        epoch, first, end = map(int, kept.stem.split("-"))
        assert (epoch, first) == (1, lost_from)
        assert end >= lost_end
        assert kept.stat().st_size == end - first
        assert b"lost lost" in kept.read_bytes()
        for shown in (end - first, 0):  # until somebody removes it
            address = group[0].metrics_address
            assert await sample(address, "cometmq_lost_range_bytes") == shown
            kept.unlink(missing_ok=True)


async def test_an_asynchronous_group_may_wait_for_an_operator(tmp_path: Path) -> None:
    alone = {"promote_async": PromoteAsync.NEVER, "replication_mode": ReplicationMode.ASYNC}
    options: dict[str, Any] = {**QUICK, **alone}
    async with live_group(tmp_path, **options) as group:
        await group[0].client.put_topic("T", 1, ASYNC)
        await acknowledged(group[0], b"a")
        await group.in_step()
        await group[0].crash()
        request = member_pb2.ElectRequest()
        assert isinstance(await refusal(group[1].members.Elect(request)), errors.InvalidRequest)
        assert group[1].changes == []
        await group[1].members.Elect(member_pb2.ElectRequest(force=True))
        await group[1].until_role("writer")
        assert reasons(group[1]) == ["forced"]
        assert group.in_sync() == [1]
        refused = await refusal(group[1].members.Elect(member_pb2.ElectRequest(force=True)))
        assert isinstance(refused, errors.NotFollower)


# --- a follower dies ------------------------------------------------------------------------------


async def test_sends_go_on_when_the_set_has_shrunk(tmp_path: Path) -> None:
    async with replicated(tmp_path, **IMPATIENT, in_sync_lag_s_max=3.0) as group:
        await group[1].crash()
        result = await group[0].client.send("T", 0, b"a")
        assert result.status == pb.SEND_STATUS_FLUSH_SLAVE_TIMEOUT
        assert (await group[0].client.pull("T", 0, 0)).status == pb.PULL_STATUS_NOT_FOUND
        await group.all_in_sync(0)
        await acknowledged(group[0], b"b")
        assert await bodies(group[0]) == [b"a", b"b"]


async def test_a_follower_out_of_sync_is_not_ready_and_its_writer_does_not_leave_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So neither a drain nor an update takes the only member that has everything."""
    async with (
        replicated(tmp_path, **IMPATIENT) as group,
        open_channel(group[1].client.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        async def is_ready() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=READY))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def is_not_ready() -> bool:
            return not await is_ready()

        await until_async(is_ready)
        monkeypatch.setattr(Replica, "acked", lambda *_: None)  # it is not heard any more
        await group[0].client.send("T", 0, b"a")
        await group.all_in_sync(0)
        await until_async(is_not_ready)
        assert (await group[1].client.pull("T", 0, 0)).status == pb.PULL_STATUS_NOT_FOUND
        await group[0].retire()
        assert "stops, and no other member has everything" in caplog.text
        monkeypatch.undo()
        await group[0].start("writer")
        await group.all_in_sync(0, 1)
        await until_async(is_ready)


@pytest.mark.parametrize("replication", [ReplicationMode.APPENDED, ReplicationMode.ASYNC])
async def test_nobody_waits_for_a_follower_that_is_leaving(
    tmp_path: Path, replication: ReplicationMode
) -> None:
    patient: dict[str, Any] = {"in_sync_lag_s_max": 3600.0, "async_promote_silence_max": 3600.0}
    async with replicated(tmp_path, **patient, replication_mode=replication) as group:
        await acknowledged(group[0], b"a")
        await group[1].retire()
        assert group.lease_record()["electable"] == group.lease_record()["in_sync"]
        assert group.in_sync() == [0], "it was let go, not given up"
        await acknowledged(group[0], b"b")
        await group[1].start("follower")
        await group.all_in_sync(0, 1)
        await acknowledged(group[0], b"c")
        assert await bodies(group[0]) == [b"a", b"b", b"c"]


async def test_a_leave_that_the_lease_cannot_take_delays_a_stop_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(haslave_app, "LEAVE_S_MAX", 0.2)
    async with live_group(tmp_path, **{**REPLICATED, "in_sync_lag_s_max": 3600.0}) as group:
        await group.all_in_sync(0, 1)
        away = errors.LeaseUnavailable("away")
        with mock.patch.object(FileLease, "write", side_effect=away):
            await group[1].retire()
        assert "stops without the writer's leave" in caplog.text
        assert group.in_sync() == [0, 1]
        await group.all_in_sync(0)


async def test_below_the_floor_sends_are_refused_until_it_is_reached(tmp_path: Path) -> None:
    async with replicated(tmp_path, min_in_sync_replicas=2) as group:
        await acknowledged(group[0], b"a")
        await group[1].crash()
        await group.all_in_sync(0)
        end = group[0].opened.appended_offset
        refused = await refusal(group[0].client.send("T", 0, b"refused"))
        assert isinstance(refused, errors.SlaveNotAvailable)
        assert group[0].opened.appended_offset == end
        await group[1].start("follower")
        await group.all_in_sync(0, 1)
        await acknowledged(group[0], b"b")
        assert await bodies(group[0]) == [b"a", b"b"]


async def test_below_the_floor_what_was_seen_before_stays_readable(tmp_path: Path) -> None:
    """At a member that took over, and when that one is restarted."""
    async with replicated(tmp_path, 3, min_in_sync_replicas=2) as group:
        await acknowledged(group[0], b"seen")
        await until_async(lambda: _has(group[2], 1))
        await group[1].crash()
        await group[0].crash()
        await group[2].until_role("writer")
        assert await bodies(group[2]) == [b"seen"]
        await group.all_in_sync(2)

        await group[2].crash()
        await group[2].start("writer")
        assert reasons(group[2])[-1] == "restart"
        assert await bodies(group[2]) == [b"seen"]
        assert isinstance(
            await refusal(group[2].client.send("T", 0, b"refused")), errors.SlaveNotAvailable
        )


async def test_a_restart_below_the_floor_shows_nothing_new(tmp_path: Path) -> None:
    options = {**IMPATIENT, "in_sync_lag_s_max": 3600.0, "min_in_sync_replicas": 2}
    async with replicated(tmp_path, **options) as group:
        await group[0].client.send("T", 0, b"seen")
        await until_async(lambda: _has(group[1], 1))
        await group[1].crash()
        late = await group[0].client.send("T", 0, b"late")
        assert late.status == pb.SEND_STATUS_FLUSH_SLAVE_TIMEOUT
        group[0].reconfigure(in_sync_lag_s_max=0.5)
        for _ in range(2):  # the second finds that nobody else is in sync
            await group[0].crash()
            await group[0].start("writer")
            await group.all_in_sync(0)
            assert (await group[0].client.pull("T", 0, 0)).count == 1
        await group[1].start("follower")
        await group.all_in_sync(0, 1)
        await until_async(lambda: _has(group[0], 2))


async def test_a_set_of_one_shows_what_it_has_where_the_floor_allows(tmp_path: Path) -> None:
    async with replicated(tmp_path, 3) as group:
        await acknowledged(group[0], b"seen")
        await group[1].crash()
        await group[0].crash()
        await group[2].until_role("writer")
        await group.all_in_sync(2)
        await acknowledged(group[2], b"new")
        assert await bodies(group[2]) == [b"seen", b"new"]


# --- machines lose what was not on their disks ----------------------------------------------------


@contextmanager
def rebooted(number: int) -> Iterator[None]:
    """What is opened from now on is opened after a boot of the machine."""
    with mock.patch.object(OsFiles, "boot_id", return_value=f"boot {number}"):
        yield


def peers(*addresses: str) -> tuple[str, ...]:
    return tuple(f"{number}@{address}" for number, address in enumerate(addresses))


async def test_a_writer_whose_machine_failed_is_no_longer_who_it_was(tmp_path: Path) -> None:
    async with replicated(tmp_path) as group:
        await acknowledged(group[0], b"a")
        before = group[0].opened.store_id
        await group[0].crash()
        with rebooted(2):
            await group[0].start("follower")
            assert group[0].opened.store_id != before
            await group[1].until_role("writer")
            await group.all_in_sync(0, 1)
            assert group[0].opened.former_store_id == ""
        assert await bodies(group[1]) == [b"a"]


async def test_after_all_machines_failed_the_longest_log_leads(tmp_path: Path) -> None:
    async with replicated(tmp_path) as group:
        await acknowledged(group[0], b"a")
        await group.in_step()
        known = peers(*(group[n].internal_address for n in (0, 1)))
        for number in (0, 1):
            group[number].reconfigure(peers=known)
        await group[1].crash()
        await group.all_in_sync(0)
        await group[1].start("follower")
        await group.all_in_sync(0, 1)
        await group[1].crash()
        await group[0].client.send("T", 0, b"only here")
        await group[0].crash()
        with rebooted(2):
            await group[1].start("follower")
            await group[0].start()
            await group[0].until_role("writer")
            assert reasons(group[0])[-1] == "unclean"
            await group.all_in_sync(0, 1)
            assert await bodies(group[0]) == [b"a", b"only here"]


# --- the lease is gone ----------------------------------------------------------------------------


async def test_a_deleted_lease_is_written_anew_by_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with live_group(tmp_path, **REPLICATED) as group:
        await group.all_in_sync(0, 1)
        begun = group.lease_record()["epochs"]
        group.lease.unlink()
        await until(group.lease.exists)
        assert group.lease_record()["holder_id"] == 0
        assert group.lease_record()["epochs"] == begun != []
        await group.all_in_sync(0, 1)
    followed = [record for record in caplog.records if record.message == "following"]
    assert len(followed) == 1, "nobody left a writer that spoke"


async def test_a_lease_that_is_lost_with_its_writer_keeps_the_list_of_epochs(
    tmp_path: Path,
) -> None:
    async with live_group(tmp_path, **REPLICATED) as group:
        await group.all_in_sync(0, 1)
        known = peers(*(group[n].internal_address for n in (0, 1)))
        for number in (1, 0):
            group[number].reconfigure(peers=known)
            await group[number].crash()
            if number:
                await group[1].start("follower")
                await group.all_in_sync(0, 1)
        begun = group.lease_record()["epochs"]
        group.lease.unlink()
        await group[0].start()
        await until(lambda: "recreated" in [*reasons(group[0]), *reasons(group[1])])
        await group.all_in_sync(0, 1)
        assert group.lease_record()["epochs"][:-1] == begun != []


async def test_a_writer_that_starts_while_its_lease_is_away_waits(tmp_path: Path) -> None:
    """Also with its disk, and a follower that has promised nothing to anybody else."""
    tried = asyncio.Event()

    async def read(*_: object) -> None:
        tried.set()
        raise errors.LeaseUnavailable("away")

    async with replicated(tmp_path) as group:
        await acknowledged(group[0], b"before")
        changes = len(group[0].changes)
        with (
            mock.patch.object(FileLease, "read", read),
            mock.patch.object(FileLease, "write", side_effect=errors.LeaseUnavailable("away")),
        ):
            await group[0].crash()
            await group[0].start("follower")
            for _ in range(3):  # looks at the lease
                tried.clear()
                await tried.wait()
            assert [group[0].role, group[1].role] == ["follower", "follower"]
            assert len(group[0].changes) == changes
        await until(lambda: "writer" in (group[0].role, group[1].role))
        leads = group[0] if group[0].role == "writer" else group[1]
        assert await bodies(leads) == [b"before"]


async def test_a_writer_whose_lease_was_taken_follows(tmp_path: Path) -> None:
    async with replicated(tmp_path) as group:
        await acknowledged(group[0], b"a")
        store_id = group[1].opened.store_id
        content = json.loads(group.lease.read_text())
        content["record"] |= {
            "holder_id": 1,
            "holder_store_id": store_id,
            "in_sync": [[1, store_id]],
            "electable": [[1, store_id]],
            "opened": False,
            "reason": "failover",
        }
        group.lease.write_text(json.dumps({**content, "version": "another"}))
        await group[1].until_role("writer")
        await until(lambda: "deposed" in reasons(group[0]))
        await group[0].until_role("follower")
        step_down = group[0].members.StepDown(member_pb2.StepDownRequest())
        assert isinstance(await refusal(step_down), errors.NotWriter)
        await group.all_in_sync(0, 1)
        assert await bodies(group[1]) == [b"a"]


# --- how members stand ----------------------------------------------------------------------------


async def test_members_tell_how_they_stand(tmp_path: Path) -> None:
    async with live_group(tmp_path, **REPLICATED) as group:
        await group.all_in_sync(0, 1)
        await group.in_step()
        found = [
            await group[n].members.DescribeReplica(member_pb2.DescribeReplicaRequest())
            for n in (0, 1)
        ]
        assert [answer.role for answer in found] == [
            common_pb2.MEMBER_ROLE_WRITER,
            common_pb2.MEMBER_ROLE_FOLLOWER,
        ]
        for number, answer in enumerate(found):
            assert (answer.member_id, answer.store_id) == (number, group[number].opened.store_id)
            assert answer.epoch == 1


@pytest.mark.parametrize("mode", [ReplicationMode.APPENDED, ReplicationMode.FLUSHED])
async def test_a_message_is_seen_when_everybody_in_sync_has_it(
    tmp_path: Path, mode: ReplicationMode
) -> None:
    async with replicated(tmp_path, replication_mode=mode) as group:
        for number in range(20):
            await acknowledged(group[0], b"%d" % number)
            assert len(await bodies(group[0])) == number + 1
        await until_async(lambda: _has(group[1], 20))


async def _has(member: LiveMember, count: int) -> bool:
    """A follower may not have the topic yet."""
    try:
        return len(await bodies(member)) == count
    except grpc.aio.AioRpcError as error:
        if isinstance(error_from(error), errors.TopicNotFound):
            return False
        raise
