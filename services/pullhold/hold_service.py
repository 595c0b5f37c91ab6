"""Where calls of clients meet the holds: parking, taking back, the end of their time, draining."""

from __future__ import annotations

import asyncio

from cometmq.clock import Clock
from cometmq.errors import CometError
from services.pullhold.answers import Answer, Answers, Inbox, Room
from services.pullhold.broker_link import Brokers
from services.pullhold.holds import Holds
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import Due, HoldSpec, HoldState, Session

TICK_S = 0.01  # holds that end within it end together
LOOK_AGAIN_S = 0.25  # what becomes due without a new hold: a broker that was lost


class HoldService:
    """Belongs to the event loop; :meth:`run` is its task."""

    def __init__(
        self, holds: Holds, answers: Answers, brokers: Brokers, clock: Clock, metrics: HoldMetrics
    ) -> None:
        self._holds = holds
        self._answers = answers
        self._brokers = brokers
        self._clock = clock
        self._metrics = metrics
        self._sessions: set[Session] = set()
        self._looks_at_s = 0.0  # when `run` will look at the deadlines next
        self._sooner = asyncio.Event()

    def open(self, client: str, room: Room) -> Session:
        """A new call of a client; ``room`` is for its answers. LimitExceeded."""
        session = self._holds.open(client, Inbox(room))
        self._sessions.add(session)
        return session

    def close(self, session: Session) -> None:
        """The call is over."""
        self._sessions.discard(session)
        self._holds.close(session, self._clock.monotonic_s())
        self._answers.forget(session)

    def park(self, session: Session, hold_id: int, spec: HoldSpec) -> None:
        """Hold a pull; its answer comes into the session's inbox. LimitExceeded."""
        link = self._brokers.link(spec.key.broker_group)
        is_new = self._holds.queues.find(spec.key) is None
        hold = self._holds.park(session, hold_id, spec, self._clock.monotonic_s())
        if is_new:
            link.watch(spec.key)
        if hold.state is HoldState.PULLING:
            link.pulls.pull([hold])
        else:
            link.want_inline(hold)
        if hold.deadline_s < self._looks_at_s:
            self._sooner.set()

    def refuse(self, session: Session, hold_id: int, error: CometError) -> None:
        """Answer a hold that cannot be parked."""
        self._metrics.refused.labels(error.name()).inc()
        session.inbox.put(Answer(hold_id, None, error, 0))

    def cancel(self, session: Session, hold_id: int) -> None:
        """The client takes a hold back; one that was answered already does not matter."""
        hold = session.holds.get(hold_id)
        if hold is not None:
            self._holds.end(hold, self._clock.monotonic_s())

    def finish(self, session: Session) -> None:
        """The client asks for no more: the call ends with the answer to its last hold."""
        session.inbox.finishing = True
        self._answers.finish_if_done(session)

    def taken(self, session: Session, answer: Answer) -> None:
        """The client has got the answer."""
        self._answers.taken(session, answer)

    async def run(self) -> None:
        """Answers the holds whose time is over; until cancelled."""
        while True:
            now_s = self._clock.monotonic_s()
            due_s = self._holds.next_due_s()
            wait_s = LOOK_AGAIN_S if due_s is None else min(LOOK_AGAIN_S, due_s - now_s)
            self._looks_at_s = now_s + wait_s
            await self._wait(max(TICK_S, wait_s))
            self._expire()

    async def _wait(self, seconds: float) -> None:
        self._sooner.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._sooner.wait()
        except TimeoutError:
            pass

    def _expire(self) -> None:
        for hold, why in self._holds.due(self._clock.monotonic_s()):
            if why is Due.DEADLINE:
                self._answers.send_nothing(hold)
            else:
                error = self._brokers.why_unreachable(hold.key.broker_group)
                self._answers.send_error(hold, error)

    def drain(self) -> None:
        """Answer everything now and end all calls: their clients go elsewhere."""
        for hold in self._holds.drain(self._clock.monotonic_s()):
            self._answers.send_nothing(hold)
        for session in self._sessions:
            session.inbox.close()
