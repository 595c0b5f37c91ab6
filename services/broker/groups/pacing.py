"""Work of a crowd in small turns, between which the event loop is the others'."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.01  # from one turn to the next
WAIT_S_MAX = 0.1
ENTER_COUNT, ENTER_COUNT_MIN = 16, 2  # calls of a turn


class Pacer:
    """``work`` does one turn's work, and says whether it did any. The first turn is at once; the
    next one follows after TURN_S, and ``patience`` times as much later as this one began late: a
    loop that has much to do gets fewer turns. Belongs to the event loop.
    """

    def __init__(self, work: Callable[[], bool], patience: float) -> None:
        self._work = work
        self._patience = patience
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """There is work."""
        if self._next is None:
            self._take(asyncio.get_running_loop().time())

    def _take(self, due_s: float) -> None:
        self._next = None
        loop = asyncio.get_running_loop()
        late_s = loop.time() - due_s
        if self._work():
            wait_s = min(WAIT_S_MAX, TURN_S + self._patience * late_s)
            at_s = loop.time() + wait_s
            self._next = loop.call_at(at_s, self._take, at_s)


class Admission:
    """Admits calls of a crowd in turns, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = 0  # of the last turn
        self._pacer = Pacer(self._let_in, 1.0)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Returns when it is this call's turn: at once, when there is no crowd."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._pacer.start()
        await turn

    def _let_in(self) -> bool:
        # While more calls come than are let in, the loop is to take calls: others wait among them.
        count_max = ENTER_COUNT if len(self._waiting) <= self._left else ENTER_COUNT_MIN
        let_in = 0
        while self._waiting and let_in < count_max:
            turn = self._waiting.popleft()
            if not turn.done():  # else its call has ended
                turn.set_result(None)
                let_in += 1
        self._left = len(self._waiting)
        return let_in > 0
