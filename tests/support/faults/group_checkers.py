"""Decides whether consumer groups got what they are promised: by the calls of their listeners, and
by the dead letters in the end.

A group's messages are those of its topics. What is redelivered has a cause: the listener asked for
it, or something was wrong meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from tests.support.faults.checkers import Held, Verdict, holds
from tests.support.faults.history import Answer, Call, History, Outcome, Queue, Send

# A member that is lost counts for so long: its session, its locks' lease, the queues' hand-over.
# What it had not committed comes again then.
REBALANCE_S = 45.0
UNSEEN_S = 60.0  # a message that everybody can read is with a listener by then


@dataclass(frozen=True)
class Group:
    """``dead``: the messages among its dead letters in the end, oldest first. ``orderly``: its
    listeners get each queue in order. ``tries_max``: send-backs after which a message is dead.
    """

    name: str
    topics: frozenset[str]
    dead: Sequence[str]
    tries_max: int
    orderly: bool = False


def judge_group(
    history: History, final: Mapping[Queue, Held], firm: frozenset[str], group: Group
) -> Verdict:
    """All that a group is promised. ``firm`` as of :func:`tests.support.faults.checkers.judge`:
    what the others lose, their groups may miss.
    """
    verdict = Verdict()
    calls = [call for call in history.calls.values() if call.group == group.name]
    by_message: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_message[call.message].append(call)
    name = group.name
    wanted = list(_wanted(history, final, firm & group.topics))
    answers = Counter(call.answer for call in calls)
    verdict.counts[f"{name}: listener calls"] = len(calls)
    verdict.counts[f"{name}: done"] = answers[Answer.DONE]
    verdict.counts[f"{name}: to come again"] = answers[Answer.LATER]
    verdict.counts[f"{name}: cut short"] = answers[None]
    verdict.counts[f"{name}: dead letters"] = len(group.dead)
    verdict.add(f"{name}: acknowledged and never done", _lost(wanted, by_message, group))
    verdict.add(f"{name}: from nowhere", _phantoms(history, calls, by_message, group))
    verdict.add(f"{name}: places with two messages", _disagreements(calls, firm))
    verdict.add(f"{name}: seen too late", _late(history, wanted, by_message))
    repeated = list(_repeated(by_message, group))
    unexplained = [pair for pair in repeated if not _is_explained(history, *pair)]
    verdict.counts[f"{name}: duplicates"] = len(repeated)
    verdict.add(
        f"{name}: duplicates without a cause",
        (f"{after.message} at {before.client} and {after.client}" for before, after in unexplained),
    )
    verdict.add(f"{name}: dead letters twice", _twice_dead(history, by_message, group))
    if group.orderly:
        verdict.add(f"{name}: out of order", _disorder(calls, firm, group))
        verdict.add(f"{name}: two owners", _overlaps(history, calls))
    return verdict


def _wanted(
    history: History, final: Mapping[Queue, Held], topics: frozenset[str]
) -> Iterator[Send]:
    """What a group has to get: acknowledged, and still there. What is not is another's finding."""
    for send in history.sends.values():
        is_there = send.outcome is Outcome.OK and holds(
            final, send.queue, send.offset, send.message
        )
        removed = is_there and send.offset < final[send.queue].first
        if send.queue[0] in topics and is_there and not removed:
            yield send


def _lost(
    wanted: Iterable[Send], by_message: Mapping[str, Sequence[Call]], group: Group
) -> Iterator[str]:
    """Neither done by a listener nor among the dead letters."""
    dead = set(group.dead)
    for send in wanted:
        answers = [call.answer for call in by_message.get(send.message, ())]
        if Answer.DONE not in answers and send.message not in dead:
            yield f"{send.message} of {send.queue}, after {len(answers)} calls"


def _phantoms(
    history: History,
    calls: Sequence[Call],
    by_message: Mapping[str, Sequence[Call]],
    group: Group,
) -> Iterator[str]:
    """A call, or a dead letter, without a send; a dead letter that no listener gave up."""
    for call in calls:
        send = history.sends.get(call.message)
        if send is None or send.outcome in (Outcome.FAILED, Outcome.REFUSED):
            yield f"{call.message} at {call.client}: nobody has stored it"
        elif call.queue[0] in group.topics and send.queue != call.queue:
            yield f"{call.message} in {call.queue}: it was sent to {send.queue}"
    for message in group.dead:
        tries = [call.tries for call in by_message.get(message, ())]
        if not tries or (max(tries) < group.tries_max and not group.orderly):
            yield f"{message} is dead after tries {tries}"


