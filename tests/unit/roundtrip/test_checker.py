"""The judge of `make run` refuses a falsified result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from cometmq.admin.local import MEMBER, LocalCluster, LocalProcess
from cometmq.admin.views import GroupProgressView, LogChecksumView, QueueProgressView
from examples.roundtrip.checker import (
    Report,
    WriterChange,
    check_lag,
    check_logs,
    check_messages,
    check_metrics,
)
from examples.roundtrip.worker import Arrival, text_files

HAND_OVER, FAIL_OVER = WriterChange("g1", 200, 300), WriterChange("g1", 1_000, 1_100)
LOG = b"all records"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[bytes]]:
    root = tmp_path / "lib"
    (root / "pkg").mkdir(parents=True)
    (root / "empty.py").write_bytes(b"")
    (root / "pkg" / "no end.txt").write_bytes("one\r\nzwäi".encode())
    (root / "many.py").write_bytes(b"a\nb\nc\n")
    (root / "image.gif").write_bytes(b"GIF89a\xff\xfe")
    return dict(text_files(root))


def test_falsified_messages_are_refused(files: dict[str, list[bytes]], tmp_path: Path) -> None:
    assert sum(map(len, files.values())) == 6
    times_ms = [100, 150, 350, 400, 900, 1_200]  # before, between and after both changes
    lines = [(name, n, line) for name, lines in files.items() for n, line in enumerate(lines)]
    came = [
        Arrival(name, n, line.decode("latin-1"), time_ms + 5, time_ms - 5, time_ms, "g1", 0, offset)
        for offset, ((name, n, line), time_ms) in enumerate(zip(lines, times_ms, strict=True))
    ]

    def judged(arrivals: list[Arrival]) -> list[str]:
        spool = tmp_path / "consumer-0.spool"
        spool.write_text(json.dumps(arrivals[:2]) + "\n" + json.dumps(arrivals[2:]) + "\n")
        report = Report()
        check_messages(report, files, [spool], HAND_OVER, FAIL_OVER)
        return report.complaints

    assert judged(came) == []
    (one,) = [arrival for arrival in came if (arrival.file, arrival.line) == ("many.py", 1)]
    others = [arrival for arrival in came if arrival != one]
    again = one._replace(received_ms=1_300)
    sent_again = again._replace(stored_ms=1_250, broker_group="g2", queue_offset=9)
    assert judged([*came, again]) == [], "delivered again after the kill"
    assert judged([*came, sent_again]) == [], "sent again after the kill"
    after_hand_over = [arrival._replace(stored_ms=120) for arrival in came[:-1]]
    wrong = {
        "1 messages did not come back, of many.py": others,
        "came twice for no known reason": [*came, one],
        "1 messages came twice for no known": [*came, sent_again._replace(stored_ms=990)],
        "1 messages came twice for": [*came, sent_again._replace(broker_group="g1")],
        "messages came twice": [
            *others,
            one._replace(broker_group="g2"),
            again._replace(broker_group="g2"),
        ],
        "1 messages came back changed, of many.py": [*others, one._replace(body="B\n")],
        "that nobody sent": [*came, one._replace(line=99)],
        "after the hand-over": [arrival._replace(stored_ms=120) for arrival in came],
        "after the fail-over": [*after_hand_over, came[-1]._replace(stored_ms=350)],
    }
    for complaint, arrivals in wrong.items():
        assert complaint in " ".join(judged(arrivals)), complaint


def test_a_wrong_lag_is_refused() -> None:
    def judged(spark_lag: int, spark_sum: int, lag: int = 5) -> str:
        report = Report()
        queue = QueueProgressView("t", "g1", 0, 1, 0, 1, 0, lag, lag)
        row = {"broker_group": "g1", "queue_id": 0, "committed_offset": 0, "max_offset": lag}
        rows = [row | {"lag_count": spark_lag}]
        check_lag(report, GroupProgressView("g", [], [queue], lag), rows, spark_sum)
        return " ".join(report.complaints)

    assert not judged(5, 5)
    assert "(0, 5, 5) by group progress, (0, 5, 4) by Spark" in judged(4, 5)
    assert "lag 5 by group progress, 4 by Spark" in judged(5, 4)
    assert "no backlog" in judged(0, 0, lag=0)


def test_another_log_and_a_metric_that_stands_still_are_refused(tmp_path: Path) -> None:
    members = tuple(LocalProcess(f"g1-{n}", MEMBER, 1, 1) for n in (0, 1))
    cluster = LocalCluster(tmp_path, members)
    for member, last in zip(members, (b"0123", b"01"), strict=True):
        folder = tmp_path / member.name / "store" / "commitlog"
        folder.mkdir(parents=True)
        (folder / f"{0:020}").write_bytes(LOG)
        (folder / f"{len(LOG):020}").write_bytes(last)
    end = len(LOG) + 2
    told = [
        LogChecksumView(
            "g1", n, "writer", 4, end, hashlib.sha256(LOG[4:] + b"01").hexdigest(), True
        )
        for n in (0, 1)
    ]

    def judged(views: list[LogChecksumView]) -> str:
        report = Report()
        check_logs(report, views, cluster)
        return " ".join(report.complaints)

    assert not judged(told)
    assert "g1 has no follower" in judged(told[:1])
    (tmp_path / "g1-1" / "store" / "commitlog" / f"{len(LOG):020}").write_bytes(b"02")
    assert "the logs of g1 differ" in judged(told)

    standing = [{name: {"rocketmq_messages_in_total": 7.0} for name in ("g1-0", "g1-1")}] * 2
    report = Report()
    check_metrics(report, standing, cluster, "g1", 0, 0)
    assert any("rocketmq_messages_in_total rose by 0 in g1-0" in one for one in report.complaints)
