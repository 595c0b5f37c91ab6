"""The thread that writes events and the label, beside an API that is there, slow or away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import LeaseUnavailable
from cometmq.member.app import WRITER
from cometmq.member.config import MemberConfig
from cometmq.member.lease.kube import Access, KubeApi
from cometmq.member.pod.events import BURST, SERIES_MAX, EventReason, EventSeries, PodRef
from cometmq.member.pod.reporter import EventCollector, PodReporter, open_reporter
from cometmq.member.pod.role_label import LABEL, RoleLabel
from tests.support.kube.lease_api import LeaseApi, lease_api
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import wait_until

POD = PodRef("queues", "prod-broker-a-1", "uid-1")
LEFT = EventReason.LEFT_IN_SYNC
PEERS = tuple(f"{n}@prod-broker-a-{n}.prod-broker-a.queues.svc:10912" for n in range(3))


class Stuck(KubeApi):
    """Takes calls, and answers none before ``gate`` opens; then the API is away."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked = threading.Event()

    def call(self, *_: Any) -> tuple[int, Any]:
        self.asked.set()
        assert self.gate.wait(30)
        raise LeaseUnavailable("away")


@contextmanager
def reporting(api: KubeApi) -> Iterator[PodReporter]:
    label = RoleLabel(POD, ["prod-broker-a-0"], WRITER)
    reporter = PodReporter(EventSeries(POD), label, WallClock(), api)
    yield reporter
    reporter.close(5.0)


@pytest.fixture
def served() -> Iterator[LeaseApi]:
    with lease_api() as found:
        yield found


def of(served: LeaseApi) -> KubeApi:
    return KubeApi(lambda: Access(served.address))


def outcomes(reporter: PodReporter) -> dict[str, float]:
    (family,) = EventCollector(reporter).collect()
    return {sample.labels["outcome"]: sample.value for sample in family.samples}


def test_events_and_the_label_reach_the_api(served: LeaseApi) -> None:
    served.labels["prod-broker-a-0"] = {LABEL: "writer"}
    with reporting(of(served)) as reporter:
        reporter.show_role(WRITER)
        reporter.record(LEFT, "member 0 is no longer in sync")
        wait_until("the event is there", lambda: served.events)
        wait_until("the label is there", lambda: served.labels.get(POD.name) == {LABEL: "writer"})
        wait_until("no other has it", lambda: not served.labels["prod-broker-a-0"])
        wait_until("it is counted", lambda: outcomes(reporter) == {"taken": 1, "dropped": 0})


def test_what_was_recorded_last_is_written_before_the_end(served: LeaseApi) -> None:
    with reporting(of(served)) as reporter:
        reporter.record(EventReason.ROLE_HANDED_OVER, "to member 0")
        reporter.show_role("")
    assert served.reasons() == [(POD.name, "RoleHandedOver")]
    assert served.labels[POD.name] == {LABEL: None}


def test_an_api_that_never_answers_holds_up_nobody() -> None:
    """What is recorded meanwhile is bounded, and dropped and counted in the end."""
    api = Stuck()
    with reporting(api) as reporter:
        reporter.show_role(WRITER)
        assert api.asked.wait(10)
        for number in range(10 * SERIES_MAX):
            reporter.record(LEFT, f"member {number} left")
        reporter.close(0.0)
        assert outcomes(reporter) == {"taken": 0, "dropped": 10 * SERIES_MAX}
        api.gate.set()


def test_a_refusal_says_which_rights_are_missing(
    served: LeaseApi, caplog: pytest.LogCaptureFixture
) -> None:
    served.failing = 403
    with reporting(of(served)) as reporter:
        reporter.record(LEFT, "member 0 left")
        wait_until("it is said", lambda: caplog.records)
    assert "rights" in str(vars(caplog.records[0])["fields"])


def test_a_storm_is_one_object(served: LeaseApi) -> None:
    served.gate.clear()
    with reporting(of(served)) as reporter:
        for _ in range(100 * BURST):
            reporter.record(LEFT, "member 0 left")
        served.gate.set()
    (event,) = served.events.values()
    assert event["series"]["count"] == 100 * BURST
    assert served.calls.count("POST") == 1
    assert served.calls.count("PATCH") <= 1


# --- who reports ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lease": "kubernetes://queues/prod-broker-a"},
        {"pod_name": "prod-broker-a-1"},
        {"pod_name": "prod-broker-a-1", "lease": Path("/lease.json").as_uri()},
    ],
)
def test_outside_of_a_pod_nothing_is_reported(options: dict[str, str]) -> None:
    reporter = open_reporter(MemberConfig(**options), WRITER, WallClock())  # type: ignore[arg-type]
    assert reporter is None


def test_a_pod_reports_about_itself_and_knows_its_neighbours(
    served: LeaseApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"""clusters: [{{name: c, cluster: {{server: "{served.address}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    served.labels = {f"prod-broker-a-{n}": {LABEL: "writer"} for n in range(3)}
    options = MemberConfig(
        pod_name=POD.name,
        pod_uid=POD.uid,
        member_id=1,
        lease="kubernetes://queues/prod-broker-a",
        peers=PEERS,
    )
    reporter = open_reporter(options, WRITER, WallClock())
    assert reporter is not None
    reporter.show_role(WRITER)
    reporter.record(LEFT, "member 0 left")
    reporter.close(5.0)
    (event,) = served.events.values()
    assert event["regarding"]["namespace"] == "queues"
    assert event["regarding"]["uid"] == "uid-1"
    assert served.labels == {
        POD.name: {LABEL: "writer"},
        "prod-broker-a-0": {},
        "prod-broker-a-2": {},
    }