def _disagreements(calls: Sequence[Call], firm: frozenset[str]) -> Iterator[str]:
    """One place of a firm topic, or of the group's retry topic, and two messages."""
    found: dict[tuple[Queue, int], str] = {}
    for call in calls:
        if call.queue[0] in firm or call.queue[0].startswith("%"):
            before = found.setdefault((call.queue, call.offset), call.message)
            if before != call.message:
                yield f"{call.queue} {call.offset}: {before} and {call.message}"


def _repeated(
    by_message: Mapping[str, Sequence[Call]], group: Group
) -> Iterator[tuple[Call, Call]]:
    """Pairs of calls for one message, the second of which the first did not ask for: it follows one
    that was done, or overlaps it, or comes from where the first was sent back.
    """
    for calls in by_message.values():
        for before, after in pairwise(calls):
            asked_for = before.answer is Answer.LATER and before.ended_s <= after.began_s
            is_same_place = (before.queue, before.offset) == (after.queue, after.offset)
            is_same_try = is_same_place and not group.orderly
            if not asked_for or is_same_try:
                yield before, after


def _is_explained(history: History, before: Call, after: Call) -> bool:
    """Something was wrong from the first call on, or shortly before it."""
    return history.disturbed(before.began_s, after.began_s, REBALANCE_S)


def _late(
    history: History, wanted: Iterable[Send], by_message: Mapping[str, Sequence[Call]]
) -> Iterator[str]:
    """The first call came too long after the message could be read in peace."""
    for send in wanted:
        calls = by_message.get(send.message)
        if not calls:
            continue  # lost, or only in the dead letters: another's finding
        since_s, until_s = send.ended_s, calls[0].began_s
        for fault in history.disturbances:
            if fault.began_s <= until_s:
                since_s = max(since_s, min(fault.ended_s, until_s))
        if until_s - since_s > UNSEEN_S:
            yield f"{send.message} after {until_s - since_s:.1f} s"


def _twice_dead(
    history: History, by_message: Mapping[str, Sequence[Call]], group: Group
) -> Iterator[str]:
    for message, times in Counter(group.dead).items():
        calls = by_message.get(message, ())
        if times > 1 and not any(
            _is_explained(history, before, after) for before, after in pairwise(calls)
        ):
            yield f"{message}: {times} times"


def _disorder(calls: Sequence[Call], firm: frozenset[str], group: Group) -> Iterator[str]:
    """A message of a firm topic went to a listener before the one before it in its queue was done,
    or given up.
    """
    dead = set(group.dead)
    queues: defaultdict[Queue, list[Call]] = defaultdict(list)
    for call in calls:
        if call.queue[0] in firm:
            queues[call.queue].append(call)
    for queue, of_queue in queues.items():
        over_s: dict[int, float] = {}  # by offset, when it was done first, or given up first
        for call in of_queue:
            if call.answer is Answer.DONE or call.message in dead:
                over_s[call.offset] = min(over_s.get(call.offset, inf), call.ended_s)
        first = min(call.offset for call in of_queue)
        for call in of_queue:
            if call.offset > first and call.began_s < over_s.get(call.offset - 1, inf):
                yield f"{queue}: {call.offset} at {call.client} before {call.offset - 1} was done"


def _overlaps(history: History, calls: Sequence[Call]) -> Iterator[str]:
    """Two members had a queue at a time, and none of them had been stopped or lost."""
    newest: dict[Queue, Call] = {}
    for call in calls:
        before = newest.get(call.queue)
        if before is None or call.ended_s >= before.ended_s or before.ended_s == inf:
            newest[call.queue] = call
        if before is None or before.client == call.client or call.began_s >= before.ended_s:
            continue
        if not history.disturbed(before.began_s, call.began_s, 0.0):
            yield f"{call.queue}: {call.client} began while {before.client} was at {before.offset}"
