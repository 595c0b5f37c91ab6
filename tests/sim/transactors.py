"""Producers of transactions: they die in the middle, lose ends, and answer checks from the database
that all members of their group share.
"""

from __future__ import annotations

from array import array

from cometmq.errors import CometError
from cometmq.format import halves, record
from cometmq.format.halves import HALF_TOPIC, QUEUE_ID, HalfForm
from cometmq.messaging.half_runs import EndedHalf
from cometmq.messaging.transactions import Resolution
from services.broker.sending.produce import Accepted, Claim
from services.broker.transactions.ends import TOGETHER_MIN
from services.broker.transactions.names import End, EndRun, HalfName
from tests.sim.clients import RESEND_S, Client, ClientMachine
from tests.sim.member import Group
from tests.sim.storage import HOST
from tests.sim.writer import Writer

GROUP = "transactors"
FORM = HalfForm(GROUP)
FETCH_S = 0.5
COMMITTED_SHARE = 0.6
DIES_SHARE = 0.15  # between half and end
RUN_SHARE = 0.02  # of transactions: as many messages as the broker ends with one append
RUN_MORE_MAX = 16
MIXED_SHARE = 0.3  # of such runs, whose halves do not all end alike; and of these halves
TWICE_SHARE = 0.2  # ends that are sent twice
UNKNOWN_SHARE = 0.3  # answers to checks
OPPOSITE_SHARE = 0.1  # of ends, another one follows that says the opposite


class Transactor(Client):
    """One transaction after the other, and a loop that answers checks. ``begins`` False: no more
    transactions.
    """

    begins = True

    def __init__(self, group: Group, machine: ClientMachine, pause_s: float) -> None:
        super().__init__(group, machine)
        self._stream = f"{machine.number:010X}{machine.lives:016X}"
        self._pause_s = pause_s
        self._counter = 0
        self._decisions = group.judge.messages.decisions
        self._keys = group.rules.topics.keys()

    def start(self) -> None:
        self.spawn(self._work())
        self.spawn(self._answer_checks())

    async def _work(self) -> None:
        while self.begins and not self.over:
            await self._transact()
            await self.sleep(self.world.between(0.5, 2.0) * self._pause_s)

    async def _transact(self) -> None:
        rng = self.world.rng
        count = rng.choice([1, 1, 3])
        if rng.random() < RUN_SHARE:
            count = rng.randint(TOGETHER_MIN, TOGETHER_MIN + RUN_MORE_MAX)
            self.world.counts["runs of halves"] += 1
        ids = [f"{self._stream}{self._counter + n:08X}" for n in range(count)]
        self._counter += len(ids)
        names = await self._send(ids)
        is_committed = rng.random() < COMMITTED_SHARE
        wanted = Resolution.COMMIT if is_committed else Resolution.ROLLBACK
        is_mixed = len(ids) >= TOGETHER_MIN and rng.random() < MIXED_SHARE
        for unique_id in ids:  # a check may have come before
            is_other = is_mixed and rng.random() < MIXED_SHARE
            self._decisions.setdefault(unique_id, _opposite(wanted) if is_other else wanted)
        if not names or rng.random() < DIES_SHARE:
            self.world.counts["transactions whose end is lost"] += 1
            return
        await self._end([End(name, self._decisions[name.transaction_id]) for name in names])

    async def _send(self, ids: list[str]) -> list[HalfName]:
        """Empty: it is not known what became of it."""
        topic, queue_id = self._keys[self.world.rng.randrange(self.group.rules.topics.count)]
        records = b"".join(_encoded(topic, queue_id, unique_id) for unique_id in ids)
        claims = [Claim(topic, queue_id, len(ids), half=FORM)]

        async def send(role: Writer) -> tuple[Accepted, list[HalfName]]:
            accepted = await role.send(records, claims)
            [first] = accepted.ticket.appended.queue_offsets[:1]
            names = role.broker.later.half_names(first, accepted.record_count, ids)
            return accepted, names

        until_s = self.world.now + RESEND_S
        while self.world.now < until_s:
            try:
                accepted, names = await self.at_writer(send)
            except CometError:
                await self.sleep(self.world.between(0.1, 1.0))
                continue
            return names if accepted.record_count == len(ids) else []
        return []

    async def _end(self, ends: list[End]) -> None:
        rng, counts = self.world.rng, self.world.counts
        for _ in range(2 if rng.random() < TWICE_SHARE else 1):
            try:
                answers = await self._ended(ends)
            except CometError:
                counts["ends without an answer"] += 1
                continue
            counts["ends refused"] += sum(isinstance(one, CometError) for one in answers)
        if rng.random() < OPPOSITE_SHARE:
            opposite = [end._replace(resolution=_opposite(end.resolution)) for end in ends]
            try:
                answers = await self.at_writer(
                    lambda role: role.broker.later.end_opposite(GROUP, opposite)
                )
            except CometError:
                return
            counts["opposite ends refused"] += sum(isinstance(a, CometError) for a in answers)

    async def _ended(self, ends: list[End]) -> list[EndedHalf | CometError]:
        """Long runs that end alike are named as runs, by the client of the product too."""
        if len(ends) < TOGETHER_MIN or len({end.resolution for end in ends}) > 1:
            return await self.at_writer(lambda role: role.broker.later.end(GROUP, ends))
        log_offsets = array("q", [end.half.log_offset for end in ends])
        run = EndRun(ends[0].half, log_offsets, ends[0].resolution)
        return await self.at_writer(lambda role: role.broker.later.end_run(GROUP, run))

    async def _answer_checks(self) -> None:
        while not self.over:
            await self.sleep(FETCH_S)
            try:
                checks = await self.at_writer(
                    lambda role: role.broker.later.questions(GROUP, self.name)
                )
                if checks:
                    ends = [End(check.half, self._became(check.half)) for check in checks]
                    self.world.counts["checks answered"] += len(ends)
                    await self._answer(ends)
            except CometError:
                continue

    async def _answer(self, ends: list[End]) -> None:
        await self.at_writer(lambda role: role.broker.later.answer(self.name, ends))

    def _became(self, name: HalfName) -> Resolution:
        if self.world.rng.random() < UNKNOWN_SHARE * bool(self.group.failing):
            return Resolution.UNKNOWN
        return self._decisions.setdefault(name.transaction_id, Resolution.ROLLBACK)


def _opposite(resolution: Resolution) -> Resolution:
    return Resolution.ROLLBACK if resolution is Resolution.COMMIT else Resolution.COMMIT


def _encoded(topic: str, queue_id: int, unique_id: str) -> bytes:
    prefix = halves.prefix(FORM, topic, queue_id)
    return record.encode(
        HALF_TOPIC.encode(),
        QUEUE_ID,
        unique_id.encode(),
        prefix + b"UNIQ_KEY\x01" + unique_id.encode() + b"\x02",
        born_time_ms=0,
        born_host=HOST,
        store_host=HOST,
    )
