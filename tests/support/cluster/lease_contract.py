"""What every keeper of a lease promises, as tests that do not know which one they speak to.

A :class:`Keeper` is a place that keeps one lease, and what may happen to it there. Each keeper's
own tests inherit :class:`LeaseContract` and give the fixture ``keeper``; those that speak to
Kubernetes' API, modelled or real, inherit :class:`KubernetesContract`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar
from unittest import mock

import pytest

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease import stores
from cometmq.member.lease.stores import NOT_THERE, KubernetesLease, Lease, Reading
from cometmq.replication.lease import LeaseRecord, ReplicaId
from cometmq.replication.watermarks import NO_WATERMARKS, HighWatermarks
from tests.support.waiting import until_async

T = TypeVar("T")

HELD = LeaseRecord("g1", 0, "store-0", "host:1", 3, duration_s=0.5)
FULL = replace(
    HELD,
    in_sync=(ReplicaId(0, "store-0"), ReplicaId(1, "store-1")),
    electable=(ReplicaId(0, "store-0"), ReplicaId(1, "store-1"), ReplicaId(2, 'store "ü"')),
    reason="failover",
    opened=False,
    released=True,
    transfer_to=1,
    log_end=2**40,
    renewals=9,
    shown=HighWatermarks(3 << 40, 2 << 40, 1 << 40),
)


class Keeper(Protocol):
    """One lease at its place. What a method does for a block is undone at its end."""

    def open(self) -> Lease:
        """As a process does that has just begun."""

    def delete(self) -> None:
        """Somebody removes the lease."""

    def spoil(self) -> None:
        """Somebody writes over it what is no record of ours."""

    def refusing(self) -> AbstractContextManager[None]:
        """Who asks has no right to it."""

    def away(self) -> AbstractContextManager[None]:
        """The place cannot be reached."""

    def stuck(self) -> AbstractContextManager[None]:
        """The place is there and answers nothing; what was asked may be done at the end."""


class LeaseContract:
    """Of every keeper."""

    async def test_nobody_has_written(self, keeper: Keeper) -> None:
        assert await keeper.open().read() == Reading(None, NOT_THERE)

    async def test_what_is_written_is_read(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        assert await keeper.open().read() == Reading(HELD, version)
        later = await lease.write(FULL, version)
        assert later != version
        assert await keeper.open().read() == Reading(FULL, later)

    async def test_only_what_was_read_can_be_replaced(self, keeper: Keeper) -> None:
        first = await keeper.open().write(HELD, NOT_THERE)
        second = await keeper.open().write(replace(HELD, epoch=4), first)
        for stale in (NOT_THERE, first):
            with pytest.raises(LeaseConflict):
                await keeper.open().write(replace(HELD, epoch=9), stale)
        assert await keeper.open().read() == Reading(replace(HELD, epoch=4), second)

    @pytest.mark.parametrize("first", [True, False], ids=["new", "known"])
    async def test_one_of_many_wins(self, keeper: Keeper, first: bool) -> None:
        version = NOT_THERE if first else await keeper.open().write(HELD, NOT_THERE)
        tries = [replace(HELD, renewals=n + 1) for n in range(8)]
        answers = await asyncio.gather(
            *(keeper.open().write(record, version) for record in tries), return_exceptions=True
        )
        won = [n for n, answer in enumerate(answers) if isinstance(answer, str)]
        assert len(won) == 1
        assert sum(isinstance(answer, LeaseConflict) for answer in answers) == len(tries) - 1
        assert (await keeper.open().read()).record == tries[won[0]]

    # --- somebody deletes it ---

    @pytest.mark.parametrize("known", [True, False], ids=["same client", "new client"])
    async def test_a_deleted_lease_is_not_replaced(self, keeper: Keeper, known: bool) -> None:
        """Its holder must see that it is gone before it writes it anew."""
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        keeper.delete()
        with pytest.raises(LeaseConflict):
            await (lease if known else keeper.open()).write(replace(HELD, epoch=9), version)
        assert await lease.read() == Reading(None, NOT_THERE)

    async def test_a_deleted_lease_is_written_anew(self, keeper: Keeper) -> None:
        """Nothing that was read of the old one can be used with the new one."""
        lease, late = keeper.open(), keeper.open()
        before = await lease.write(HELD, NOT_THERE)
        await late.read()
        keeper.delete()
        assert (await lease.read()).record is None
        after = await lease.write(replace(HELD, renewals=1), NOT_THERE)
        assert after != before
        with pytest.raises(LeaseConflict):
            await late.write(replace(HELD, epoch=9), before)
        assert await late.read() == Reading(replace(HELD, renewals=1), after)

    # --- what is there is not ours ---

    async def test_what_does_not_read_is_not_replaced(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        keeper.spoil()
        with pytest.raises(LeaseUnavailable, match="does not read"):
            await lease.read()
        with pytest.raises((LeaseConflict, LeaseUnavailable)):
            await lease.write(replace(HELD, epoch=9), version)
        with pytest.raises(LeaseUnavailable, match="does not read"):
            await keeper.open().read()

    async def test_another_groups_lease_is_not_ours(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        await keeper.open().write(replace(HELD, group="g2", renewals=1), version)
        for other in (lease, keeper.open()):
            with pytest.raises(LeaseUnavailable, match="lease of g2: see the option lease"):
                await other.read()
        with pytest.raises((LeaseConflict, LeaseUnavailable)):
            await lease.write(replace(HELD, epoch=9), version)

    # --- it cannot be had ---

    async def test_who_has_no_right_is_told(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with keeper.refusing():
            with pytest.raises(LeaseUnavailable):
                await lease.read()
            with pytest.raises(LeaseUnavailable):
                await lease.write(replace(HELD, epoch=9), version)
        assert await lease.read() == Reading(HELD, version)
        assert await lease.write(FULL, version)

    async def test_a_place_that_is_away_comes_back_as_it_was(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with keeper.away():
            for other in (lease, keeper.open()):
                with pytest.raises(LeaseUnavailable):
                    await other.read()
                with pytest.raises(LeaseUnavailable):
                    await other.write(replace(HELD, epoch=9), version)
        assert await lease.read() == Reading(HELD, version)
        assert await lease.write(FULL, version)

    async def test_a_slow_answer_is_an_answer(self, keeper: Keeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with keeper.stuck():
            writing = asyncio.create_task(lease.write(FULL, version))
            await _does_not_end(writing)
        later = await writing
        assert await lease.read() == Reading(FULL, later)

    async def test_no_answer_is_no_knowledge(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write without an answer may still be done, once at most; a later write of ours, on the
        version that was read, is proof that it never will be.
        """
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        lost = replace(HELD, epoch=9)
        with monkeypatch.context() as patch, keeper.stuck():
            patch.setattr(stores, "DEADLINE_S", 0.2)
            with pytest.raises(LeaseUnavailable):
                await lease.write(lost, version)
        after = await lease.read()
        assert after.record in (HELD, lost)
        assert (after.version == version) is (after.record == HELD)
        try:
            settled = await lease.write(replace(HELD, epoch=4), after.version)
        except LeaseConflict:  # it was done between our reading and our writing
            after = await lease.read()
            assert after.record == lost
            settled = await lease.write(replace(HELD, epoch=4), after.version)
        with pytest.raises(LeaseConflict):
            await keeper.open().write(lost, version)
        assert await lease.read() == Reading(replace(HELD, epoch=4), settled)

    async def test_what_hangs_is_asked_once(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A disk may hang for hours: it takes one thread, and none that others wait for."""
        lease, begun, goes_on = keeper.open(), list[int](), threading.Event()
        version = await lease.write(HELD, NOT_THERE)
        read = lease._read  # type: ignore[attr-defined]

        def hangs() -> Reading:
            begun.append(threading.get_ident())
            goes_on.wait()
            found: Reading = read()
            return found

        try:
            with monkeypatch.context() as patch:
                patch.setattr(stores, "DEADLINE_S", 0.02)
                patch.setattr(lease, "_read", hangs)
                for _ in range(10):
                    with pytest.raises(LeaseUnavailable, match="no answer"):
                        await lease.read()
            assert len(begun) == 1
        finally:
            goes_on.set()
        assert await lease.read() == Reading(HELD, version)
        assert await lease.write(FULL, version)

    async def test_no_thread_is_no_answer(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with monkeypatch.context() as patch:
            refusal = mock.Mock(side_effect=RuntimeError("can't start new thread"))
            patch.setattr(threading.Thread, "start", refusal)
            for _ in range(2):
                with pytest.raises(LeaseUnavailable, match="can't start new thread"):
                    await lease.read()
        assert await lease.read() == Reading(HELD, version)
        assert await lease.write(FULL, version)


async def _does_not_end(task: asyncio.Task[T], for_s: float = 0.1) -> None:
    done, _ = await asyncio.wait([task], timeout=for_s)
    assert not done


# --- Kubernetes -----------------------------------------------------------------------------------

Body = dict[str, Any]


class KubernetesKeeper(Keeper, Protocol):
    """A Lease as an object that anybody may look at, and change."""

    def open(self, pod_name: str = "") -> KubernetesLease: ...

    def object(self) -> Body:
        """As it is now."""

    def put(self, body: Body) -> None:
        """Make it, or replace it, as an administrator."""

    def losing_answers(self) -> AbstractContextManager[None]:
        """Writes are carried out, and their connections break before the answer."""

    def unknown(self) -> AbstractContextManager[None]:
        """Our token is none."""


class KubernetesContract(LeaseContract):
    """Of the API of Kubernetes."""

    async def test_the_standard_fields_tell_people_who_writes(
        self, keeper: KubernetesKeeper
    ) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        spec = keeper.object()["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("g1-0", 1)
        assert spec["leaseTransitions"] == 0
        first = spec["renewTime"]
        version = await lease.write(replace(HELD, renewals=1), version)
        spec = keeper.object()["spec"]
        assert spec["renewTime"] > first
        assert spec["acquireTime"] == first
        other = LeaseRecord("g1", 1, "store-1", "host:2", 4)
        await lease.write(other, version)
        found = keeper.object()
        assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("g1-1", 1)
        annotations = found["metadata"]["annotations"]
        assert annotations["cometmq.io/holder_id"] == "1"
        assert annotations["cometmq.io/transfer_to"] == "null"

    async def test_two_releases_side_by_side_see_one_holder(self, keeper: KubernetesKeeper) -> None:
        """The release before calls the holder by group and member id, this one by its pod. Each
        reads what the other wrote, and neither takes another name for another holder.
        """
        before, now = keeper.open(), keeper.open("prod-broker-a-0")
        version = await before.write(HELD, NOT_THERE)
        first = keeper.object()["spec"]
        for number, lease in enumerate((now, before, now), 1):
            renewed = replace(HELD, renewals=number)
            version = await lease.write(renewed, (await lease.read()).version)
            spec = keeper.object()["spec"]
            assert spec["holderIdentity"] == ("prod-broker-a-0" if lease is now else "g1-0")
            assert (spec["leaseTransitions"], spec["acquireTime"]) == (0, first["acquireTime"])
            for reader in (before, now):
                assert await reader.read() == Reading(renewed, version)
        other = LeaseRecord("g1", 1, "store-1", "host:2", 4)
        another = keeper.open("prod-broker-a-1")
        await another.write(other, (await another.read()).version)
        spec = keeper.object()["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("prod-broker-a-1", 1)

    async def test_what_others_have_put_there_stays(self, keeper: KubernetesKeeper) -> None:
        """A chart may make the object; people and tools put labels and notes on it."""
        notes = {"labels": {"a": "b"}, "annotations": {"example.com/note": "{"}}
        keeper.put({"metadata": notes, "spec": {}})
        lease = keeper.open()
        found = await lease.read()
        assert found.record is None
        assert found.version != NOT_THERE
        with pytest.raises(LeaseConflict):
            await keeper.open().write(HELD, NOT_THERE)
        version = await lease.write(HELD, found.version)
        await lease.write(FULL, version)
        metadata = keeper.object()["metadata"]
        assert metadata["labels"] == notes["labels"]
        assert metadata["annotations"]["example.com/note"] == "{"
        assert (await keeper.open().read()).record == FULL

    async def test_what_was_on_a_deleted_one_goes_with_it(self, keeper: KubernetesKeeper) -> None:
        """An owner, above all, which may be gone too: the new one would be deleted with it."""
        keeper.put({"metadata": {"labels": {"a": "b"}}, "spec": {}})
        lease = keeper.open()
        await lease.write(HELD, (await lease.read()).version)
        keeper.delete()
        await lease.write(HELD, (await lease.read()).version)
        assert not keeper.object()["metadata"].get("labels")

    async def test_times_of_whole_seconds(self, keeper: KubernetesKeeper) -> None:
        """The API refuses a time that does not show its microseconds."""
        spec = {"holderIdentity": "g1-0", "acquireTime": "2026-01-01T00:00:00.000000Z"}
        keeper.put({"metadata": {}, "spec": spec})
        lease = keeper.open()
        version = (await lease.read()).version
        for number in range(2):
            version = await lease.write(replace(HELD, renewals=number), version)
        assert keeper.object()["spec"]["acquireTime"] == spec["acquireTime"]

    @pytest.mark.parametrize("hours", [-24, 24])
    async def test_no_clock_but_the_members_own_counts(
        self, keeper: KubernetesKeeper, hours: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ours and the API's may differ by a day: what stands in the object is for people."""

        class Elsewhere(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime.now(tz) + timedelta(hours=hours)

        monkeypatch.setattr(stores, "datetime", Elsewhere)
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        version = await lease.write(FULL, version)
        assert await keeper.open().read() == Reading(FULL, version)
        renewed = datetime.fromisoformat(keeper.object()["spec"]["renewTime"])
        off_hours = (renewed - datetime.now(UTC)).total_seconds() / 3600
        assert abs(off_hours - hours) < 1

    async def test_an_api_that_does_not_answer(
        self, keeper: KubernetesKeeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with monkeypatch.context() as patch, keeper.stuck():
            patch.setattr(stores, "DEADLINE_S", 0.2)
            for other in (lease, keeper.open()):
                with pytest.raises(LeaseUnavailable):
                    await other.read()
        assert await lease.read() == Reading(HELD, version)

    async def test_a_write_whose_answer_is_lost(self, keeper: KubernetesKeeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        later = replace(HELD, renewals=1)
        with keeper.losing_answers(), pytest.raises(LeaseUnavailable):
            await lease.write(later, version)

        async def done() -> bool:
            return (await lease.read()).record == later

        await until_async(done)
        found = await lease.read()
        assert found.version != version
        assert await lease.write(FULL, found.version)

    async def test_an_api_that_does_not_know_us(self, keeper: KubernetesKeeper) -> None:
        lease = keeper.open()
        version = await lease.write(HELD, NOT_THERE)
        with keeper.unknown():
            with pytest.raises(LeaseUnavailable, match="401"):
                await lease.read()
            with pytest.raises(LeaseUnavailable, match="401"):
                await lease.write(FULL, version)
        assert await lease.read() == Reading(HELD, version)

    async def test_what_an_older_release_left_standing_is_not_told(
        self, keeper: KubernetesKeeper
    ) -> None:
        """It writes what it knows of, and keeps the rest."""
        await keeper.open().write(FULL, NOT_THERE)
        found = keeper.object()
        later = replace(FULL, renewals=FULL.renewals + 1, shown=NO_WATERMARKS)
        for key, value in later.fields().items():
            if not key.startswith("shown"):
                found["metadata"]["annotations"][f"cometmq.io/{key}"] = json.dumps(value)
        keeper.put(found)
        assert (await keeper.open().read()).record == later

    async def test_what_a_later_release_knew_goes_with_the_next_record(
        self, keeper: KubernetesKeeper
    ) -> None:
        """Who comes after that one must not take it for true."""
        lease = keeper.open()
        await lease.write(HELD, NOT_THERE)
        found = keeper.object()
        found["metadata"]["annotations"]["cometmq.io/later"] = "no JSON"
        keeper.put(found)
        reading = await lease.read()
        assert reading.record == HELD
        await lease.write(FULL, reading.version)
        assert "cometmq.io/later" not in keeper.object()["metadata"]["annotations"]

    @pytest.mark.parametrize("text", ["", "{", "null", "[1, 2, 3, 4]", '"all"'])
    async def test_marks_that_nobody_understands_keep_nobody_from_the_rest(
        self, keeper: KubernetesKeeper, text: str
    ) -> None:
        await keeper.open().write(FULL, NOT_THERE)
        found = keeper.object()
        found["metadata"]["annotations"]["cometmq.io/shown"] = text
        keeper.put(found)
        assert (await keeper.open().read()).record == replace(FULL, shown=NO_WATERMARKS)

    async def test_annotations_that_contradict_themselves(self, keeper: KubernetesKeeper) -> None:
        await keeper.open().write(HELD, NOT_THERE)
        found = keeper.object()
        found["metadata"]["annotations"]["cometmq.io/in_sync"] = json.dumps([[7, "store-7"]])
        keeper.put(found)
        with pytest.raises(LeaseUnavailable, match="contradicts"):
            await keeper.open().read()
