"""Writes the events of a member, and the label of its role, to Kubernetes: in a thread of its own,
so that an API server that is slow or away holds up nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.clock import Clock
from cometmq.errors import LeaseUnavailable
from cometmq.flight_recorder import name_thread
from cometmq.member.config import MemberConfig
from cometmq.member.lease.kube import KubeApi
from cometmq.member.lease_place import place_of
from cometmq.member.pod.events import Call, EventReason, EventSeries, PodRef
from cometmq.member.pod.role_label import RoleLabel
from cometmq.telemetry import OutageLogger

log = logging.getLogger(__name__)

CALL_S_MAX = 2.0  # for an answer of the API
CLOSE_S_MAX = 1.0  # that what was recorded last may delay the end of a process
ADVICE = "the Role of the chart gives these rights: docs/how-to/install.md#rights"


class _Part(Protocol):
    def next_call(self, now_s: float) -> tuple[Call, Any] | None: ...
    def wait_s(self, now_s: float) -> float | None: ...
    def answered(self, about: Any, status: int, now_s: float) -> None: ...


class PodReporter:
    """An :class:`~cometmq.member.pod.events.EventRecorder` for a pod; ``None`` for a part that is
    not wanted. All methods may be called from any thread, and none waits for the API but ``close``.
    """

    def __init__(
        self,
        events: EventSeries | None,
        label: RoleLabel | None,
        clock: Clock,
        api: KubeApi | None = None,
    ) -> None:
        self._events = events
        self._label = label
        self._clock = clock
        self._api = api or KubeApi()
        self._changed = threading.Condition()
        self._closing = False
        self._parts: list[tuple[_Part, OutageLogger]] = []
        if label is not None:
            self._parts.append((label, _outage("the role's label is")))
        if events is not None:
            self._parts.append((events, _outage("events are")))
        self._thread = threading.Thread(target=self._run, name="pod-reports", daemon=True)
        self._thread.start()

    def record(self, reason: EventReason, note: str) -> None:
        if self._events is None:
            return
        with self._changed:
            self._events.record(reason, note, self._clock.wall_ms(), self._clock.monotonic_s())
            self._changed.notify()

    def show_role(self, role: str) -> None:
        """The pod's label says this role from now on; empty: the pod has none."""
        if self._label is None:
            return
        with self._changed:
            self._label.show(role, self._clock.monotonic_s())
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Write what can be written at once. The rest is dropped: nobody waits for an API server
        that is away.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            if self._events is not None:
                self._events.drop_all()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread("pod-reports")
        while (found := self._next()) is not None:
            part, outage, call, about = found
            status = self._ask(call, outage)
            with self._changed:
                part.answered(about, status, self._clock.monotonic_s())

    def _next(self) -> tuple[_Part, OutageLogger, Call, Any] | None:
        """The next call, when there is one; None: the end."""
        with self._changed:
            while True:
                now_s = self._clock.monotonic_s()
                for part, outage in self._parts:
                    if (found := part.next_call(now_s)) is not None:
                        return part, outage, *found
                if self._closing:
                    return None
                waits = [part.wait_s(now_s) for part, _ in self._parts]
                self._changed.wait(min((s for s in waits if s is not None), default=None))

    def _ask(self, call: Call, outage: OutageLogger) -> int:
        """The API's status; 0: there was no answer."""
        try:
            status, answer = self._api.call(
                call.method, call.path, call.body, CALL_S_MAX, call.content_type
            )
        except LeaseUnavailable as error:
            outage.failing(error)
            return 0
        if status in (200, 201):
            outage.recovered()
        elif status in (401, 403):
            outage.failing(f"{status} {answer.get('message', '')}", advice=ADVICE)
        return status

    @property
    def counts(self) -> tuple[int, int]:
        """Events that the API has taken, and that were dropped."""
        with self._changed:
            return (0, 0) if self._events is None else (self._events.taken, self._events.dropped)


class EventCollector(Collector):
    """What has become of the events of this member. ``reporter`` is None outside of a pod."""

    def __init__(self, reporter: PodReporter | None) -> None:
        self._reporter = reporter

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        taken, dropped = (0, 0) if self._reporter is None else self._reporter.counts
        family = CounterMetricFamily(
            "cometmq_kubernetes_events",
            "Events of this member that Kubernetes' API has taken, or that were dropped.",
            labels=["outcome"],
        )
        family.add_metric(["taken"], taken)
        family.add_metric(["dropped"], dropped)
        yield family


def _outage(what: str) -> OutageLogger:
    return OutageLogger(log, logging.WARNING, f"{what} not written", f"{what} written again")


def open_reporter(config: MemberConfig, writer: str, clock: Clock) -> PodReporter | None:
    """The reporter of this process; None outside of a pod. ``writer``: the role of a writer."""
    place = place_of(config.lease) if config.lease else Path()
    if not config.pod_name or isinstance(place, Path):
        return None
    pod = PodRef(place.namespace, config.pod_name, config.pod_uid)
    label = RoleLabel(pod, list(_other_pods(config)), writer)
    return PodReporter(
        EventSeries(pod) if config.pod_events_enable else None,
        label if config.pod_role_label_enable else None,
        clock,
    )


def _other_pods(config: MemberConfig) -> Iterator[str]:
    """The pods of the group's other members, as the option peers names them."""
    workload, _, _ = config.pod_name.rpartition("-")
    for address in (config.peer_addresses() or {}).values():
        name = address.split(".")[0]
        if name.startswith(f"{workload}-") and name != config.pod_name:
            yield name
