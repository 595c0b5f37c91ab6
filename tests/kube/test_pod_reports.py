"""Events and the role's label on a real API server, with the rights that the chart gives."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.clock import SystemClock
from cometmq.member.app import WRITER
from cometmq.member.lease.kube import KubeApi, access
from cometmq.member.pod.events import NOTE_LENGTH_MAX, EventReason, EventSeries, PodRef
from cometmq.member.pod.reporter import PodReporter
from cometmq.member.pod.role_label import LABEL, RoleLabel
from tests.kube.rights import LEASE, Rights
from tests.support.kube.api_server import Body
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = (f"{LEASE}-0", f"{LEASE}-1")
STRANGER = "prod-namesrv-0"


def pods_of(rights: Rights) -> str:
    return f"/api/v1/namespaces/{rights.namespace}/pods"


def make_pods(rights: Rights, *names: str) -> dict[str, str]:
    """Pods that no node runs; their uids."""
    rights.server.done(
        "POST",
        f"/api/v1/namespaces/{rights.namespace}/serviceaccounts",
        {"metadata": {"name": "default"}},
    )
    found = {}
    for name in names:
        container = {"name": "member", "image": "none", "command": ["true"]}
        body: Body = {
            "metadata": {"name": name, "labels": {LABEL: WRITER}},
            "spec": {"containers": [container], "automountServiceAccountToken": False},
        }
        found[name] = rights.server.done("POST", pods_of(rights), body)["metadata"]["uid"]
    return found


def label(rights: Rights, name: str) -> str | None:
    labels = rights.server.done("GET", f"{pods_of(rights)}/{name}")["metadata"].get("labels", {})
    found: str | None = labels.get(LABEL)
    return found


def events(rights: Rights, kind: str = "events.k8s.io/v1") -> list[Body]:
    base = f"/apis/{kind}" if "/" in kind else f"/api/{kind}"
    found: list[Body] = rights.server.done("GET", f"{base}/namespaces/{rights.namespace}/events")[
        "items"
    ]
    return found


def test_the_api_takes_what_a_member_reports(rights: Rights) -> None:
    uids = make_pods(rights, *NAMES, STRANGER)
    pod = PodRef(rights.namespace, NAMES[1], uids[NAMES[1]])
    api = KubeApi(lambda: access(rights.environment(), rights.pod))
    role = RoleLabel(pod, [NAMES[0]], WRITER)
    reporter = PodReporter(EventSeries(pod), role, SystemClock(), api)
    reporter.show_role(WRITER)
    for reason in EventReason:
        reporter.record(reason, f"{reason.name} " + "ä" * NOTE_LENGTH_MAX)
    wait_until("all events are there", lambda: len(events(rights)) == len(EventReason))
    for _ in range(3):
        reporter.record(EventReason.LEFT_IN_SYNC, "member 0 is no longer in sync")
    wait_until("the series is counted", lambda: 3 in [count(one) for one in events(rights)])
    wait_until("the label moved", lambda: label(rights, NAMES[0]) is None)
    assert label(rights, NAMES[1]) == WRITER
    reporter.show_role("")
    reporter.close(10.0)
    assert label(rights, NAMES[1]) is None
    assert reporter.counts == (len(EventReason) + 3, 0)
    # As `kubectl get events` and `kubectl describe pod` read them.
    (counted,) = [one for one in events(rights, "v1") if one["message"].startswith("member 0")]
    assert counted["involvedObject"]["uid"] == uids[NAMES[1]]
    assert counted["series"]["count"] == 3


def count(event: Body) -> int:
    series: Body = event.get("series") or {}
    found: int = series.get("count", 1)
    return found


def test_the_rights_end_at_the_pods_of_the_group(rights: Rights) -> None:
    make_pods(rights, *NAMES, STRANGER)
    api = KubeApi(lambda: access(rights.environment(), rights.pod))
    patch: dict[str, Any] = {"metadata": {"labels": {LABEL: "follower"}}}

    def status(method: str, path: str, body: Any = None) -> int:
        return api.call(method, path, body, 5.0, "application/merge-patch+json")[0]

    assert status("PATCH", f"{pods_of(rights)}/{NAMES[0]}", patch) == 200
    assert status("PATCH", f"{pods_of(rights)}/{STRANGER}", patch) == 403
    for method in ("GET", "DELETE"):
        assert status(method, f"{pods_of(rights)}/{NAMES[0]}") == 403
    listed = f"/apis/events.k8s.io/v1/namespaces/{rights.namespace}/events"
    assert status("GET", listed) == 403
