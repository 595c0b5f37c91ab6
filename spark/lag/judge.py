"""Trends → a status with its reason. Pure: DataFrame → DataFrame.

The rules look at snapshots, not at commits: a dead consumer commits nothing, and that is when its
status matters. They take the first that fits, in this order::

    UNKNOWN  lag is not known: stale broker, fenced or impossible position
    NEW      never committed here
    REWIND   the committed offset is below one of an earlier snapshot
    STOPPED  messages wait, no live member, no progress since the snapshot before, and the head of
             the queue has waited for HEAD_S_MAX
    STALLED  messages wait, no progress for SPAN_S_MIN
    WARN     messages were lost; or the lag grows
    OK       nothing waits, or the above does not fit
    NEW      something waits, and there is too little history to judge by

Progress is a commit, or a queue that was empty. Lag grows when its line rises by more than the
points scatter around it, and by more than what arrives between two commits.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.lag import measure

Rule = tuple[Column, str, Column]  # fits, status, reason

SPAN_S_MIN = 30.0
HEAD_S_MAX = 60.0  # a group without members may be restarting: its queues wait that long
GROWTH_SNAPSHOTS_MIN = 3
GROWTH_NOISE_MIN = 3.0  # standard deviations around the line
GROWTH_PRODUCE_S_MIN = 10.0  # clients commit every 5 s: two intervals of new messages
SEVERITY = ("OK", "NEW", "WARN", "UNKNOWN", "REWIND", "STALLED", "STOPPED")  # the worst is last


def with_members(rows: DataFrame, *, complete: bool) -> DataFrame:
    """Adds live_member_count of group and topic in the whole cluster: a client joins its group at
    one broker only. None seen while a broker group is missing = not known.
    """
    keys = ("cluster", "group", "topic")
    here = rows.where(~F.col("stale")).groupBy(*keys, "broker_group")
    by_broker = here.agg(F.max("member_count").alias("_here"))
    found = by_broker.groupBy(*keys).agg(F.sum("_here").alias("live_member_count"))
    joined = rows.join(F.broadcast(found), [*keys], "left")
    count = F.col("live_member_count")
    return joined if complete else joined.withColumn("live_member_count", F.when(count > 0, count))


def judge(rows: DataFrame, span_s_min: float = SPAN_S_MIN) -> DataFrame:
    """Adds status and reason."""
    verdict = _verdict(span_s_min)
    judged = rows.withColumn("_verdict", verdict)
    return (
        judged.withColumn("status", F.col("_verdict.status"))
        .withColumn("reason", F.col("_verdict.reason"))
        .drop("_verdict")
    )


def _verdict(span_s_min: float) -> Column:
    """Status and reason of the first rule that fits."""
    fine = ("OK", _text("%s wait", "lag_count"))
    verdict = F.when(F.lit(False), _pair(*fine))
    for fits, status, reason in [*_not_known(), *_judged(span_s_min)]:
        verdict = verdict.when(fits, _pair(status, reason))
    return verdict.otherwise(_pair(*fine))


def _pair(status: str, reason: Column) -> Column:
    return F.struct(F.lit(status).alias("status"), reason.alias("reason"))


def _judged(span_s_min: float) -> list[Rule]:
    """Rules about lag that is known."""
    long_enough = (F.col("snapshot_count") > 1) & (F.col("span_s") >= span_s_min)
    waiting = F.col("lag_count") > 0
    still = waiting & (F.col("no_progress_s") > 0)
    head_s = F.greatest(F.coalesce(F.col("lag_ms") / 1000, F.lit(0.0)), F.col("no_progress_s"))
    stopped = still & (F.col("live_member_count") == 0) & (head_s >= HEAD_S_MAX)
    stalled = still & (F.col("no_progress_s") >= span_s_min)
    rewound = F.col("committed_offset") < F.col("highest_position")
    back = _text("commits went back from %s to %s", "highest_position", "committed_offset")
    dead = _text("%s wait, no live member, no commit for %.0f s", "lag_count", "no_progress_s")
    stuck = _text("%s wait, no commit for %.0f s", "lag_count", "no_progress_s")
    lost = _text("%s were removed before they were read", "lost_count")
    growth = _text(
        "%s wait, %.2f more each second for %.0f s", "lag_count", "lag_velocity", "span_s"
    )
    form = "%s wait; snapshots: %s over %.0f s, too little to judge by"
    early = _text(form, "lag_count", "snapshot_count", "span_s")
    return [
        (rewound, "REWIND", back),
        (stopped, "STOPPED", dead),
        (stalled, "STALLED", stuck),
        (F.col("lost_count") > 0, "WARN", lost),
        (waiting & long_enough & _grows(), "WARN", growth),
        (F.col("lag_count") == 0, "OK", F.lit("nothing waits")),
        (~long_enough, "NEW", early),
    ]


def _grows() -> Column:
    growth = F.col("lag_velocity") * F.col("span_s")
    return (
        (F.col("snapshot_count") >= GROWTH_SNAPSHOTS_MIN)
        & (growth > GROWTH_NOISE_MIN * F.col("lag_noise"))
        & (growth > GROWTH_PRODUCE_S_MIN * F.col("produce_rate"))
    )


def _not_known() -> list[Rule]:
    """Rules about lag that is not."""
    method = F.col("lag_method")
    fenced = "committed in generation %s, the queue is in %s: what of it holds is not known"
    return [
        (
            method == measure.STALE,
            "UNKNOWN",
            _text("broker group %s is not in the newest snapshot", "broker_group"),
        ),
        (
            method == measure.NEVER_COMMITTED,
            "NEW",
            F.when(F.col("live_member_count").isNull(), F.lit("never committed here")).otherwise(
                _text("never committed here; live members: %s", "live_member_count")
            ),
        ),
        (
            method == measure.FENCED,
            "UNKNOWN",
            _text(fenced, "committed_generation", "generation"),
        ),
        (
            method == measure.ABOVE_MAX,
            "UNKNOWN",
            _text("committed offset %s is above the end %s", "committed_offset", "max_offset"),
        ),
    ]


def _text(form: str, *names: str) -> Column:
    return F.format_string(form, *(F.col(name) for name in names))


def severity(status: Column) -> Column:
    """A number that is higher for what is worse."""
    found = F.lit(len(SEVERITY))
    for number, name in enumerate(SEVERITY):
        found = F.when(status == name, number).otherwise(found)
    return found
