from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import FlowControl
from cometmq.messaging import quotas
from cometmq.messaging.quotas import Account, Quota, QuotaTable

ONE, OTHER = Account("T", "a"), Account("T", "b")


def wait_s(table: QuotaTable, now_s: float) -> float:
    """What a refusal says; 0: there is none."""
    try:
        table.check(ONE, now_s)
    except FlowControl as error:
        return (error.retry_after_ms or 0) / 1000 + 1e-6
    return 0.0


@given(
    st.builds(Quota, st.integers(0, 1_000), st.integers(0, 100_000)),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 30_000), st.floats(0, 2)), max_size=60),
)
def test_a_client_gets_its_rate_and_a_second_at_once(
    quota: Quota, tries: list[tuple[int, int, float]]
) -> None:
    """Never more messages nor bytes than the rate, a second's worth and the last batch; and a
    client that waits as it is told gets in.
    """
    table = QuotaTable("of sends to topic")
    now_s, sent, sent_bytes = 1_000.0, 0, 0
    for count, size, rest_s in tries:
        now_s += wait_s(table, now_s)
        table.check(ONE, now_s)
        paid_s = now_s - 1_000.0 + quotas.BURST_S + 1e-3
        assert not quota.messages_per_s or sent <= quota.messages_per_s * paid_s
        assert not quota.bytes_per_s or sent_bytes <= quota.bytes_per_s * paid_s
        table.take(ONE, quota, count, size, now_s)
        sent += count
        sent_bytes += size
        now_s += rest_s


def test_a_client_that_was_away_saves_nothing_up() -> None:
    table, quota = QuotaTable("of sends to topic"), Quota(messages_per_s=10)
    table.take(ONE, quota, 1, 1, 0.0)
    for _ in range(2):  # a second's worth, and the last batch
        table.check(ONE, 1_000.0)
        table.take(ONE, quota, 10, 1, 1_000.0)
    assert wait_s(table, 1_000.0) == pytest.approx(1.0, abs=1e-3)


def test_bytes_and_messages_count_and_the_harder_one_decides() -> None:
    table = QuotaTable("of reads of group")
    table.take(ONE, Quota(10, 1_000), 1, 3_000, 0.0)
    with pytest.raises(FlowControl, match="of reads of group T") as refused:
        table.check(ONE, 0.5)
    assert refused.value.retry_after_ms == 1_500
    table.check(ONE, 2.1)
    table.check(OTHER, 0.5)  # a client of its own
    table.take(OTHER, Quota(10, 0), 30, 1 << 40, 0.0)
    with pytest.raises(FlowControl) as refused:
        table.check(OTHER, 0.0)
    assert refused.value.retry_after_ms == 2_000


def test_ten_thousand_names_share_memory_and_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "CLIENTS_MAX", 100)
    table, quota = QuotaTable("of sends to topic"), Quota(messages_per_s=1)
    for n in range(10_000):
        table.take(Account("T", str(n)), quota, 5, 0, 0.0)
        assert len(table) <= 101
    with pytest.raises(FlowControl):
        table.check(Account("T", "a new name"), 1.0)  # it shares
    table.check(Account("U", "a new name"), 1.0)
    table.check(Account("T", "a new name"), 60_000.0)  # who has paid has left
    assert len(table) < 100


def test_nothing_is_kept_of_what_has_no_limit() -> None:
    table = QuotaTable("of sends to topic")
    table.take(ONE, quotas.NO_QUOTA, 1_000, 1 << 40, 0.0)
    assert len(table) == 0
