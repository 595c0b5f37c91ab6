"""Who may have how much unread: the limits hold, nothing leaks, and strangers starve nobody."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.errors import AnswersUnread
from cometmq.rpc.unread import (
    BYTES_FREE,
    CALLS_FREE,
    PATIENCE_S,
    WAIT_S,
    Account,
    Ledger,
    UnreadLimits,
    Waiter,
)

MIB = 1024 * 1024
LIMITS = UnreadLimits(
    bytes_max=8 * MIB,
    bytes_per_connection_max=4 * MIB,
    bytes_per_address_max=3 * MIB,
    calls_max=10,
    silence_s_max=30.0,
)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(LIMITS)


def reader(ledger: Ledger, name: str, size_bytes: int) -> Account:
    """A connection's call, after others have read so much."""
    for _ in range(size_bytes // MIB):
        account = ledger.open(name)
        ledger.charge(account, MIB)
        ledger.read(account, 0.0)
        ledger.close(account)
    return ledger.open(name)


def strangers(ledger: Ledger, count: int) -> list[Account]:
    """Connections of many addresses that take a MiB each and do not read."""
    accounts = [ledger.open(f"ipv4:10.0.0.{n}:1") for n in range(count)]
    for account in accounts:
        if ledger.try_reserve(account, MIB):
            ledger.owe(account, 0.0)
    return accounts


def test_who_sleeps_while_nothing_is_owed_is_woken_once(ledger: Ledger) -> None:
    woken: list[int] = []
    account = ledger.open("ipv4:10.0.0.1:1")
    ledger.at_owed(lambda: woken.append(ledger.owed_count))
    assert ledger.is_clear
    ledger.owe(account, 0.0)
    assert (woken, ledger.is_clear) == ([1], False)
    ledger.settle(account)
    ledger.owe(account, 1.0)
    ledger.close(account)
    assert (woken, ledger.is_clear) == ([1], True)


def test_strangers_get_half_and_readers_the_rest(ledger: Ledger) -> None:
    strangers(ledger, 20)
    assert ledger.held_bytes == LIMITS.strange_bytes_max
    known = reader(ledger, "ipv4:10.1.0.1:1", 2 * MIB)
    assert ledger.try_reserve(known, 2 * MIB)
    assert not ledger.try_reserve(known, MIB), "it has read only two"
    ledger.validate()


def test_an_address_gets_a_part_of_what_strangers_get(ledger: Ledger) -> None:
    here = [ledger.open(f"ipv4:10.0.0.1:{port}") for port in range(10)]
    assert sum(ledger.try_reserve(account, MIB) for account in here) == 3
    assert ledger.try_reserve(ledger.open("ipv4:10.0.0.2:1"), MIB)


def test_a_connection_gets_no_more_than_its_limit(ledger: Ledger) -> None:
    known = reader(ledger, "ipv4:10.1.0.1:1", 4 * MIB)
    assert ledger.try_reserve(known, 4 * MIB)
    assert not ledger.try_reserve(known, MIB), "strangers would have room"


def test_a_small_answer_and_a_few_calls_are_free(ledger: Ledger) -> None:
    strangers(ledger, 20)
    for n in range(3):
        account = ledger.open(f"ipv4:10.1.0.1:{n}")
        assert ledger.try_reserve(account, BYTES_FREE)
        assert not ledger.try_reserve(account, 1)
        for _ in range(CALLS_FREE):
            more = ledger.open(f"ipv4:10.1.0.1:{n}")
            ledger.check_calls(more)
            ledger.owe(more, 0.0)
    with pytest.raises(AnswersUnread, match="unread_calls_max"):
        ledger.check_calls(ledger.open("ipv4:10.1.0.1:0"))


def test_what_is_larger_than_all_limits_goes_alone(ledger: Ledger) -> None:
    account = ledger.open("ipv4:10.0.0.1:1")
    assert ledger.try_reserve(account, 100 * MIB)
    assert not ledger.try_reserve(ledger.open("ipv4:10.0.0.2:1"), MIB)


def test_connections_are_served_in_turn(ledger: Ledger) -> None:
    first = ledger.open("ipv4:10.0.0.1:1")
    assert ledger.try_reserve(first, 4 * MIB)
    served: list[str] = []
    greedy, modest = ledger.open("ipv4:10.0.0.2:1"), ledger.open("ipv4:10.0.0.3:1")
    for _ in range(3):
        ledger.wait(greedy, MIB, 0.0, lambda _: served.append("greedy"))
    ledger.wait(modest, MIB, 0.0, lambda _: served.append("modest"))
    ledger.close(first)
    assert served == ["greedy", "modest", "greedy", "greedy"]
    ledger.validate()


def test_who_reads_nothing_is_cut_off_when_others_wait(ledger: Ledger) -> None:
    silent = strangers(ledger, 4)
    assert ledger.overdue(PATIENCE_S + 1) == ([], []), "nobody needs the room"
    waiter = ledger.wait(ledger.open("ipv4:10.1.0.1:1"), MIB, 2.0, lambda _: None)
    assert ledger.overdue(PATIENCE_S - 0.1) == ([], [])
    tired, cut = ledger.overdue(PATIENCE_S + 1)
    assert (tired, cut) == ([], [account.peer for account in silent])
    assert ledger.overdue(2.0 + WAIT_S)[0] == [waiter]


def test_who_reads_something_else_keeps_its_connection_for_a_time(ledger: Ledger) -> None:
    [silent] = strangers(ledger, 1)
    large_s = MIB / (64 * 1024)
    other = ledger.open(silent.peer.name)
    ledger.read(other, 29.0)
    assert ledger.overdue(30.0 + large_s - 0.1)[1] == []
    assert ledger.overdue(30.0 + large_s)[1] == [silent.peer]


def test_calls_that_owe_nothing_yet_are_bounded_too(ledger: Ledger) -> None:
    for n in range(4 * LIMITS.calls_max):
        ledger.admit(ledger.open(f"ipv4:10.0.0.1:{n % 3}"))
    for _ in range(CALLS_FREE):
        ledger.admit(ledger.open("ipv4:10.0.0.1:9"))
    for port in (0, 9):
        with pytest.raises(AnswersUnread, match="in flight"):
            ledger.admit(ledger.open(f"ipv4:10.0.0.1:{port}"))
    ledger.validate()


class Book(RuleBasedStateMachine):
    """Calls come, reserve, wait, are read, cancelled, refused, in any order: the sums hold, and at
    the end nothing is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.now_s = 0.0
        self.accounts: list[Account] = []
        self.waiters: dict[Waiter, list[Any]] = {}

    @rule(host=st.integers(1, 3), port=st.integers(1, 3))
    def open(self, host: int, port: int) -> None:
        self.accounts.append(self.ledger.open(f"ipv4:10.0.0.{host}:{port}"))

    @precondition(lambda self: self.accounts)
    @rule(data=st.data(), size=st.sampled_from([1, 1000, BYTES_FREE, MIB, 3 * MIB, 9 * MIB]))
    def reserve(self, data: st.DataObject, size: int) -> None:
        account = data.draw(st.sampled_from(self.accounts))
        if not self.ledger.try_reserve(account, size):
            told: list[Any] = []
            self.waiters[self.ledger.wait(account, size, self.now_s, told.append)] = told

    @precondition(lambda self: self.accounts)
    @rule(data=st.data(), size=st.integers(1, 2 * MIB))
    def charge(self, data: st.DataObject, size: int) -> None:
        self.ledger.charge(data.draw(st.sampled_from(self.accounts)), size)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def owe_or_read(self, data: st.DataObject) -> None:
        account = data.draw(st.sampled_from(self.accounts))
        if account.owed:
            self.ledger.settle(account)
            self.ledger.read(account, self.now_s)
        else:
            self.ledger.owe(account, self.now_s)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        account = data.draw(st.sampled_from(self.accounts))
        for waiter in [w for w in self.waiters if w.account is account]:
            del self.waiters[waiter]
            self.ledger.cancel(waiter)
        self.accounts.remove(account)
        self.ledger.close(account)

    @rule(step_s=st.sampled_from([0.1, 2.0, 40.0]))
    def time_goes_by(self, step_s: float) -> None:
        self.now_s += step_s
        tired, silent = self.ledger.overdue(self.now_s)
        for waiter in tired:
            self.ledger.cancel(waiter)
        for peer in silent:
            for account in [a for a in self.accounts if a.peer is peer]:
                self.accounts.remove(account)
                for waiter in [w for w in self.waiters if w.account is account]:
                    self.ledger.cancel(waiter)
                self.ledger.close(account)

    @invariant()
    def sums_hold(self) -> None:
        self.ledger.validate()
        assert self.ledger.held_bytes == sum(account.held_bytes for account in self.accounts)
        assert all(len(told) <= 1 for told in self.waiters.values())

    def teardown(self) -> None:
        for account in self.accounts:
            for waiter in [w for w in self.waiters if w.account is account]:
                self.ledger.cancel(waiter)
            self.ledger.close(account)
        self.ledger.validate()
        assert (self.ledger.held_bytes, self.ledger.owed_count) == (0, 0)


Book.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBook = Book.TestCase
