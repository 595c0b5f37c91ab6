"""Both keepers of a lease through the same tests; the Kubernetes client speaks to a model of its
API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import ConfigInvalid, LeaseConflict, LeaseUnavailable
from cometmq.member.leases import (
    NOT_THERE,
    FileLease,
    KubernetesLease,
    Lease,
    Reading,
    open_lease,
)
from cometmq.replication.lease import LeaseRecord
from tests.support.lease_api import LeaseApi, lease_api

RECORD = LeaseRecord("g1", 0, "store-0", "host:1", 3, duration_s=0.5)
KEY = ("spaces", "broker-g1")

Open = Callable[[], Lease]


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with lease_api() as found:
        yield found


def kubernetes(api: LeaseApi) -> Lease:
    def connect() -> Any:
        from kubernetes import client

        settings = client.Configuration(host=api.address)
        settings.retries = False
        return client.CoordinationV1Api(client.ApiClient(settings))

    return KubernetesLease(*KEY, connect)


@pytest.fixture(params=["file", "kubernetes"])
def open_it(request: pytest.FixtureRequest, tmp_path: Path, api: LeaseApi) -> Open:
    """Opens the same lease again and again, as processes do."""
    if request.param == "file":
        return lambda: FileLease(tmp_path / "leases" / "g1.json")
    return lambda: kubernetes(api)


async def test_a_lease_that_nobody_has_written(open_it: Open) -> None:
    assert await open_it().read() == Reading(None, NOT_THERE)


async def test_what_is_written_is_read(open_it: Open) -> None:
    lease = open_it()
    version = await lease.write(RECORD, NOT_THERE)
    assert await open_it().read() == Reading(RECORD, version)
    released = replace(RECORD, released=True, transfer_to=1, log_end=2**40, renewals=9)
    later = await lease.write(released, version)
    assert later != version
    assert await open_it().read() == Reading(released, later)


async def test_only_the_version_that_was_read_can_be_replaced(open_it: Open) -> None:
    version = await open_it().write(RECORD, NOT_THERE)
    for stale in (NOT_THERE, "1000"):
        with pytest.raises(LeaseConflict):
            await open_it().write(replace(RECORD, epoch=9), stale)
    await open_it().write(replace(RECORD, epoch=4), version)
    with pytest.raises(LeaseConflict):
        await open_it().write(replace(RECORD, epoch=9), version)
    found = await open_it().read()
    assert found.record == replace(RECORD, epoch=4)


@pytest.mark.parametrize("first", [True, False], ids=["new", "known"])
async def test_one_of_many_wins(open_it: Open, first: bool) -> None:
    version = NOT_THERE if first else await open_it().write(RECORD, NOT_THERE)
    tries = [replace(RECORD, holder_id=n) for n in range(8)]
    answers = await asyncio.gather(
        *(open_it().write(record, version) for record in tries), return_exceptions=True
    )
    won = [n for n, answer in enumerate(answers) if isinstance(answer, str)]
    assert len(won) == 1
    assert sum(isinstance(answer, LeaseConflict) for answer in answers) == len(tries) - 1
    assert (await open_it().read()).record == tries[won[0]]


# --- a file ---------------------------------------------------------------------------------------


async def test_a_file_that_is_no_lease(tmp_path: Path) -> None:
    path = tmp_path / "g1.json"
    lease = FileLease(path)
    for content in ("", "{", "[]", '{"version": 1}', '{"version": 1, "record": {"group": 1}}'):
        path.write_text(content)
        with pytest.raises(LeaseUnavailable, match=r"g1\.json"):
            await lease.read()


async def test_the_file_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "g1.json"
    await FileLease(path).write(RECORD, NOT_THERE)
    content = json.loads(path.read_text())
    assert content["version"] == "1"
    assert content["record"]["holder_store_id"] == "store-0"


# --- Kubernetes -----------------------------------------------------------------------------------


async def test_the_standard_fields_tell_people_who_writes(api: LeaseApi) -> None:
    lease = kubernetes(api)
    version = await lease.write(RECORD, NOT_THERE)
    spec = api.leases[KEY]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("g1-0", 1)
    assert spec["leaseTransitions"] == 0
    first = spec["renewTime"]
    version = await lease.write(replace(RECORD, renewals=1), version)
    spec = api.leases[KEY]["spec"]
    assert spec["renewTime"] > first
    assert spec["acquireTime"] == first
    await lease.write(replace(RECORD, holder_id=1, renewals=2), version)
    spec = api.leases[KEY]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("g1-1", 1)
    annotations = api.leases[KEY]["metadata"]["annotations"]
    assert annotations["cometmq.io/holder_id"] == "1"
    assert annotations["cometmq.io/transfer_to"] == "null"


async def test_what_others_have_put_there_stays(api: LeaseApi) -> None:
    """A chart may make the object, with labels and an owner."""
    api.put(KEY, {"metadata": {"name": KEY[1], "labels": {"a": "b"}}, "spec": {}}, new=True)
    lease = kubernetes(api)
    found = await lease.read()
    assert found.record is None
    assert found.version != NOT_THERE
    await lease.write(RECORD, found.version)
    assert api.leases[KEY]["metadata"]["labels"] == {"a": "b"}
    assert (await kubernetes(api).read()).record == RECORD


async def test_a_write_whose_answer_is_lost_is_not_known(api: LeaseApi) -> None:
    lease = kubernetes(api)
    version = await lease.write(RECORD, NOT_THERE)
    api.lose_answers = 1
    later = replace(RECORD, renewals=1)
    calls = len(api.calls)
    with pytest.raises(LeaseUnavailable):
        await lease.write(later, version)
    assert api.calls[calls:] == ["PUT"], "sent once: a second would conflict with the first"
    assert (await lease.read()).record == later


@pytest.mark.parametrize("status", [403, 500])
async def test_an_api_that_refuses(api: LeaseApi, status: int) -> None:
    api.failing = status
    with pytest.raises(LeaseUnavailable, match=str(status)):
        await kubernetes(api).read()


async def test_an_api_that_is_away() -> None:
    with lease_api() as api:
        lease = kubernetes(api)
    with pytest.raises(LeaseUnavailable):
        await lease.read()


async def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    with pytest.raises(LeaseUnavailable, match="no Kubernetes API is configured"):
        await open_lease("kubernetes://spaces/broker-g1").read()


async def test_annotations_that_are_not_ours(api: LeaseApi) -> None:
    await kubernetes(api).write(RECORD, NOT_THERE)
    api.leases[KEY]["metadata"]["annotations"]["cometmq.io/epoch"] = "{"
    with pytest.raises(LeaseUnavailable, match="broker-g1"):
        await kubernetes(api).read()


# --- addresses ------------------------------------------------------------------------------------


def test_where_a_lease_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "with blanks" / "g1.json"
    assert isinstance(open_lease(path.as_uri()), FileLease)
    assert isinstance(open_lease("kubernetes://spaces/broker-g1"), KubernetesLease)


@pytest.mark.parametrize(
    "url", ["", "g1.json", "file://", "file://host/path", "kubernetes://only", "http://a/b"]
)
def test_what_is_no_address_of_a_lease(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="lease"):
        open_lease(url)
