"""What must hold of messages that wait for a time of their own, of transactions, and of a group
that receives. The log itself is the history: each writer's is read when it begins, and in the end.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from cometmq.errors import CometError
from cometmq.format import halves, recall, record, timers
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.messaging.half_runs import EndedHalf
from cometmq.messaging.transactions import Resolution
from cometmq.replication.clock_comparison import Reading
from tests.sim.disk import Disk, Record
from tests.sim.member import CLOCK_SKEW_S_MAX, WALL_MS, WALL_WRONG_S_MAX
from tests.sim.world import Violation

if TYPE_CHECKING:
    from tests.sim.judge import Judge
    from tests.sim.services import Delivery
    from tests.sim.writer import Writer

EARLY_MS_MAX = 2 * round(WALL_WRONG_S_MAX * 1000) + 100


class Fact(NamedTuple):
    """What a stored record says. ``source`` 0: a client sent it. ``due_ms`` 0: it does not wait."""

    topic: str
    source: int
    stored_ms: int  # by a right clock
    unique_id: str
    due_ms: int = 0
    is_tombstone: bool = False
    target: str = ""  # of a half: the topic of its message
    listed: tuple[int, ...] = ()  # halves, by an op record
    ahead_ms: int = 0  # of the writer's clock then, as far as it could not know


class Held(NamedTuple):
    """A message that a member has until then. ``told``: the record of the state that was the newest
    when the member got it: a log with it tells of the lease.
    """

    visible_ms: int
    told: Record
    ahead_ms: int  # of the clock by which the member was told


class MessageJudge:
    """Part of the judge. ``decisions``: how transactions ended, in the database of their producers,
    by unique id.
    """

    def __init__(self, judge: Judge) -> None:
        self._world = judge.world
        self._judge = judge
        self.decisions: dict[str, Resolution] = {}
        self._facts: dict[int, Fact] = {}  # by uid
        # By uid: by a right clock, when it was stored, and by how much a clock was ahead then that
        # the writer could not know to be wrong.
        self._stored: dict[int, tuple[int, int]] = {}
        self._behind_ms: dict[int, int] = {}  # and by how much the clock was behind
        self._held: dict[int, Held] = {}  # by uid
        self._giving_epoch = 0  # of the newest writer that gave messages to a receiver
        self._acknowledged: dict[int, Record] = {}  # by uid: as ``Held.told``

    # --- clocks -----------------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        """By a right clock."""
        return WALL_MS + round(self._world.now * 1000)

    def stored(self, writer: Writer, one: Record) -> None:
        """The writer appends a record."""
        broker = writer.broker if writer.serving else None
        ahead_ms = 0 if broker is None else broker.time.now_ms() - self._now_ms
        if ahead_ms < -EARLY_MS_MAX:
            self._behind_ms[one.uid] = -ahead_ms
        clocks = writer.member.clocks
        if writer.clock.jump_s and clocks.is_off:
            self._world.counts["deliveries by a clock that others correct"] += 1
            readings = [Reading(*values) for values in clocks.readings.values()]
            error_ms = max(one.error_now_ms(clocks.boot_ms()) for one in readings)
            ahead_ms = min(ahead_ms, error_ms)
        elif abs(writer.clock.jump_s) <= EARLY_MS_MAX / 1000 and clocks.skew_ms is not None:
            ahead_ms = min(ahead_ms, EARLY_MS_MAX)
        self._stored[one.uid] = self._now_ms, max(0, ahead_ms)

    @property
    def is_clock_wrong(self) -> bool:
        """Some clock was badly wrong in this run."""
        counts = self._world.counts
        return bool(counts["fault: clock ahead"] + counts["fault: clock behind"])

    def stored_ms(self, one: Record) -> int:
        """When a record was stored, by a right clock."""
        return self._stored[one.uid][0] if one.uid in self._stored else 0

    def ahead_ms(self, one: Record) -> int:
        """How far the writer's clock was ahead then, as far as it could not know."""
        return self._stored[one.uid][1] if one.uid in self._stored else 0

    def behind_ms(self, one: Record) -> int:
        """How far the writer's clock was behind when it stored the record."""
        return self._behind_ms.get(one.uid, 0)

    def _pop_ahead_ms(self, writer: Writer) -> int:
        """How far the clock is ahead by which the writer counts invisible times."""
        return writer.broker.receiving.groups.now_ms() - self._now_ms

    # --- messages received ------------------------------------------------------------------------

    def given(self, writer: Writer, delivery: Delivery) -> None:
        """A member gets these messages."""
        counts, disk = self._world.counts, writer.disk
        if writer.epoch < self._giving_epoch:
            raise Violation(
                f"epoch {writer.epoch} gives messages behind epoch {self._giving_epoch}"
            )
        self._giving_epoch = writer.epoch
        counts["received"] += len(delivery.messages)
        now_ms, ahead_ms = self._now_ms, self._pop_ahead_ms(writer)
        for one in delivery.messages:
            held, acked = self._held.get(one.uid), self._acknowledged.get(one.uid)
            counts["received again"] += held is not None
            if acked is not None:
                if _has(disk, acked):
                    raise Violation(f"{one.number} of {delivery.key} returns, acknowledged")
                counts["received again: the acknowledgement was lost in a fail-over"] += 1
            elif held is not None and now_ms < held.visible_ms - EARLY_MS_MAX - max(
                0, ahead_ms - held.ahead_ms
            ):
                if _has(disk, held.told):
                    raise Violation(
                        f"{one.number} of {delivery.key} is given {held.visible_ms - now_ms} ms "
                        "before its time"
                    )
                counts["received again: the lease was lost in a fail-over"] += 1
            self._held[one.uid] = Held(delivery.visible_ms - ahead_ms, disk.states[-1], ahead_ms)

    def acknowledged(self, writer: Writer, one: Record) -> None:
        """A member hears that its message is done."""
        self._world.counts["acknowledged messages"] += 1
        self._acknowledged[one.uid] = writer.disk.states[-1]

    def changed(self, writer: Writer, one: Record, visible_ms: int) -> None:
        """A member has a message until then, or no more."""
        self._world.counts["invisible times changed"] += 1
        ahead_ms = self._pop_ahead_ms(writer)
        self._held[one.uid] = Held(visible_ms - ahead_ms, writer.disk.states[-1], ahead_ms)

    def unsure(self, one: Record) -> None:
        """It is not known until when a member has a message."""
        self._held.pop(one.uid, None)

    # --- recalls ----------------------------------------------------------------------------------

    def recalled(self, writer: Writer, handle: str, *, in_time: bool) -> None:
        """A producer hears whether its message was recalled in time."""
        self._world.counts["recalled in time" if in_time else "recalled too late"] += 1
        units = writer.disk.queues[self._judge.group.indexes[TIMER_QUEUE]]
        named = recall.decode(handle)
        if self._fact(units[named.offset]).due_ms != named.due_ms:
            return  # it names a message that a forced election has lost: another is there now
        source = units[named.offset].start
        stored = [one for one in writer.disk.records if one.queue >= 0]
        made = [one for one in stored if self._fact(one).source == source]
        tombstones = [one for one in made if self._fact(one).is_tombstone]
        if in_time != bool(tombstones):
            raise Violation(f"a recall of {source} says {in_time}, the log has {made}")

    # --- transactions -----------------------------------------------------------------------------

    def ended(self, writer: Writer, answer: EndedHalf | CometError) -> None:
        """A producer hears what became of a half."""
        if isinstance(answer, CometError):
            return
        if answer.queue_offset >= 0:
            made = writer.disk.at(answer.log_offset)
            is_there = made is not None and made.number == answer.queue_offset + 1
            if made is None or not is_there or self._fact(made).source != answer.half_log_offset:
                raise Violation(f"the log has not what an end answers: {answer}, {made}")

    # --- what a log tells -------------------------------------------------------------------------

    def check_log(self, writer: Writer) -> None:
        facts = {one.start: self._fact(one) for one in writer.disk.records if one.queue >= 0}
        made: dict[int, list[Fact]] = {}
        for fact in facts.values():
            if fact.source:
                made.setdefault(fact.source, []).append(fact)
        for start, fact in facts.items():
            if fact.topic == TIMER_TOPIC and not fact.is_tombstone:
                self._check_timer(start, fact, made.get(start, []))
            elif fact.topic == HALF_TOPIC:
                self._check_half(start, fact, made.get(start, []))
        listed = Counter(offset for fact in facts.values() for offset in fact.listed)
        for offset, one in enumerate(writer.disk.queues[self._half_index]):
            if listed[offset] and not made.get(one.start):
                unique_id = self._fact(one).unique_id
                if self.decisions.get(unique_id) is not Resolution.ROLLBACK:
                    raise Violation(f"half {offset} is rolled back, and nobody wanted it")

    @property
    def _half_index(self) -> int:
        return self._judge.group.indexes[HALF_TOPIC, 0]

    def _check_timer(self, start: int, fact: Fact, made: list[Fact]) -> None:
        if len(made) > 1:
            raise Violation(f"of the timer at {start} was made {made}")
        for one in made:
            early_ms = fact.due_ms - one.stored_ms
            skew_ms = round(CLOCK_SKEW_S_MAX * 1000) if self.is_clock_wrong else 0
            if not one.is_tombstone and early_ms > EARLY_MS_MAX + skew_ms + one.ahead_ms:
                raise Violation(f"{early_ms} ms early, {one.ahead_ms} may be: {start}")

    def _check_half(self, start: int, fact: Fact, made: list[Fact]) -> None:
        if len(made) > 1:
            raise Violation(f"of the half at {start} was made {made}")
        for one in made:
            is_committed = one.topic != GIVEN_UP_TOPIC
            if one.unique_id != fact.unique_id or (is_committed and one.topic != fact.target):
                raise Violation(f"of the half at {start} was made another message: {one}")
            wanted = self.decisions.get(fact.unique_id)
            if is_committed and wanted is not Resolution.COMMIT:
                raise Violation(f"the half at {start} is seen, its producer says {wanted}")

    def is_drained(self, writer: Writer) -> bool:
        """Nothing waits for its time, its end, or its acknowledgement."""
        broker = writer.broker
        return (
            broker.later.timers.is_empty
            and not len(broker.state.halves)
            and not broker.receiving.open_count
        )

    def check_end(self, writer: Writer) -> None:
        """After peace."""
        self.check_log(writer)
        counts = self._world.counts
        made: dict[int, Fact] = {one.source: one for one in self._all(writer.disk) if one.source}
        for one in writer.disk.records:
            fact = self._fact(one) if one.queue >= 0 else None
            if fact is None:
                continue
            became = made.get(one.start)
            if fact.topic == TIMER_TOPIC and not fact.is_tombstone:
                if became is None:
                    raise Violation(f"the timer at {one.start} is lost")
                counts["timers recalled" if became.is_tombstone else "timers delivered"] += 1
            elif fact.topic == HALF_TOPIC and became is None:
                counts["halves rolled back"] += 1
            elif fact.topic == HALF_TOPIC and became is not None:
                is_given_up = became.topic == GIVEN_UP_TOPIC
                counts["halves given up" if is_given_up else "halves committed"] += 1

    def _all(self, disk: Disk) -> list[Fact]:
        return [self._fact(one) for one in disk.records if one.queue >= 0]

    def _fact(self, stored: Record) -> Fact:
        fact = self._facts.get(stored.uid)
        if fact is None:
            fact = _fact_of(record.decode(stored.data))
            if stored.uid in self._stored:
                stored_ms, ahead_ms = self._stored[stored.uid]
                fact = fact._replace(stored_ms=stored_ms, ahead_ms=ahead_ms)
            self._facts[stored.uid] = fact
        return fact


def _fact_of(found: record.Record) -> Fact:
    due_ms, is_tombstone, target = 0, False, ""
    listed: tuple[int, ...] = ()
    if found.topic == TIMER_TOPIC:
        due_ms = timers.due_ms(found.raw_properties) or 0
        is_tombstone = bool(timers.recalls(found.raw_properties))
    elif found.topic == HALF_TOPIC:
        its = halves.read(found.raw_properties)
        target = "" if its is None else its.topic
    elif found.topic == OP_TOPIC:
        listed = tuple(halves.ended_halves(found.body))
    source = found.prepared_offset
    return Fact(
        found.topic,
        source,
        found.store_time_ms,
        found.unique_id,
        due_ms,
        is_tombstone,
        target,
        listed,
    )


def _has(disk: Disk, told: Record) -> bool:
    found = disk.at(told.start)
    return found is not None and found.uid == told.uid
