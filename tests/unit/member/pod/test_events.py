"""Events of a pod: series, limits, pace, and what becomes of them while the API is away."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.member.pod import events
from cometmq.member.pod.events import (
    BURST,
    COMBINED,
    GIVE_UP_S,
    NOTE_LENGTH_MAX,
    PAUSE_S_MAX,
    SERIES_MAX,
    SERIES_S,
    SIMILAR_MAX,
    WRITE_S,
    Call,
    EventReason,
    EventSeries,
    PodRef,
)

POD = PodRef("queues", "prod-broker-a-1", "uid-1")
LEFT, JOINED = EventReason.LEFT_IN_SYNC, EventReason.JOINED_IN_SYNC


class Api:
    """What has become of the calls: objects by name. ``status``: answers with it instead."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls = 0
        self.status = 0

    def take(self, call: Call) -> int:
        self.calls += 1
        if self.status:
            return self.status
        if call.method == "POST":
            name = call.body["metadata"]["name"]
            if name in self.objects:
                return 409
            self.objects[name] = dict(call.body)
            return 201
        name = call.path.rpartition("/")[2]
        if name not in self.objects:
            return 404
        self.objects[name].update(call.body)
        return 200

    def all_of(self, series: EventSeries, now_s: float) -> int:
        """Carry out what is due now; how many calls."""
        before = self.calls
        while (found := series.next_call(now_s)) is not None:
            call, about = found
            series.answered(about, self.take(call), now_s)
        return self.calls - before

    def counts(self) -> dict[str, int]:
        """How often, by note."""
        found: dict[str, int] = {}
        for body in self.objects.values():
            count = body["series"]["count"] if "series" in body else 1
            found[body["note"]] = found.get(body["note"], 0) + count
        return found


@pytest.fixture
def series() -> EventSeries:
    return EventSeries(POD)


@pytest.fixture
def api() -> Api:
    return Api()


def test_an_event_names_the_pod_and_what_it_means(series: EventSeries, api: Api) -> None:
    series.record(LEFT, "member 0 is no longer in sync", 1_700_000_000_123, 0.0)
    api.all_of(series, 0.0)
    ((name, body),) = api.objects.items()
    assert name.startswith("prod-broker-a-1.")
    assert body["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "queues",
        "name": "prod-broker-a-1",
        "uid": "uid-1",
    }
    assert (body["type"], body["reason"], body["action"]) == (
        "Warning",
        "InSyncMemberLeft",
        "ChangeInSyncSet",
    )
    assert body["eventTime"] == "2023-11-14T22:13:20.123000Z"
    assert "series" not in body


def test_equal_events_are_one_object_with_a_count(series: EventSeries, api: Api) -> None:
    for second in range(5):
        series.record(LEFT, "gone", 1_000 * second, second)
        api.all_of(series, second)
    (body,) = api.objects.values()
    assert body["series"] == {"count": 5, "lastObservedTime": "1970-01-01T00:00:04.000000Z"}
    assert body["eventTime"] == "1970-01-01T00:00:00.000000Z"


def test_repeats_that_come_while_nothing_is_written_are_one_write(
    series: EventSeries, api: Api
) -> None:
    for _ in range(1_000):
        series.record(LEFT, "gone", 0, 0.0)
    assert api.all_of(series, 0.0) == 1
    assert api.counts() == {"gone": 1_000}


def test_a_series_ends_after_a_silence(series: EventSeries, api: Api) -> None:
    series.record(LEFT, "gone", 0, 0.0)
    api.all_of(series, 0.0)
    later_s = SERIES_S + 1
    series.record(LEFT, "gone", 1_000, later_s)
    api.all_of(series, later_s)
    assert len(api.objects) == 2


def test_many_different_notes_of_a_reason_are_combined(series: EventSeries, api: Api) -> None:
    for number in range(100):
        series.record(LEFT, f"member {number} left", 0, 0.0)
    series.record(JOINED, "member 1 joined", 0, 0.0)
    api.all_of(series, 0.0)
    assert len(api.objects) == SIMILAR_MAX + 2
    combined = {note: n for note, n in api.counts().items() if note.startswith(COMBINED)}
    assert list(combined.values()) == [100 - SIMILAR_MAX]


