"""Calls of clients and their holds: parking, cancelling, deadlines, draining."""

from __future__ import annotations

import asyncio

from cometmq.clock import Clock
from cometmq.errors import CometError
from cometmq.rpc.tasks import wait_at_most
from services.pullhold.answers import Answer, Answers, Inbox, Room
from services.pullhold.broker_link import Brokers
from services.pullhold.holds import Holds
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import Due, HoldSpec, HoldState, Session

TICK_S = 0.01  # holds that end within it end together


class HoldService:
    """Belongs to the event loop; :meth:`run` is its task."""

    def __init__(
        self, holds: Holds, answers: Answers, brokers: Brokers, clock: Clock, metrics: HoldMetrics
    ) -> None:
        self.answers = answers
        self._holds = holds
        self._brokers = brokers
        self._clock = clock
        self._metrics = metrics
        self._sessions: set[Session] = set()
        self._sooner = asyncio.Event()  # a hold is due before `run` looks
        holds.at_sooner(self._sooner.set)

    def open(self, client: str, room: Room) -> Session:
        """A new call of a client; ``room`` takes its answers. LimitExceeded."""
        session = self._holds.open(client, Inbox(room))
        self._sessions.add(session)
        return session

    def close(self, session: Session) -> None:
        """The call is over."""
        self._sessions.discard(session)
        self._holds.close(session, self._clock.monotonic_s())
        self.answers.release(session, session.inbox.unsent_bytes)

    def park(self, session: Session, hold_id: int, spec: HoldSpec) -> None:
        """Holds a pull; the answer goes to the session's inbox. LimitExceeded."""
        link = self._brokers.link(spec.key.broker_group)
        is_new = self._holds.queues.find(spec.key) is None
        hold = self._holds.park(session, hold_id, spec, self._clock.monotonic_s())
        if is_new:
            link.changes.watch([spec.key])
        if hold.state is HoldState.PULLING:
            link.pulls.pull([hold])
        else:
            link.changes.want_inline(hold)

    def refuse(self, session: Session, hold_id: int, error: CometError) -> None:
        """Answers a hold that cannot be parked."""
        self._metrics.refused.labels(error.name()).inc()
        session.inbox.put(Answer(hold_id, None, error))

    def cancel(self, session: Session, hold_id: int) -> None:
        """The client cancels a hold; one that is answered already is no error."""
        hold = session.holds.get(hold_id)
        if hold is not None:
            self._holds.end(hold, self._clock.monotonic_s())

    def finish(self, session: Session) -> None:
        """The client sends no more holds: the call ends with the answer to its last one."""
        session.inbox.finishing = True
        self.answers.finish_if_done(session)

    async def run(self) -> None:
        """Answers the holds that are due; until cancelled."""
        while True:
            self._sooner.clear()
            due_s = self._holds.next_due_s()
            if due_s is None:
                await self._sooner.wait()
                continue
            wait_s = max(TICK_S, due_s - self._clock.monotonic_s())
            if await wait_at_most(self._sooner, wait_s):
                continue
            for hold, why in self._holds.due(self._clock.monotonic_s()):
                if why is Due.DEADLINE:
                    self.answers.send_nothing(hold)
                elif why is Due.UNTAKEN:
                    self._metrics.wakes.inc()
                    self.answers.send_arrived(hold)
                else:
                    self.answers.send_error(hold, self._brokers.link(hold.key.broker_group).error)

    def drain(self) -> None:
        """Answers all holds now and ends all calls: their clients go to another pull-hold."""
        for hold in self._holds.drain(self._clock.monotonic_s()):
            self.answers.send_nothing(hold)
        for session in self._sessions:
            session.inbox.close()
