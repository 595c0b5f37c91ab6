from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import FlowControl, InvalidRequest, LimitExceeded
from cometmq.messaging import quotas
from cometmq.messaging.quotas import (
    EACH,
    Caller,
    Limits,
    Quota,
    QuotaMeter,
    QuotaRules,
    Scope,
    Use,
    Way,
    address_name,
)

ONE, OTHER = Caller("a", "10.0.0.1"), Caller("b", "10.0.0.1")


class Meter(QuotaMeter):
    """Of sends, with rules of its own."""

    def __init__(self, way: Way = Way.SEND) -> None:
        self.rules = QuotaRules()
        self.refusals: list[tuple[Way, Scope]] = []
        super().__init__(way, lambda: self.rules, lambda *one: self.refusals.append(one))

    def may(self, caller: Caller, now_s: float, topic: str = "T", group: str = "") -> None:
        self.check(self.charges(caller, topic, group), now_s)

    def use(
        self, caller: Caller, count: int, size_bytes: int, now_s: float, topic: str = "T"
    ) -> None:
        self.take([Use(self.charges(caller, topic, "G"), count, size_bytes)], now_s)

    def wait_s(self, caller: Caller, now_s: float) -> float:
        """What a refusal says; 0: there is none."""
        try:
            self.may(caller, now_s)
        except FlowControl as error:
            return (error.retry_after_ms or 0) / 1000 + 1e-6
        return 0.0

    def entries(self, scope: Scope) -> int:
        return len(self._books[scope]._paid_at_s)


def limited(scope: Scope, quota: Quota) -> Meter:
    """Sends are limited so."""
    meter = Meter()
    if scope is Scope.CLIENT:
        meter.rules.put_clients(Way.SEND, "T", quota)
    else:
        meter.rules.put(scope, EACH, Limits(send=quota))
    return meter


QUOTAS = st.builds(Quota, st.integers(0, 1_000), st.integers(0, 100_000))
TRIES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 30_000), st.floats(0, 2)), max_size=60
)


@pytest.mark.parametrize("scope", Scope)
@given(QUOTAS, TRIES)
def test_a_client_gets_its_rate_and_a_second_at_once(
    scope: Scope, quota: Quota, tries: list[tuple[int, int, float]]
) -> None:
    """Never more messages nor bytes than the rate, a second's worth and the last batch; and a
    client that waits as it is told gets in. The same for an address and for a topic.
    """
    meter = limited(scope, quota)
    now_s, sent, sent_bytes = 1_000.0, 0, 0
    for count, size, rest_s in tries:
        now_s += meter.wait_s(ONE, now_s)
        meter.may(ONE, now_s)
        paid_s = now_s - 1_000.0 + quotas.BURST_S + 1e-3
        assert not quota.messages_per_s or sent <= quota.messages_per_s * paid_s
        assert not quota.bytes_per_s or sent_bytes <= quota.bytes_per_s * paid_s
        meter.use(ONE, count, size, now_s)
        sent += count
        sent_bytes += size
        now_s += rest_s


def test_a_client_that_was_away_saves_nothing_up() -> None:
    meter = limited(Scope.CLIENT, Quota(messages_per_s=10))
    meter.use(ONE, 1, 1, 0.0)
    for _ in range(2):  # a second's worth, and the last batch
        meter.may(ONE, 1_000.0)
        meter.use(ONE, 10, 1, 1_000.0)
    assert meter.wait_s(ONE, 1_000.0) == pytest.approx(1.0, abs=1e-3)


def test_bytes_and_messages_count_and_the_harder_one_decides() -> None:
    meter = Meter(Way.READ)
    meter.rules.put_clients(Way.READ, "G", Quota(10, 1_000))
    meter.use(ONE, 1, 3_000, 0.0)
    with pytest.raises(FlowControl, match="of reads of group G") as refused:
        meter.may(ONE, 0.5, group="G")
    assert refused.value.retry_after_ms == 1_500
    meter.may(ONE, 2.1, group="G")
    meter.may(OTHER, 0.5, group="G")  # a client of its own
    meter.rules.put_clients(Way.READ, "G", Quota(10, 0))
    meter.use(OTHER, 30, 1 << 40, 0.0)
    with pytest.raises(FlowControl) as refused:
        meter.may(OTHER, 0.0, group="G")
    assert refused.value.retry_after_ms == 2_000
    assert meter.refusals == [(Way.READ, Scope.CLIENT)] * 2


def test_many_client_ids_have_one_address_and_one_topic() -> None:
    """Whatever ids a caller names, and whatever addresses callers have."""
    for scope, callers in (
        (Scope.ADDRESS, [Caller(f"id{n}", "10.0.0.1") for n in range(200)]),
        (Scope.TOPIC, [Caller(f"id{n}", f"10.0.0.{n}") for n in range(200)]),
    ):
        meter = limited(scope, Quota(messages_per_s=10))
        meter.rules.put_clients(Way.SEND, "T", Quota(messages_per_s=10))
        sent = 0
        for caller in callers:
            if not meter.wait_s(caller, 0.0):
                meter.use(caller, 1, 0, 0.0)
                sent += 1
        assert sent == 11, scope
        assert {found for _, found in meter.refusals} == {scope}


def test_a_caller_elsewhere_does_not_use_up_the_quota_of_a_client() -> None:
    meter = limited(Scope.CLIENT, Quota(messages_per_s=1))
    meter.use(Caller("tenant", "10.0.0.9"), 1_000, 0, 0.0)
    meter.may(Caller("tenant", "10.0.0.1"), 0.0)
    with pytest.raises(FlowControl):
        meter.may(Caller("tenant", "10.0.0.9"), 0.0)


