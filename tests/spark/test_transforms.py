"""Every rule of the lag job against numbers worked out by hand.

A case is a consumer group of its own; all of them are computed at once, because Spark takes seconds
for a computation of any size. Snapshots are one minute apart; the newest is number 3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from pyspark.sql import Row, SparkSession

from tests.spark.support import MINUTE, T0, Scene, by

NOW = T0 + 3 * MINUTE

pytestmark = pytest.mark.timeout(240)  # of a busy machine: the first test starts the JVM


def fill(scene: Scene) -> None:
    """The cases, by group."""
    lag_of_time(scene)
    lost_and_unknown(scene)
    trends(scene)
    sums(scene)
    special_topics(scene)


def lag_of_time(scene: Scene) -> None:
    scene.add(3, 100, 40, group="time", committed_store_time_ms=NOW - 7_500)
    scene.add(3, 100, 100, group="caught-up")
    scene.add(3, 100, 99, group="just-stored", committed_store_time_ms=NOW + 300)
    scene.add(3, 100, 50, group="unread", committed_store_time_ms=None)


def lost_and_unknown(scene: Scene) -> None:
    scene.add(3, 100, 30, group="lost", min_offset=45)
    scene.add(3, 100, None, group="never", member_count=2)
    scene.add(3, 100, 60, group="fenced", generation=7, committed_generation=5)
    scene.add(3, 100, 60, group="holds", generation=7, committed_generation=5,
              committed_store_time_ms=NOW - 1_000)  # fmt: skip
    scene.add(3, 100, 130, group="above")
    scene.add(3, 0, 0, group="empty")
    # Deleted and created again: the numbers of generation 1 say nothing about those of 9.
    scene.add(1, 900, 900, group="again")
    scene.add(2, 950, 900, group="again")
    scene.add(3, 10, 4, group="again", generation=9, committed_generation=9)
    scene.add(1, 10, 4, group="gone")  # its offsets were deleted, the broker still exports


def trends(scene: Scene) -> None:
    # 60 more each minute, 90 more done each minute: lag 120, 90, 60.
    scene.queue((200, 80), (260, 170), (320, 260), group="draining")
    # Not a straight line: lag 10, 40, 40; least squares give 30/120 per second.
    scene.queue((100, 90), (160, 120), (190, 150), group="slow")
    scene.queue((100, 60), (130, 60), (160, 60), group="stalled", member_count=1)
    scene.queue((100, 60), (100, 60), (100, 60), group="stopped", member_count=0)
    scene.queue((100, 100), (130, 100), (160, 100), group="was-empty", member_count=0)
    scene.queue((100, 60), (100, 80), (100, 70), group="rewind")
    scene.queue((100, 60), (120, 95), (150, 120), group="reading")  # lag 40, 25, 30
    scene.queue((100, None), (100, 50), (100, 75), group="began")
    # Its first commit ever: it has not stood still for two minutes.
    scene.queue((100, None), (100, None), (100, 50), group="first")
    still = ((100, 60), (100, 60), (100, 60))
    scene.queue(*still, group="members", member_count=0)
    scene.queue(*still, group="members", member_count=2, broker_group="g2", queue_id=1)
    scene.queue(*still, group="members", member_count=2, broker_group="g2", queue_id=2)
    scene.add(2, 100, 60, group="hurry", taken_ms=NOW - 2_000, member_count=0)
    scene.add(3, 100, 60, group="hurry", taken_ms=NOW, member_count=0)
    scene.queue((100, 100), (120, 110), (140, 125), group="near")
    dead_and_noisy(scene)


def dead_and_noisy(scene: Scene) -> None:
    """A death at 50 messages a second, a restart, noise, and true growth."""
    for minute in (-2, -1, 0, 1):
        end = 30_000 + 3_000 * minute
        scene.add(minute + 2, end, end - 25 - minute, group="noisy")
        scene.add(minute + 2, end, end - 3_000 - 1_500 * minute, group="falls-behind")
    for number, end, committed, members in (
        (0, 1_000, 990, 2), (1, 4_000, 3_990, 2), (2, 7_000, 5_000, 0), (3, 10_000, 5_000, 0),
    ):  # fmt: skip
        stored = T0 + number * MINUTE - 70_000
        scene.add(number, end, committed, group="died", member_count=members,
                  committed_store_time_ms=stored)  # fmt: skip
        scene.add(number, end, committed, group="away-a-moment", member_count=members and 1,
                  taken_ms=T0 + number * 20_000, committed_store_time_ms=T0 + 20_000)  # fmt: skip
    # A restart: no member, but the head of the queue has waited for 20 s only.
    scene.rows = [
        r for r in scene.rows if r["group"] != "away-a-moment" or r["snapshot_id"] > "s01"
    ]


def sums(scene: Scene) -> None:
    for queue_id, committed, stored in ((0, 90, NOW - 1_000), (1, 75, NOW - 2_000), (2, 100, None)):
        of = {"group": "sum", "topic": "A", "queue_id": queue_id}
        scene.add(3, 100, committed, committed_store_time_ms=stored, **of)
    scene.add(3, 100, 60, group="sum", topic="B", broker_group="g2")
    scene.add(3, 100, 95, group="half", topic="A")
    scene.add(3, 100, None, group="half", topic="A", queue_id=1)
    scene.add(3, 100, None, group="dark", topic="A")


def special_topics(scene: Scene) -> None:
    scene.add(3, 8, 5, group="sum", topic="%RETRY%sum", topic_kind="retry")
    scene.add(3, 12, None, group=None, topic="%DLQ%sum", topic_kind="dlq", min_offset=5)
    scene.add(3, 12, None, group=None, topic="%DLQ%sum", topic_kind="dlq", queue_id=1,
              min_offset=12)  # fmt: skip


class Found:
    """What came out."""

    def __init__(self, spark: SparkSession, file: Path) -> None:
        scene = Scene(spark, file)
        fill(scene)
        scene.rows += [dict(r) for r in scene.rows if r["group"] == "time"]  # exported twice
        lag = scene.lag()
        self.queues = by(lag.queues, "group", "topic", "queue_id")
        self.topics = by(lag.topics, "group", "topic")
        self.groups = by(lag.groups, "group", "topic_kind")
        self.clusters = by(lag.clusters, "topic_kind")
        self.depths = by(lag.depths, "topic")
        lag.queues.unpersist()

    def queue(self, group: str) -> Row:
        found: Row = self.queues[group, "T", 0]
        return found


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(spark, tmp_path_factory.mktemp("found") / "rows.parquet")


# --- one queue, one snapshot ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "count", "method"),
    [
        ("time", 60, "exact"),
        ("caught-up", 0, "exact"),
        ("empty", 0, "exact"),
        ("lost", 55, "exact"),
        ("holds", 40, "exact"),
        ("again", 6, "exact"),
        ("never", None, "never_committed"),
        ("fenced", None, "fenced"),
        ("above", None, "above_max"),
    ],
)
def test_lag_is_exact_or_null(found: Found, group: str, count: int | None, method: str) -> None:
    row = found.queue(group)
    assert (row["lag_count"], row["lag_method"]) == (count, method)


@pytest.mark.parametrize(
    ("group", "milliseconds", "method"),
    [
        ("time", 7_500, "store_time"),
        ("holds", 1_000, "store_time"),
        ("caught-up", 0, "caught_up"),
        ("just-stored", 0, "stored_after_snapshot"),
        ("unread", None, "unknown"),
        ("lost", None, "unknown"),
        ("never", None, "unknown"),
        ("fenced", None, "unknown"),
    ],
)
def test_lag_in_time(found: Found, group: str, milliseconds: int | None, method: str) -> None:
    row = found.queue(group)
    assert (row["lag_ms"], row["time_method"]) == (milliseconds, method)


def test_raw_values_are_kept(found: Found) -> None:
    assert found.queue("lost")["raw_lag_count"] == 70
    assert found.queue("above")["raw_lag_count"] == -30
    assert found.queue("fenced")["raw_lag_count"] == 40
    assert found.queue("just-stored")["raw_lag_ms"] == -300
    assert found.queue("never")["raw_lag_count"] is None


@pytest.mark.parametrize(
    ("group", "lost"), [("lost", 15), ("time", 0), ("never", None), ("fenced", None)]
)
def test_lost_messages(found: Found, group: str, lost: int | None) -> None:
    assert found.queue(group)["lost_count"] == lost


def test_what_is_gone_is_not_reported_for_ever(found: Found) -> None:
    assert ("gone", "T", 0) not in found.queues


def test_a_duplicate_export_counts_once(found: Found) -> None:
    assert found.queue("time")["snapshot_count"] == 1
    assert found.topics["time", "T"]["lag_sum"] == 60


# --- several snapshots ----------------------------------------------------------------------------


def test_rates_and_drain_time(found: Found) -> None:
    row = found.queue("draining")
    assert row["produce_rate"] == pytest.approx(1.0)
    assert row["consume_rate"] == pytest.approx(1.5)
    assert row["lag_velocity"] == pytest.approx(-0.5)
    assert row["drain_eta_s"] == pytest.approx(120.0)  # 60 left at 0.5 a second


def test_a_slope_is_of_least_squares(found: Found) -> None:
    assert found.queue("slow")["lag_velocity"] == pytest.approx(0.25)
    assert found.queue("slow")["produce_rate"] == pytest.approx(90 / 120)


@pytest.mark.parametrize("group", ["slow", "stalled", "time", "never"])
def test_no_drain_time_without_draining(found: Found, group: str) -> None:
    assert found.queue(group)["drain_eta_s"] is None


def test_a_new_generation_begins_a_new_series(found: Found) -> None:
    row = found.queue("again")
    assert row["snapshot_count"] == 1
    assert row["lag_velocity"] is None


def test_what_was_unknown_is_not_0_in_a_trend(found: Found) -> None:
    """null, 50, 25: two points."""
    assert found.queue("began")["lag_velocity"] == pytest.approx(-25 / 60)


@pytest.mark.parametrize(
    ("group", "status", "reason"),
    [
        ("caught-up", "OK", "nothing waits"),
        ("reading", "OK", "30 wait"),
        ("draining", "OK", "60 wait"),
        ("was-empty", "STOPPED", "60 wait, no live member, no commit for 60 s"),
        ("near", "WARN", "15 wait, 0.13 more each second for 120 s"),
        ("noisy", "OK", "26 wait"),
        ("falls-behind", "WARN", "4500 wait, 25.00 more each second for 180 s"),
        ("died", "STOPPED", "5000 wait, no live member, no commit for 60 s"),
        ("away-a-moment", "NEW", "5000 wait; snapshots: 2 over 20 s, too little to judge by"),
        ("began", "OK", "25 wait"),
        ("time", "NEW", "60 wait; snapshots: 1 over 0 s, too little to judge by"),
        ("first", "NEW", "50 wait; snapshots: 1 over 0 s, too little to judge by"),
        ("again", "NEW", "6 wait; snapshots: 1 over 0 s, too little to judge by"),
        ("never", "NEW", "never committed here; live members: 2"),
        ("slow", "WARN", "40 wait, 0.25 more each second for 120 s"),
        ("lost", "WARN", "15 were removed before they were read"),
        ("stalled", "STALLED", "100 wait, no commit for 120 s"),
        ("stopped", "STOPPED", "40 wait, no live member, no commit for 120 s"),
        ("rewind", "REWIND", "commits went back from 80 to 70"),
        ("above", "UNKNOWN", "committed offset 130 is above the end 100"),
    ],
)
def test_status_and_reason(found: Found, group: str, status: str, reason: str) -> None:
    row = found.queue(group)
    assert (row["status"], row["reason"]) == (status, reason)


def test_a_fenced_position_says_so(found: Found) -> None:
    row = found.queue("fenced")
    assert row["status"] == "UNKNOWN"
    assert "generation 5, the queue is in 7" in row["reason"]


def test_members_are_counted_in_the_whole_cluster(found: Found) -> None:
    rows = [found.queues["members", "T", queue_id] for queue_id in range(3)]
    assert {row["live_member_count"] for row in rows} == {2}
    assert {row["status"] for row in rows} == {"STALLED"}


def test_two_snapshots_in_a_hurry_condemn_nobody(found: Found) -> None:
    """An export that was started twice: commits come every few seconds only."""
    row = found.queue("hurry")
    assert row["status"] == "NEW"
    assert row["reason"] == "40 wait; snapshots: 2 over 2 s, too little to judge by"


# --- sums -----------------------------------------------------------------------------------------


def test_a_topic_is_the_sum_of_its_queues(found: Found) -> None:
    row = found.topics["sum", "A"]
    assert (row["lag_sum"], row["lag_known_sum"], row["lag_max"]) == (35, 35, 25)
    assert row["lag_max_queue"] == "A/g1/1"
    assert (row["queue_count"], row["known_count"], row["unknown_count"]) == (3, 3, 0)
    assert (row["lag_ms_max"], row["lag_ms_max_queue"]) == (2_000, "A/g1/1")
    assert row["time_unknown_count"] == 0


def test_a_group_is_the_sum_of_its_topics_without_retries(found: Found) -> None:
    assert found.groups["sum", "normal"]["lag_sum"] == 75
    assert found.groups["sum", "normal"]["lag_max_queue"] == "B/g2/0"
    assert found.groups["sum", "normal"]["time_unknown_count"] == 1
    assert found.groups["sum", "retry"]["lag_sum"] == 3


def test_an_unknown_queue_poisons_the_sum_visibly(found: Found) -> None:
    row = found.groups["half", "normal"]
    assert row["lag_sum"] is None
    assert (row["lag_known_sum"], row["known_count"], row["unknown_count"]) == (5, 1, 1)
    assert row["lag_max"] == 5


def test_nothing_known_is_nothing_known(found: Found) -> None:
    row = found.groups["dark", "normal"]
    assert row["lag_sum"] is row["lag_known_sum"] is row["lag_max"] is None
    assert (row["known_count"], row["unknown_count"]) == (0, 1)


def test_the_cluster_is_the_sum_of_the_groups(found: Found) -> None:
    known = [
        row["lag_known_sum"] or 0 for (_, kind), row in found.groups.items() if kind == "normal"
    ]
    cluster = found.clusters["normal"]
    assert cluster["lag_known_sum"] == sum(known)
    assert cluster["lag_sum"] is None
    assert cluster["status"] == "STOPPED"
    assert cluster["worst_queue"] == "T/g1/0"
    assert found.clusters["retry"]["lag_sum"] == 3


def test_dead_letters_are_counted_though_nobody_reads_them(found: Found) -> None:
    row = found.depths["%DLQ%sum"]
    assert (row["message_count"], row["queue_count"], row["group_count"]) == (7, 2, 0)
    assert row["topic_kind"] == "dlq"
    assert "dlq" not in found.clusters


# --- brokers that are away ------------------------------------------------------------------------


class Away:
    """g2 is missing in the newest snapshot, g1 is there."""

    def __init__(self, spark: SparkSession, file: Path) -> None:
        scene = Scene(spark, file)
        scene.queue((100, 60), (100, 60), (100, 60), member_count=0)
        scene.add(1, 50, 40, broker_group="g2", member_count=3)
        scene.add(2, 70, 45, broker_group="g2", member_count=3)
        lag = scene.lag()
        self.queues = by(lag.queues, "broker_group")
        self.group = by(lag.groups, "group")["G"]
        self.depth = by(lag.depths, "topic")["T"]
        lag.queues.unpersist()


@pytest.fixture(scope="module")
def away(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Away:
    return Away(spark, tmp_path_factory.mktemp("away") / "rows.parquet")


def test_an_old_number_does_not_pass_for_todays(away: Away) -> None:
    row = away.queues["g2"]
    assert row["stale"] is True
    assert (row["lag_count"], row["raw_lag_count"], row["lag_method"]) == (None, 25, "stale")
    assert row["lag_ms"] is row["produce_rate"] is row["lag_velocity"] is None
    assert row["status"] == "UNKNOWN"
    assert row["snapshot_id"] == "s02"


def test_a_stale_broker_poisons_the_group(away: Away) -> None:
    assert away.group["lag_sum"] is None
    assert (away.group["lag_known_sum"], away.group["stale_count"]) == (40, 1)
    assert (away.depth["message_count"], away.depth["message_known_count"]) == (None, 100)


def test_members_may_be_at_the_broker_that_is_away(away: Away) -> None:
    """No member is seen, but a client joins at one broker only: stalled is sure, stopped is not."""
    assert away.queues["g1"]["live_member_count"] is None
    assert away.queues["g1"]["status"] == "STALLED"
