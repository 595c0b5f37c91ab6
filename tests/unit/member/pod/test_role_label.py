"""The label of a role, beside a model of the API that knows pods and their labels."""

from __future__ import annotations

import pytest

from cometmq.member.pod.events import PodRef
from cometmq.member.pod.role_label import AGAIN_S, JSON_PATCH, LABEL, PAUSE_S_MAX, RoleLabel

NAMES = ("a-0", "a-1", "a-2")


class Pods:
    """The label of each pod that is there. ``status``: answers with it instead."""

    def __init__(self) -> None:
        self.labels: dict[str, str | None] = dict.fromkeys(NAMES)
        self.status = 0
        self.calls = 0

    def settle(self, label: RoleLabel, now_s: float) -> None:
        """Carry out what is due."""
        while (found := label.next_call(now_s)) is not None:
            call, about = found
            self.calls += 1
            name = call.path.removeprefix("/api/v1/namespaces/queues/pods/")
            label.answered(about, self.status or self._patch(name, call.body), now_s)
            if call.content_type == JSON_PATCH:
                assert call.body[0]["path"] == "/metadata/labels/cometmq.io~1role"

    def _patch(self, name: str, body: object) -> int:
        if name not in self.labels:
            return 404
        if isinstance(body, list):
            if self.labels[name] != body[0]["value"]:
                return 422
            self.labels[name] = None
        elif isinstance(body, dict):
            self.labels[name] = body["metadata"]["labels"][LABEL]
        return 200


def label_of(number: int) -> RoleLabel:
    others = [name for name in NAMES if name != NAMES[number]]
    return RoleLabel(PodRef("queues", NAMES[number]), others, "writer")


@pytest.fixture
def pods() -> Pods:
    return Pods()


def test_a_member_labels_its_own_pod(pods: Pods) -> None:
    label = label_of(1)
    assert label.next_call(0.0) is None, "no role is known yet"
    label.show("follower", 0.0)
    pods.settle(label, 0.0)
    assert pods.labels == {"a-0": None, "a-1": "follower", "a-2": None}


def test_a_writer_takes_the_label_from_a_pod_that_cannot(pods: Pods) -> None:
    """Its node is gone; the label of a follower, and a pod that is not there, change nothing."""
    pods.labels = {"a-0": "writer", "a-1": "follower"}
    label = label_of(1)
    label.show("writer", 0.0)
    pods.settle(label, 0.0)
    assert pods.labels == {"a-0": None, "a-1": "writer"}


def test_what_somebody_changed_does_not_stay(pods: Pods) -> None:
    label = label_of(0)
    label.show("writer", 0.0)
    pods.settle(label, 0.0)
    pods.labels["a-0"] = "follower"
    assert label.wait_s(0.0) == AGAIN_S
    pods.settle(label, AGAIN_S - 1)
    assert pods.labels["a-0"] == "follower"
    pods.settle(label, AGAIN_S)
    assert pods.labels["a-0"] == "writer"


def test_a_member_that_ends_has_no_label(pods: Pods) -> None:
    label = label_of(0)
    label.show("writer", 0.0)
    pods.settle(label, 0.0)
    label.show("", 1.0)
    pods.settle(label, 1.0)
    assert pods.labels["a-0"] is None
    assert label.wait_s(1.0) is None


@pytest.mark.parametrize("status", [403, 500])
def test_a_call_that_failed_is_made_again_after_a_pause(pods: Pods, status: int) -> None:
    pods.status = status
    label = label_of(0)
    label.show("writer", 0.0)
    for second in range(60):
        pods.settle(label, second)
    assert pods.calls <= 8
    pods.status = 0
    pods.settle(label, 60 + PAUSE_S_MAX)
    assert pods.labels["a-0"] == "writer"


def test_the_answer_for_a_role_that_is_over_changes_nothing(pods: Pods) -> None:
    label = label_of(0)
    label.show("writer", 0.0)
    found = label.next_call(0.0)
    label.show("follower", 0.0)
    assert found is not None
    label.answered(found[1], 200, 0.0)
    pods.settle(label, 0.0)
    assert pods.labels["a-0"] == "follower"
