"""Decides whether a history is one that CometMQ's promises allow.

Each checker gets what clients did and saw, and what the queues hold in the end, and gives the
promises that were broken, one line each. What a promise allows is counted instead. A topic is
*firm* when nothing that happened in the run may take back what was acknowledged or seen in it; of
the others a fail-over may take back messages, but never without telling it to readers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from tests.support.faults.history import (
    History,
    Outcome,
    Place,
    Queue,
    Seen,
    Send,
    Spot,
    Step,
)

# A producer tries again for so long after a fault, so its copies may come so long after it.
RETRIES_S = 35.0
# A commit is answered when the writer has it, and is in the log within a second; a writer that was
# deposed answers until it hears of that.
COMMIT_LOSABLE_S = 15.0
HEALING_S = 30.0  # after the end of a fault readers have come further than they were


class Held(NamedTuple):
    """A queue in the end: its generation, and its messages by offset from ``first`` on. What was
    before has gone because a disk was full.
    """

    generation: int
    messages: Sequence[str]
    first: int = 0


@dataclass
class Verdict:
    """``broken``: promises that were not kept. ``counts``: what happened, allowed or not."""

    broken: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, findings: Iterable[str]) -> None:
        """The findings of one checker, counted under ``what``, with 0 when there are none."""
        found = list(findings)
        self.counts[what] += len(found)
        self.broken += [f"{what}: {finding}" for finding in found]


def judge(
    history: History,
    final: Mapping[Queue, Held],
    firm: frozenset[str],
    hasty: frozenset[str] = frozenset(),
    single: frozenset[str] = frozenset(),
) -> Verdict:
    """All checkers that need nothing but the history. ``firm``: the firm topics. ``hasty``: see
    :func:`disorder`. ``single``: see :func:`unexplained_copies`.
    """
    verdict = Verdict(counts=counted(history, final))
    losses = [send for send in missing(history, final) if not history.of_former_life(send)]
    verdict.add("acknowledged messages lost", (s.message for s in losses if s.queue[0] in firm))
    loose = [send for send in losses if send.queue[0] not in firm]
    verdict.counts["acknowledged messages lost where the mode allows it"] += len(loose)
    # A topic that was made anew has taken back all that was seen in its former life, openly.
    unbroken = firm - {rebirth.topic for rebirth in history.rebirths}
    verdict.add("messages from nowhere", phantoms(history, final))
    verdict.add("places with two messages", disagreements(history, final, unbroken))
    verdict.add("places acknowledged twice", shared_receipts(history, firm))
    verdict.add("messages out of order", disorder(history, final, hasty))
    verdict.add("copies without a cause", unexplained_copies(history, final, single))
    verdict.add("seen and taken back", taken_back(history, final, unbroken))
    verdict.add("silent skips and rewinds", reader_faults(history))
    verdict.add("committed offsets gone back", commit_faults(history))
    verdict.add("messages never seen", unseen(history, final))
    return verdict


def counted(history: History, final: Mapping[Queue, Held]) -> Counter[str]:
    """What happened, without any judgement."""
    counts: Counter[str] = Counter()
    for send in history.sends.values():
        counts["messages sent"] += 1
        counts[f"sends: {send.outcome.value}"] += 1
        if send.refusal:
            counts[f"refused: {send.refusal}"] += 1
    seen = Counter((s.reader, s.message) for s in history.seen())
    counts["deliveries"] = seen.total()
    counts["deliveries repeated"] = seen.total() - len(seen)
    stored = [message for held in final.values() for message in held.messages]
    counts["messages stored"] = len(stored)
    counts["copies stored"] = len(stored) - len(set(stored))
    counts["messages gone because a disk was full"] = sum(held.first for held in final.values())
    counts["fences"] = sum(isinstance(e, Place) and e.step is Step.FENCED for e in history.reads)
    return counts


def missing(history: History, final: Mapping[Queue, Held]) -> Iterator[Send]:
    """Acknowledged, and in the end not where the acknowledgement said."""
    for send in history.sends.values():
        told = send.outcome is Outcome.OK
        if told and not holds(final, send.queue, send.offset, send.message):
            yield send


def phantoms(history: History, final: Mapping[Queue, Held]) -> Iterator[str]:
    """Stored or seen, and sent by nobody, or refused before it was sent, or in a queue that it was
    not sent to.
    """
    for message, queue, where in _everywhere(history, final):
        send = history.sends.get(message)
        if send is None:
            yield f"{message} {where}: nobody sent it"
        elif send.outcome in (Outcome.FAILED, Outcome.REFUSED):
            yield f"{message} {where}: its send was refused"
        elif send.queue != queue:
            yield f"{message} {where}: it was sent to {send.queue}"


def disagreements(
    history: History, final: Mapping[Queue, Held], firm: frozenset[str]
) -> Iterator[str]:
    """One place, two messages, in deliveries or in the end. In topics that are not firm a place may
    get another message with another generation, so only who is told of generations counts.
    """
    held: dict[tuple[Queue, int, int], str] = {}
    for queue, generation, offset, message in _places(history, final):
        known = 0 if queue[0] in firm else generation
        if known or queue[0] in firm:
            before = held.setdefault((queue, known, offset), message)
            if before != message:
                yield f"{queue} {offset} of generation {generation}: {before} and {message}"


def shared_receipts(history: History, firm: frozenset[str]) -> Iterator[str]:
    """One place of the log, acknowledged for two messages: two writers."""
    logged: dict[int, str] = {}
    for send in history.sends.values():
        if send.outcome is Outcome.OK and send.queue[0] in firm:
            before = logged.setdefault(send.log_offset, send.message)
            if before != send.message:
                yield f"log offset {send.log_offset}: {before} and {send.message}"


def disorder(history: History, final: Mapping[Queue, Held], hasty: frozenset[str]) -> Iterator[str]:
    """A producer's messages in a queue begin to appear in the order in which they were sent.
    ``hasty``: producers with several unanswered batches, whose order a refusal may change.
    """
    for queue, held in final.items():
        newest: dict[str, int] = {}
        for message in dict.fromkeys(held.messages):
            send = history.sends.get(message)
            if send is None:
                continue  # a phantom
            before = newest.get(send.producer, -1)
            newest[send.producer] = max(send.number, before)
            excused = send.producer in hasty and _disturbed(history, send.began_s, send.ended_s)
            if send.number < before and not excused:
                yield f"{queue}: {message} behind number {before}"


def unexplained_copies(
    history: History, final: Mapping[Queue, Held], single: frozenset[str]
) -> Iterator[str]:
    """Stored more than once, though nothing was wrong that made its producer send it again.
    ``single``: producers that never send anything again.
    """
    for queue, held in final.items():
        for message, times in Counter(held.messages).items():
            send = history.sends.get(message)
            if times == 1 or send is None:
                continue
            if send.producer in single or not _disturbed(history, send.began_s, send.ended_s):
                yield f"{message}: {times} times in {queue}"


def taken_back(
    history: History, final: Mapping[Queue, Held], firm: frozenset[str]
) -> Iterator[str]:
    """Seen, and in the end not there. In topics that are not firm: though the generation in which
    it was seen is still the queue's.
    """
    for seen in history.seen():
        there = holds(final, seen.queue, seen.offset, seen.message)
        generation = final[seen.queue].generation if seen.queue in final else 0
        if not there and (seen.queue[0] in firm or seen.generation == generation):
            yield f"{seen.message} by {seen.reader} at {seen.queue} {seen.offset}"


def gone(final: Mapping[Queue, Held]) -> Iterator[str]:
    """Messages that retention took, for queues of a run in which no disk was full."""
    yield from (f"{held.first} of {queue}" for queue, held in final.items() if held.first)


def unseen(history: History, final: Mapping[Queue, Held]) -> Iterator[str]:
    """In a queue in the end, and some reader never saw it. Every reader reads every queue."""
    got: dict[tuple[str, Queue], set[str]] = defaultdict(set)
    for seen in history.seen():
        got[seen.reader, seen.queue].add(seen.message)
    for reader, queue in product(sorted({reader for reader, _ in got}), final):
        missed = [m for m in final[queue].messages if m not in got[reader, queue]]
        yield from (f"{message} by {reader} in {queue}" for message in missed)


def reader_faults(history: History) -> Iterator[str]:
    """A reader that is told of positions gets each offset after the one before, unless it began
    anew, or was fenced: then it goes back, never forward, into a newer generation.
    """
    for (reader, queue), events in history.readers().items():
        if not any(isinstance(event, Place) for event in events):
            continue  # it is not told of positions
        for finding in _walk(events):
            yield f"{reader} in {queue}: {finding}"


def _walk(events: Sequence[Seen | Place]) -> Iterator[str]:
    at: Spot | None = None
    for event in events:
        if isinstance(event, Seen):
            if at is not None and event.offset != at[1]:
                yield f"offset {event.offset} came where {at[1]} was due"
            at = (event.generation, event.offset + 1)
        elif event.step is Step.BEGAN:
            at = event.spot
        elif event.step is Step.FENCED:
            if at is not None and not (event.spot[0] > at[0] and event.spot[1] <= at[1]):
                yield f"fenced from {at} to {event.spot}"
            at = event.spot


def commit_faults(history: History) -> Iterator[str]:
    """What the broker says is committed is never less than what it had kept before, but for a
    newer generation, or the last seconds before a fault.
    """
    for (reader, queue), events in history.readers().items():
        places = [event for event in events if isinstance(event, Place)]
        kept = [event for event in places if event.step is Step.COMMITTED]
        for asked in (event for event in places if event.step is Step.ASKED):
            if (lowest := _least(history, kept, asked)) and asked.spot < lowest:
                yield f"{reader} in {queue}: {asked.spot}, though {lowest} was committed"


def _least(history: History, kept: Sequence[Place], asked: Place) -> Spot | None:
    """What must at least be committed when the broker is asked."""
    before = [commit for commit in kept if commit.at_s <= asked.at_s]
    sure = [commit.spot for commit in before if _is_sure(history, commit, asked.at_s)]
    return max(sure, default=None)


def _is_sure(history: History, commit: Place, at_s: float) -> bool:
    """Nothing was wrong when it was kept, or that is so long ago that its reader has committed
    since.
    """
    exposed_s = min(at_s, commit.at_s + COMMIT_LOSABLE_S)
    ends = [
        fault.ended_s
        for fault in history.disturbances
        if fault.began_s <= exposed_s and fault.ended_s + COMMIT_LOSABLE_S >= commit.at_s
    ]
    return not ends or max(ends) + HEALING_S <= at_s


# --- what needs more than the history -------------------------------------------------------------


class Opening(NamedTuple):
    """A member opened an epoch for writing."""

    epoch: int
    member: int


def two_writers(openings: Sequence[Opening]) -> Iterator[str]:
    """Every epoch was opened once, and above all that were opened before. ``openings``: in the
    order in which they happened.
    """
    for before, after in pairwise(openings):
        if after.epoch <= before.epoch:
            yield f"epoch {after.epoch} of member {after.member} came after {before}"


def differing_epochs(kept: Mapping[int, Sequence[tuple[int, int]]]) -> Iterator[str]:
    """All members tell the same story of epochs. ``kept``: (epoch, start) by member."""
    members = sorted(kept)
    for member in members[1:]:
        if list(kept[member]) != list(kept[members[0]]):
            yield f"epochs of member {member}: {kept[member]}, not {kept[members[0]]}"


# --- helpers --------------------------------------------------------------------------------------


def holds(final: Mapping[Queue, Held], queue: Queue, offset: int, message: str) -> bool:
    """Whether it is there in the end, or has gone with what was before the queue's first."""
    held = final.get(queue, Held(0, ()))
    index = offset - held.first
    return 0 <= offset < held.first or (
        0 <= index < len(held.messages) and held.messages[index] == message
    )


def _everywhere(history: History, final: Mapping[Queue, Held]) -> Iterator[tuple[str, Queue, str]]:
    """Every message that was seen or stored, with its queue and words for where."""
    for seen in history.seen():
        yield seen.message, seen.queue, f"seen by {seen.reader}"
    for queue, held in final.items():
        for message in held.messages:
            yield message, queue, "stored"


def _places(history: History, final: Mapping[Queue, Held]) -> Iterator[tuple[Queue, int, int, str]]:
    """Every sighting: queue, generation, offset, message."""
    for queue, held in final.items():
        for offset, message in enumerate(held.messages, held.first):
            yield queue, held.generation, offset, message
    for seen in history.seen():
        yield seen.queue, seen.generation, seen.offset, seen.message


def _disturbed(history: History, from_s: float, to_s: float) -> bool:
    return history.disturbed(from_s, to_s, RETRIES_S)
