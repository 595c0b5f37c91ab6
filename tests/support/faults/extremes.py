"""Checkers for what few runs do: topics that are deleted and made anew, and the loss of all power.

What they give is like that of :mod:`tests.support.faults.checkers`: the promises that were
broken, one line each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.support.faults.checkers import Held, holds
from tests.support.faults.history import (
    Darkness,
    History,
    Outcome,
    Place,
    Queue,
    Rebirth,
    Seen,
    Send,
)


def revenants(history: History, final: Mapping[Queue, Held]) -> Iterator[str]:
    """A message that was acknowledged before its topic was deleted, in the topic's new life."""
    for rebirth in history.rebirths:
        old = {send.message for send in bygone(history, rebirth)}
        for queue, held in final.items():
            if queue[0] == rebirth.topic:
                yield from (f"{name} in {queue}" for name in held.messages if name in old)
        for seen in history.seen():
            if seen.message in old and _is_of_new_life(rebirth, seen):
                yield f"{seen.message} seen by {seen.reader} in generation {seen.generation}"


def bygone(history: History, rebirth: Rebirth) -> Iterator[Send]:
    """Sends that were over before a topic was deleted: nobody tries them again."""
    for send in history.sends.values():
        acknowledged = send.outcome in (Outcome.OK, Outcome.STORED)
        if acknowledged and send.queue[0] == rebirth.topic and send.ended_s < rebirth.began_s:
            yield send


def _is_of_new_life(rebirth: Rebirth, seen: Seen) -> bool:
    topic, queue_id = seen.queue
    return topic == rebirth.topic and seen.generation >= rebirth.generations[queue_id]


def reused_generations(history: History) -> Iterator[str]:
    """A topic that was made anew has a generation that its name had before."""
    for rebirth in history.rebirths:
        for event in history.reads:
            topic, queue_id = event.queue
            if topic != rebirth.topic or event.at_s >= rebirth.began_s:
                continue
            before = event.spot[0] if isinstance(event, Place) else event.generation
            if before >= rebirth.generations[queue_id]:
                yield f"{event.queue}: {before} before, then {rebirth.generations[queue_id]}"


def lost_from_disk(
    history: History, final: Mapping[Queue, Held], topics: frozenset[str]
) -> Iterator[str]:
    """On somebody's disk when all power went, and gone. ``topics``: those from which nothing but
    that may take anything in the run.
    """
    for darkness in history.darknesses:
        for send in on_disk_before(history, darkness):
            gone = not holds(final, send.queue, send.offset, send.message)
            if send.queue[0] in topics and gone and not history.of_former_life(send):
                yield f"{send.message} at log offset {send.log_offset}"


def on_disk_before(history: History, darkness: Darkness) -> Iterator[Send]:
    """Acknowledged by then, and below what somebody had on the disk."""
    for send in history.sends.values():
        told = send.outcome is Outcome.OK and send.ended_s < darkness.at_s
        if told and send.log_offset < darkness.on_disk:
            yield send
