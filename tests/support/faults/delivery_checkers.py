"""Decides whether messages that come later came as they are promised to: never early, never lost,
once; none that was recalled in time; no half before it is committed; each that a receiver
acknowledged never again, each that it did not acknowledge again, and not before its time.

All topics of such messages keep what was acknowledged, whatever happened in the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from tests.support.faults.checkers import (
    RETRIES_S,
    Held,
    Verdict,
    missing,
    phantoms,
    reader_faults,
    taken_back,
    unexplained_copies,
    unseen,
)
from tests.support.faults.delivery_history import DeliveryHistory, Given, Half, Place, Timed
from tests.support.faults.history import History, Outcome, Queue, Send

LATE_S_MAX = 20.0  # in peace, on a machine that is busy with several clusters
LEASE_LOST_S = 5.0  # so long after a fault a member may be given what another had got in it


@dataclass(frozen=True)
class Ends:
    """What there is in the end. ``stored_ms``: of the messages with a time of their own, when they
    were stored for consumers, by message. ``shown``: how often each half is seen.
    """

    queues: Mapping[Queue, Held]
    stored_ms: Mapping[str, Sequence[int]]
    shown: Counter[str]
    received: frozenset[str]  # topics


def judge_deliveries(history: DeliveryHistory, ends: Ends) -> Verdict:
    """All checkers of messages that come later."""
    verdict = Verdict()
    topics = frozenset(topic for topic, _ in ends.queues)
    received = {queue: held for queue, held in ends.queues.items() if queue[0] in ends.received}
    watched = {queue: held for queue, held in ends.queues.items() if queue not in received}
    _judge_timed(history, ends, verdict)
    _judge_halves(history, ends, verdict)
    _judge_given(history, received, verdict)
    verdict.add("received: acknowledged by brokers and lost", _names(missing(history, received)))
    verdict.add("received: stored and never sent", phantoms(_without_reads(history), received))
    copies = unexplained_copies(history, received, frozenset())
    verdict.add("received: copies without a cause", copies)
    verdict.add("later: seen and taken back", taken_back(history, watched, topics))
    verdict.add("later: silent skips and rewinds", reader_faults(history))
    verdict.add("later: never seen", unseen(history, watched))
    return verdict


def _names(sends: Iterator[Send]) -> Iterator[str]:
    return (send.message for send in sends)


def _without_reads(history: DeliveryHistory) -> History:
    return History(sends=history.sends)


# --- a time of their own --------------------------------------------------------------------------


def _judge_timed(history: DeliveryHistory, ends: Ends, verdict: Verdict) -> None:
    timed = list(history.timed.values())
    stored = ends.stored_ms
    verdict.counts["timed: sent"] = len(timed)
    verdict.counts["timed: acknowledged"] = sum(one.outcome is Outcome.OK for one in timed)
    verdict.counts["timed: recalled in time"] = sum(one.in_time is True for one in timed)
    verdict.counts["timed: recalled too late"] = sum(one.in_time is False for one in timed)
    verdict.counts["timed: delivered"] = sum(map(len, stored.values()))
    verdict.add("timed: early", _early(history, ends))
    verdict.add("timed: lost", (one.message for one in timed if _is_lost(one, stored)))
    seen = (one.message for one in timed if one.in_time and one.message in stored)
    verdict.add("timed: delivered although recalled in time", seen)
    twice = (one for one in timed if len(stored.get(one.message, ())) > 1)
    doubles = (one.message for one in twice if not _sent_again(history, one))
    verdict.add("timed: doubles without a cause", doubles)
    verdict.add("timed: from nowhere", stored.keys() - history.timed.keys())
    verdict.add("timed: late without a cause", _late(history, stored))


def _early(history: DeliveryHistory, ends: Ends) -> Iterator[str]:
    for message, stored_ms in ends.stored_ms.items():
        timed = history.timed.get(message)
        if timed is not None and min(stored_ms) < timed.due_ms:
            yield f"{message}, {timed.due_ms - min(stored_ms)} ms"


def _is_lost(timed: Timed, stored: Mapping[str, Sequence[int]]) -> bool:
    """A recall that was not answered may have been in time."""
    may_be_gone = timed.is_recalled and timed.in_time is not False
    return timed.outcome is Outcome.OK and not may_be_gone and timed.message not in stored


def _late(history: DeliveryHistory, stored: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Too long after its time, its acknowledgement, and the end of all faults before it came."""
    for message, all_ms in stored.items():
        timed = history.timed.get(message)
        if timed is None or timed.ended_s == inf:
            continue
        at_s = timed.due_s + (min(all_ms) - timed.due_ms) / 1000
        since_s = max(timed.due_s, timed.ended_s)
        for fault in history.disturbances:
            if fault.began_s <= at_s:
                since_s = max(since_s, min(fault.ended_s, at_s))
        if at_s - since_s > LATE_S_MAX:
            yield f"{message}, {at_s - since_s:.1f} s"