def test_writes_are_paced(series: EventSeries, api: Api) -> None:
    """A burst, then one in a while, whatever is recorded; and the count is right in the end."""
    for second in range(300):
        series.record(LEFT, "gone", 0, second)
        api.all_of(series, second)
    assert api.calls <= BURST + 300 / WRITE_S + 1
    end_s = 300 + 2 * WRITE_S
    assert series.wait_s(300.0) is not None
    api.all_of(series, end_s)
    assert api.counts() == {"gone": 300}


def test_an_api_that_is_away_is_asked_more_and_more_rarely(series: EventSeries, api: Api) -> None:
    api.status = 500
    series.record(LEFT, "gone", 0, 0.0)
    for second in range(60):
        api.all_of(series, second)
    assert api.calls <= 8
    api.status = 0
    api.all_of(series, 60 + PAUSE_S_MAX)
    assert api.counts() == {"gone": 1}
    assert series.dropped == 0


@pytest.mark.parametrize("status", [0, 403, 500])
def test_what_is_not_taken_in_time_is_dropped_and_counted(
    series: EventSeries, api: Api, status: int
) -> None:
    series.record(LEFT, "gone", 0, 0.0)
    now_s = 0.0
    while (found := series.next_call(now_s)) is not None:
        series.answered(found[1], status, now_s)
        now_s += series.wait_s(now_s) or 0.0
    assert now_s > GIVE_UP_S
    assert (series.taken, series.waiting, series.dropped) == (0, 0, 1)


def test_no_more_objects_are_kept_than_may_be(
    series: EventSeries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SIMILAR_MAX", 2 * SERIES_MAX)
    for number in range(SERIES_MAX + 5):
        series.record(LEFT, f"member {number} left", 0, 0.0)
    assert series.waiting == SERIES_MAX
    assert series.dropped == 5


def test_a_lost_answer_does_not_count_twice(series: EventSeries, api: Api) -> None:
    series.record(LEFT, "gone", 0, 0.0)
    found = series.next_call(0.0)
    assert found is not None
    api.take(found[0])
    series.answered(found[1], 0, 0.0)
    api.all_of(series, PAUSE_S_MAX)
    assert api.counts() == {"gone": 1}
    assert series.taken == 1


def test_an_object_that_somebody_deleted_is_made_again(series: EventSeries, api: Api) -> None:
    series.record(LEFT, "gone", 0, 0.0)
    api.all_of(series, 0.0)
    api.objects.clear()
    series.record(LEFT, "gone", 0, 1.0)
    api.all_of(series, 1.0)
    api.all_of(series, 1.0 + PAUSE_S_MAX)
    assert api.counts() == {"gone": 1}


def test_a_long_note_is_cut_where_a_character_ends(series: EventSeries, api: Api) -> None:
    series.record(LEFT, "ä" * NOTE_LENGTH_MAX, 0, 0.0)
    api.all_of(series, 0.0)
    (note,) = api.counts()
    assert len(note.encode()) <= NOTE_LENGTH_MAX
    assert note.strip("ä") == "..."


STEPS = st.lists(
    st.tuples(
        st.sampled_from(list(EventReason)),
        st.integers(0, 40),
        st.floats(0.0, 100.0),
        st.sampled_from([0, 0, 0, 201, 403, 404, 409, 500]),
    ),
    max_size=200,
)


@given(STEPS)
def test_every_event_is_taken_waits_or_was_dropped(steps: list[Any]) -> None:
    """And no run of writes is longer than the pace allows."""
    series, now_s, calls = EventSeries(POD), 0.0, 0
    for number, (reason, note, pause_s, status) in enumerate(steps, 1):
        series.record(reason, f"{note}", 0, now_s)
        if (found := series.next_call(now_s)) is not None:
            calls += 1
            series.answered(found[1], status, now_s)
        assert series.taken + series.waiting + series.dropped == number
        assert calls <= BURST + now_s / WRITE_S + 1
        now_s += pause_s
