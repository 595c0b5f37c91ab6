"""The Lease as Kubernetes' official client sees it: what people's tools are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client

from cometmq.member.lease.kube import KubeApi, access
from cometmq.member.lease.stores import NOT_THERE, KubernetesLease
from tests.kube.rights import LEASE, Rights
from tests.support.cluster.lease_contract import HELD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def official(rights: Rights) -> Any:
    """Its API object, with the rights of a member's pod."""
    settings = client.Configuration()
    settings.host = rights.server.address
    settings.ssl_ca_cert = str(rights.pod / "ca.crt")
    settings.api_key = {"authorization": f"Bearer {rights.token.strip()}"}
    return client.CoordinationV1Api(client.ApiClient(settings))


def ours(rights: Rights) -> KubernetesLease:
    found = access(rights.environment(), rights.pod)
    return KubernetesLease(rights.namespace, LEASE, "g1", KubeApi(lambda: found))


async def test_it_reads_what_we_have_written(rights: Rights) -> None:
    await ours(rights).write(HELD, NOT_THERE)
    found = official(rights).read_namespaced_lease(LEASE, rights.namespace)
    assert found.spec.holder_identity == f"{HELD.group}-{HELD.holder_id}"
    assert found.spec.lease_duration_seconds >= HELD.duration_s
    assert found.spec.renew_time.tzinfo is not None


async def test_we_go_on_after_it_has_written(rights: Rights) -> None:
    """A label that somebody puts on the Lease stays there, and costs the writer one renewal."""
    lease, api = ours(rights), official(rights)
    version = await lease.write(HELD, NOT_THERE)
    found = api.read_namespaced_lease(LEASE, rights.namespace)
    found.metadata.labels = {"team": "queues"}
    api.replace_namespaced_lease(LEASE, rights.namespace, found)
    reading = await lease.read()
    assert reading.record == HELD
    assert reading.version != version
    renewed = replace(HELD, renewals=1)
    await lease.write(renewed, reading.version)
    found = api.read_namespaced_lease(LEASE, rights.namespace)
    assert found.metadata.labels["team"] == "queues"
    assert (await lease.read()).record == renewed
