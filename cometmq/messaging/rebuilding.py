"""The tables of a state of which damage took a part: rebuilt from what the log still has, from
the exports under ``config/``, and from the queues that have messages.

Nothing is left out that any of the three knows: a topic too many is deleted by a command, one too
few hides its messages. All queues begin a generation at 0, so a position of before never names
another message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from cometmq.messaging import topics
from cometmq.messaging.adoption import Tables
from cometmq.messaging.changes import GroupPut, OffsetsCommitted, TopicDropped, TopicPut
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import BrokerState, extras_of
from cometmq.model import Position, TopicConfig

Commits = Mapping[tuple[str, str, int], int]  # queue offset by group, topic, queue id
Maximum = Callable[[str, int], int]  # topic, queue id → offset of the message to come


def rebuild(
    state: BrokerState,
    commits_left: Commits,
    exported: Tables,
    queues: Iterable[tuple[str, int]],
    maximum: Maximum,
    new_topic: TopicConfig,
) -> list[str]:
    """Let ``state`` and ``commits_left``, what the log still has, have what the others know too.
    Returns what was assumed, in words. Topics whose settings the log does not tell have the
    durability of ``new_topic``.
    """
    offsets = _highest(commits_left, exported.offsets or {})
    notes = []
    for config, why in list(_merged(state, exported, queues, new_topic)):
        if config.name in state.topics:
            state.apply(TopicDropped(config.name))
        state.apply(TopicPut(config.plain(), state.generations.allocate()))
        for change in extras_of(config):
            state.apply(change)
        if why:
            notes.append(why)
    for name, settings in (exported.groups or {}).items():
        if name not in state.groups:
            state.apply(GroupPut(settings))
            notes.append(f"group {name} is as config/subscriptionGroup.json has it")
    commits = []
    for (group, topic, queue_id), offset in offsets.items():
        history = state.generations.find(topic, queue_id)
        if history is not None:
            reached = min(offset, maximum(topic, queue_id))
            position = Position(history.current, reached)
            commits.append(CommittedOffset(group, topic, queue_id, position))
    if commits:
        state.apply(OffsetsCommitted(tuple(commits)))
        notes.append(f"{len(commits)} committed offsets are the highest that was found of each")
    return notes


def _highest(one: Commits, other: Commits) -> Commits:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in [*one, *other]}


def _merged(
    state: BrokerState,
    exported: Tables,
    queues: Iterable[tuple[str, int]],
    new_topic: TopicConfig,
) -> Iterator[tuple[TopicConfig, str]]:
    """Each topic, and what was assumed of it; empty: nothing."""
    flush, copies = new_topic.flush_mode, new_topic.replication_mode
    counts: dict[str, int] = {}
    for topic, queue_id in queues:
        if not topics.is_system(topic):
            counts[topic] = max(counts.get(topic, 0), queue_id + 1)
    tables = exported.topics or {}
    names = {config.name for config in state.topics} | counts.keys() | tables.keys()
    for name in sorted(names):
        known, other, least = state.topics.find(name), tables.get(name), counts.get(name, 1)
        before = len(state.generations.topic(name))
        if known is not None:
            config, why = known, ""
        elif other is not None:
            config = replace(other, flush_mode=flush, replication_mode=copies)
            why = f"topic {name} is as config/topics.json has it, with"
        else:
            config = TopicConfig(name, least, least, flush_mode=flush, replication_mode=copies)
            why = f"topic {name} has the {least} queues that have messages, and"
        if why:
            why += f" flush mode {flush.name.lower()}, replication mode {copies.name.lower()}"
        read = max(config.read_queue_count, other.read_queue_count if other else 0, least, before)
        write = max(config.write_queue_count, other.write_queue_count if other else 0)
        yield replace(config, read_queue_count=read, write_queue_count=write), why