def test_an_address_pays_for_all_topics_and_what_has_its_own_quota_for_that() -> None:
    meter = limited(Scope.ADDRESS, Quota(messages_per_s=10))
    meter.use(ONE, 10, 0, 0.0, topic="T")
    meter.use(ONE, 10, 0, 0.0, topic="U")
    with pytest.raises(FlowControl, match=r"quota set address .* --send"):
        meter.may(ONE, 0.0, topic="V")
    meter.rules.put(Scope.ADDRESS, "10.0.0.2", Limits(send=Quota()))  # no limit
    meter.rules.put(Scope.ADDRESS, "10.0.0.3", Limits(read=Quota(1)))  # sends as each
    free, other = Caller("", "10.0.0.2"), Caller("", "10.0.0.3")
    for caller in (free, other):
        meter.use(caller, 1_000, 0, 0.0)
    meter.may(free, 0.0)
    with pytest.raises(FlowControl):
        meter.may(other, 0.0)


def test_topics_of_the_broker_have_no_quota_and_others_theirs() -> None:
    meter = limited(Scope.TOPIC, Quota(messages_per_s=1))
    meter.rules.put(Scope.TOPIC, "U", Limits(send=Quota(messages_per_s=100)))
    for topic, allowed in (("%RETRY%G", True), ("T", False), ("U", True)):
        meter.use(ONE, 50, 0, 0.0, topic=topic)
        if allowed:
            meter.may(ONE, 0.0, topic=topic)
        else:
            with pytest.raises(FlowControl, match="topic T has used up its quota of sends"):
                meter.may(ONE, 0.0, topic=topic)


def test_a_batch_pays_once_for_its_address() -> None:
    """Messages in one run, bytes in another: the harder limit of both together, not both."""
    meter = limited(Scope.ADDRESS, Quota(10, 1_000))
    charges = meter.charges(ONE, "T")
    meter.take([Use(charges, 20, 0), Use(charges, 0, 2_000)], 0.0)
    with pytest.raises(FlowControl) as refused:
        meter.may(ONE, 0.0)
    assert refused.value.retry_after_ms == 1_000


@pytest.mark.parametrize("scope", [Scope.CLIENT, Scope.ADDRESS])
def test_ten_thousand_names_share_memory_and_a_bucket(
    monkeypatch: pytest.MonkeyPatch, scope: Scope
) -> None:
    """But for addresses with a quota of their own, and other topics."""
    monkeypatch.setattr(quotas, "ACCOUNTS_MAX", 100)
    meter = limited(scope, Quota(messages_per_s=1))

    def caller(number: int) -> Caller:
        return Caller(str(number), str(number))

    for n in range(10_000):
        meter.use(caller(n), 5, 0, 0.0)
        assert meter.entries(scope) <= 101
    new = caller(-1)
    with pytest.raises(FlowControl):
        meter.may(new, 1.0)  # it shares
    if scope is Scope.ADDRESS:
        meter.rules.put(scope, new.address, Limits(send=Quota(messages_per_s=1)))
        meter.may(new, 1.0)
    else:
        meter.rules.put_clients(Way.SEND, "U", Quota(messages_per_s=1))
        meter.may(new, 1.0, topic="U")
    meter.may(caller(-2), 60_000.0)  # who has paid has left
    assert meter.entries(scope) < 100


def test_nothing_is_kept_of_what_has_no_limit() -> None:
    meter = Meter()
    assert not meter.rules.limits_sends
    meter.use(ONE, 1_000, 1 << 40, 0.0)
    assert not any(map(meter.entries, Scope))


def has(rules: QuotaRules) -> tuple[bool, bool]:
    return rules.limits_sends, rules.limits_reads


def test_rules_of_addresses_and_topics() -> None:
    rules = QuotaRules()
    rules.put(Scope.TOPIC, "T", Limits(read=Quota(1)))
    assert has(rules) == (False, True)
    assert [rules.is_topic_read_limited(topic) for topic in "TU"] == [True, False]
    rules.put(Scope.ADDRESS, EACH, Limits(read=Quota(1)))
    assert rules.is_topic_read_limited("U")
    rules.put(Scope.ADDRESS, EACH, Limits(read=Quota()))
    assert [rules.is_topic_read_limited(topic) for topic in "TU"] == [True, False]
    rules.put_clients(Way.SEND, "T", Quota(1))
    assert has(rules) == (True, True)
    rules.forget_topic("T")
    assert has(rules) == (False, False)
    assert list(rules) == [(Scope.ADDRESS, EACH, Limits(read=Quota()))]


def test_only_so_many_addresses_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "NAMED_MAX", 2)
    rules = QuotaRules()
    for name in (EACH, "10.0.0.1", "10.0.0.2"):
        rules.check_room(Scope.ADDRESS, name)
        rules.put(Scope.ADDRESS, name, Limits(send=Quota(1)))
    rules.check_room(Scope.ADDRESS, "10.0.0.1")
    rules.check_room(Scope.ADDRESS, EACH)
    rules.check_room(Scope.TOPIC, "T")
    with pytest.raises(LimitExceeded):
        rules.check_room(Scope.ADDRESS, "10.0.0.3")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:0:1::9", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::/64", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_of_ipv6_counts_as_its_network(text: str, name: str) -> None:
    assert address_name(text) == name
    assert address_name(name) == name


@pytest.mark.parametrize("text", ["here", "10.0.0.0/8", "2001:db8::/48", "10.0.0.7:80", "-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        address_name(text)
