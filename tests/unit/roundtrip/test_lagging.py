"""Two tables of one moment, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.admin.views import GroupProgressView, QueueProgressView
from examples.roundtrip import lagging
from examples.roundtrip.lagging import Lag, beside
from examples.roundtrip.stage import Folder


def view(queue_id: int, committed: int | None, end: int) -> QueueProgressView:
    lag = None if committed is None else end - committed
    return QueueProgressView("t", "g1", queue_id, 1, committed, 1, 0, end, lag)


def row(queue_id: int, committed: int | None, end: int) -> dict[str, Any]:
    lag = None if committed is None else end - committed
    counts = {"committed_offset": committed, "max_offset": end, "lag_count": lag}
    return {"broker_group": "g1", "queue_id": queue_id, "lag_ms": 5, **counts}


def lag_of(views: list[QueueProgressView], rows: list[dict[str, Any]]) -> Lag:
    return Lag(
        queues=beside(views, rows),
        progress_sum=sum(view.lag_count or 0 for view in views),
        spark_sum=sum(row["lag_count"] or 0 for row in rows),
        spark_s=1.0,
        report=Path("report.txt"),
    )


GOOD = lag_of([view(0, 3, 10), view(1, None, 4)], [row(1, None, 4), row(0, 3, 10)])


def test_the_same_counts_are_equal_unknown_ones_too() -> None:
    assert [queue.queue for queue in GOOD.queues] == ["g1/0", "g1/1"]
    assert [queue.equal for queue in GOOD.queues] == [True, True]
    assert GOOD.complaints() == []


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, 4, 10)],  # another position
        [row(0, 4, 11)],  # the same lag of other numbers
        [row(0, None, 10)],
        [row(1, 3, 10)],  # another queue
        [],
    ],
)
def test_any_difference_is_said(rows: list[dict[str, Any]]) -> None:
    assert any("g1/0" in text for text in lag_of([view(0, 3, 10)], rows).complaints())


def test_sums_must_agree_as_well() -> None:
    assert replace(GOOD, spark_sum=None).complaints() == ["lag 7 by group progress, None by Spark"]


def test_no_backlog_proves_nothing() -> None:
    assert "no backlog" in lag_of([view(0, 10, 10)], [row(0, 10, 10)]).complaints()[0]


async def test_the_moment_of_an_export_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody commits during the first export; during the second a broker does not answer."""
    looks = iter([3, 5, 5, 5])
    exports = iter([[], ["g2"], []])

    async def group_progress(*_: object, **__: object) -> GroupProgressView:
        return GroupProgressView("g", [], [view(0, next(looks), 10)], 0)

    async def export(*_: object) -> SimpleNamespace:
        return SimpleNamespace(failed=next(exports))

    monkeypatch.setattr("examples.roundtrip.lagging.ops.group_progress", group_progress)
    monkeypatch.setattr("examples.roundtrip.lagging.offsets.export", export)
    monkeypatch.setattr(lagging, "LOOK_AGAIN_S", 0)
    connection: Any = None
    progress = await lagging.export(connection, "g", "t", Folder(tmp_path))
    assert progress.queues == [view(0, 5, 10)]
    assert next(exports, None) is None