def _sent_again(history: DeliveryHistory, one: Timed | Half) -> bool:
    """Something was wrong that made its producer send it once more."""
    return history.disturbed(one.began_s, one.ended_s, RETRIES_S)


# --- transactions ---------------------------------------------------------------------------------


def _judge_halves(history: DeliveryHistory, ends: Ends, verdict: Verdict) -> None:
    halves = list(history.halves.values())
    kept = [half for half in halves if half.outcome is Outcome.OK]
    orphans = [half for half in kept if half.ending_s == inf]
    shown = ends.shown
    verdict.counts["halves: sent"] = len(halves)
    verdict.counts["halves: acknowledged"] = len(kept)
    verdict.counts["halves: left by their producers"] = len(orphans)
    verdict.counts["halves: answers to checks"] = sum(map(len, history.checks.values()))
    verdict.counts["halves: committed and delivered"] = shown.total()
    unasked = (half.message for half in orphans if half.message not in history.checks)
    verdict.add("halves: left and never asked about", unasked)
    seen = (half.message for half in halves if not half.is_committed and shown[half.message])
    verdict.add("halves: seen though rolled back", seen)
    verdict.add("halves: seen before they were committed", _seen_as_halves(history))
    lost = (half.message for half in kept if half.is_committed and not shown[half.message])
    verdict.add("halves: committed and lost", lost)
    twice = (half for half in halves if shown[half.message] > 1)
    doubles = (half.message for half in twice if not _sent_again(history, half))
    verdict.add("halves: doubles without a cause", doubles)
    verdict.add("halves: from nowhere", shown.keys() - history.halves.keys())


def _seen_as_halves(history: DeliveryHistory) -> Iterator[str]:
    for seen in history.seen():
        half = history.halves.get(seen.message)
        if half is not None:
            decided_s = min(half.ending_s, *history.checks.get(half.message, ()), inf)
            if seen.at_s < decided_s:
                yield f"{half.message} at {seen.queue} {seen.offset}"


# --- messages received for a time -----------------------------------------------------------------


def _judge_given(
    history: DeliveryHistory, received: Mapping[Queue, Held], verdict: Verdict
) -> None:
    by_place: defaultdict[Place, list[Given]] = defaultdict(list)
    for given in sorted(history.given.values(), key=lambda given: given.began_s):
        by_place[given.place].append(given)
    every = list(history.given.values())
    refusals = Counter(given.refusal for given in every if given.refusal)
    verdict.counts["received: deliveries"] = len(every)
    verdict.counts["received: acknowledged"] = sum(given.acked_s < inf for given in every)
    verdict.counts["received: again"] = len(every) - len(by_place)
    for refusal, count in sorted(refusals.items()):
        verdict.counts[f"received: acknowledgements refused: {refusal}"] = count
    pairs = [pair for some in by_place.values() for pair in pairwise(some)]
    early = [pair for pair in pairs if _is_early(*pair)]
    lost = [pair for pair in early if _is_lease_lost(history, *pair)]
    verdict.counts["received: given early, its lease lost in a fault"] = len(lost)
    verdict.add(
        "received: two had it at a time",
        (
            f"{after.message} at {before.client} and {after.client}, "
            f"{before.until_s - after.began_s:.1f} s early"
            for before, after in early
            if not _is_lease_lost(history, before, after)
        ),
    )
    verdict.add("received: again though acknowledged", _revenants(by_place))
    verdict.add("received: never acknowledged", _unacknowledged(by_place, received))
    verdict.add("received: from nowhere", _strange(by_place, received))


def _is_early(before: Given, after: Given) -> bool:
    return after.began_s < before.until_s


def _is_lease_lost(history: DeliveryHistory, before: Given, after: Given) -> bool:
    return history.disturbed(before.asked_s, after.began_s, LEASE_LOST_S)


def _revenants(by_place: Mapping[Place, Sequence[Given]]) -> Iterator[str]:
    for place, some in by_place.items():
        done_s = min(given.acked_s for given in some)
        for given in some:
            if given.asked_s > done_s:
                yield f"{given.message} of {place} at {given.client}"


def _unacknowledged(
    by_place: Mapping[Place, Sequence[Given]], received: Mapping[Queue, Held]
) -> Iterator[str]:
    """An acknowledgement without an answer may have been one."""
    for queue, held in received.items():
        for offset, message in enumerate(held.messages, held.first):
            some = by_place.get(Place(queue, offset), ())
            if not any(given.acking_s < inf and not given.refusal for given in some):
                yield f"{message} of {queue} {offset}, after {len(some)} deliveries"


def _strange(
    by_place: Mapping[Place, Sequence[Given]], received: Mapping[Queue, Held]
) -> Iterator[str]:
    for place, some in by_place.items():
        held = received[place.queue]
        index = place.offset - held.first
        there = held.messages[index] if 0 <= index < len(held.messages) else None
        for given in some:
            if given.message != there:
                yield f"{given.message} at {place}, where {there} is"
