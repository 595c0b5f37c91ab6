"""Queue locks, as a writer and its successors know them, against what a lock is for: one owner
at a time.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.errors import QueueLocked
from cometmq.messaging.changes import QueuesLocked, QueuesUnlocked
from cometmq.messaging.locks import LEASE_S, LockLeases, by_topic
from cometmq.messaging.state import BrokerState
from cometmq.model import QueueKey

CLIENTS = st.sampled_from(["a", "b", "c"])
KEYS: list[QueueKey] = [("T", 0), ("T", 1), ("U", 0)]
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)


class Locks(RuleBasedStateMachine):
    """Clients count their leases from when they asked; the writer from when it answered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.epoch = 100.0, 1
        self.state = BrokerState()
        self.leases = LockLeases(self.state.locks, self.epoch, self.now_s)
        # Client → queue → its lock number, and until when it believes in it.
        self.held: dict[str, dict[QueueKey, tuple[int, float]]] = {c: {} for c in "abc"}
        self.newest: dict[QueueKey, int] = {}

    @rule(client=CLIENTS, keys=SOME, travel_s=st.sampled_from([0.0, 2.0]))
    def lock(self, client: str, keys: list[QueueKey], travel_s: float) -> None:
        asked_s = self.now_s
        self.now_s += travel_s
        free, refused = self.leases.renew("G", client, keys, self.now_s)
        if free:
            run = self.leases.plan_grant("G", client, free)
            assert run.grant.number > max(self.newest.values(), default=0)
            self.state.apply(QueuesLocked(run))
            self.leases.granted(run, self.now_s)
            self.newest |= dict.fromkeys(free, run.grant.number)
        for key in keys:
            if key in refused:
                self.held[client].pop(key, None)
            else:
                number = self.state.locks.number("G", key)
                self.held[client][key] = number, asked_s + LEASE_S

    @rule(client=CLIENTS)
    def unlock(self, client: str) -> None:
        mine = [key for key in KEYS if self._owner(key) == client]
        if mine:
            self.state.apply(QueuesUnlocked("G", by_topic(mine)))
        self.held[client].clear()

    @rule(seconds=st.sampled_from([1.0, 7.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def take_over(self) -> None:
        """A successor knows the grants from a state snapshot, and no renewals."""
        successor = BrokerState()
        for change in self.state.as_changes():
            successor.apply(change)
        assert list(successor.locks) == list(self.state.locks)
        self.state, self.epoch = successor, self.epoch + 1
        self.leases = LockLeases(self.state.locks, self.epoch, self.now_s)

    def _owner(self, key: QueueKey) -> str | None:
        grant = self.state.locks.get("G", key)
        return grant.client_id if grant is not None else None

    @invariant()
    def one_client_at_a_time_believes_that_it_has_a_queue(self) -> None:
        for key in KEYS:
            owners = [
                client
                for client, held in self.held.items()
                if key in held and held[key][1] > self.now_s
            ]
            assert len(owners) <= 1, (key, owners)
            assert not owners or self._owner(key) == owners[0]

    @invariant()
    def who_lost_a_queue_can_neither_pull_nor_commit(self) -> None:
        for held in self.held.values():
            for key, (number, _) in held.items():
                if number < self.newest[key]:
                    with pytest.raises(QueueLocked):
                        self.state.locks.check_commit("G", key, number)
                    if self._owner(key) is not None:
                        with pytest.raises(QueueLocked):
                            self.state.locks.check_pull("G", key, number)


TestLocks = Locks.TestCase


def test_a_deleted_group_and_a_deleted_topic_leave_no_lock() -> None:
    state = BrokerState()
    leases = LockLeases(state.locks, 1, 0.0)
    for group in "GH":
        state.apply(QueuesLocked(leases.plan_grant(group, "a", KEYS)))
    state.locks.forget_group("G")
    state.locks.forget_topic("T")
    assert [(run.group, run.queues) for run in state.locks] == [("H", {"U": (0,)})]
