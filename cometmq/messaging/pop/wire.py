"""Leases as the state log has them: ``docs/format/state.md``, kind ``pop``.

Lease numbers and times are written less what all of a change have in common, so that a lease takes
some 25 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cometmq.messaging.pop.leases import Done, Given
from cometmq.messaging.pop.masks import mask_of, runs_of
from cometmq.messaging.pop.table import QueueMoved

Json = Any  # what json.loads gives


def fields_of(queues: Sequence[QueueMoved]) -> dict[str, Json]:
    """``b``, ``t`` and ``p`` of a change."""
    base = min(_numbers(queues), default=1) - 1
    base_ms = min(_times(queues), default=0)
    groups: dict[str, dict[str, list[Json]]] = {}
    for one in queues:
        topic, queue_id = one.key
        given = [_given_fields(lease, base, base_ms) for lease in one.given]
        done = [_done_fields(lease, base) for lease in one.done]
        entry = [queue_id, one.generation, one.next_offset, given, done]
        groups.setdefault(one.group, {}).setdefault(topic, []).append(entry)
    return {"b": base, "t": base_ms, "p": groups}


def queues_of(base: int, base_ms: int, groups: Mapping[str, Json]) -> tuple[QueueMoved, ...]:
    """The way back. Raises ValueError, TypeError, KeyError for what no change holds."""
    return tuple(
        QueueMoved(
            group,
            (topic, queue_id),
            generation,
            next_offset,
            tuple(_given(lease, base, base_ms) for lease in given),
            tuple(_done(lease, base) for lease in done),
        )
        for group, topics in groups.items()
        for topic, entries in topics.items()
        for queue_id, generation, next_offset, given, done in entries
    )


def _given_fields(given: Given, base: int, base_ms: int) -> list[int]:
    source = given.source - base if given.source else 0
    visible_ms = given.visible_ms - base_ms if given.attempt else 0
    head = [given.number - base, source, given.first, visible_ms, given.attempt]
    return head + runs_of(given.mask)


def _given(fields: list[int], base: int, base_ms: int) -> Given:
    number, source, first, visible_ms, attempt, *runs = _checked(fields)
    return Given(
        number + base,
        source + base if source else 0,
        first,
        mask_of(runs),
        visible_ms + base_ms if attempt else 0,
        attempt,
    )


def _done_fields(done: Done, base: int) -> list[int]:
    if not done.mask:
        return [done.number - base]
    gap = (done.mask & -done.mask).bit_length() - 1
    return [done.number - base, done.first + gap, *runs_of(done.mask >> gap)]


def _done(fields: list[int], base: int) -> Done:
    number, *rest = _checked(fields)
    if not rest:
        return Done(number + base)
    first, *runs = rest
    return Done(number + base, first, mask_of(runs))


def _checked(fields: list[int]) -> list[int]:
    if not all(type(value) is int and value >= 0 for value in fields):
        raise ValueError(f"{fields[:20]!r} are not numbers from 0")
    return fields


def _numbers(queues: Iterable[QueueMoved]) -> Iterator[int]:
    for one in queues:
        for lease in one.given:
            yield lease.number
            if lease.source:
                yield lease.source
        yield from (lease.number for lease in one.done)


def _times(queues: Iterable[QueueMoved]) -> Iterator[int]:
    return (lease.visible_ms for one in queues for lease in one.given if lease.attempt)
