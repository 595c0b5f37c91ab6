from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from cometmq.member.recovery import RecoveryGauges, RecoveryProgress
from tests.support.stores.small_stores import WallClock


def test_progress_is_told_now_and_then_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, clock = CollectorRegistry(), WallClock()
    progress = RecoveryProgress(RecoveryGauges(registry), clock)
    with caplog.at_level(logging.INFO):
        for done in range(0, 100, 10):
            clock.now_ms += 1000
            progress(done, 200)
    assert registry.get_sample_value("cometmq_recovery_read_bytes") == 90
    assert registry.get_sample_value("cometmq_recovery_total_bytes") == 200
    assert [record.message for record in caplog.records] == ["recovering"] * 2
    assert vars(caplog.records[0])["fields"] == {"read": 40, "total": 200, "percent": 20}
