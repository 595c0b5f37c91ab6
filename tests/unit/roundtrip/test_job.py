"""What counts as uncommitted."""

from __future__ import annotations

from cometmq.admin.views import QueueProgressView, QueueView
from examples.roundtrip.job import uncommitted


def queue(group: str, queue_id: int, low: int, high: int) -> QueueView:
    return QueueView("t", group, queue_id, 1, low, high, high, high - low, 0)


def progress(group: str, queue_id: int, committed: int | None) -> QueueProgressView:
    return QueueProgressView("t", group, queue_id, 1, committed, 1, 0, 0, None)


def test_uncommitted_messages_of_all_queues() -> None:
    queues = [queue("a", 0, 0, 10), queue("b", 0, 5, 10), queue("b", 1, 2, 10)]
    rows = [progress("a", 0, 7), progress("b", 0, None)]
    assert uncommitted(queues, rows) == 3 + 5 + 8


def test_everything_is_committed() -> None:
    assert uncommitted([queue("a", 0, 0, 10)], [progress("a", 0, 10)]) == 0
