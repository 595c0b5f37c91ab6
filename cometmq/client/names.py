"""Names: the rule for them, checked before a call is made, and how logs name a queue. Filters are
imported by those who filter: a producer does without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

from cometmq import names
from cometmq.client.namespaces import Namespace
from cometmq.errors import ConfigInvalid, GroupNameInvalid, InvalidRequest, TopicNameInvalid
from cometmq.model import (
    BROADCAST_PREFIX,
    GROUP_NAME,
    TOPIC_NAME,
    Filter,
    Position,
    QueueRef,
    check_queue,
    check_texts,
)


def check_group(group: object, namespace: Namespace) -> str:
    """The name of a consumer group itself; GroupNameInvalid when it is none, or one that is too
    long in its namespace.
    """
    if not isinstance(group, str):
        raise GroupNameInvalid(f"{group!r} is not a group name.")
    names.check_new_group(namespace.wire(group))
    return group


def check_producer_group(group: object, namespace: Namespace) -> str:
    """The same, of a producer group."""
    if not isinstance(group, str):
        raise GroupNameInvalid(f"{group!r} is not a group name.")
    names.check_new_producer_group(namespace.wire(group))
    return group


def check_topic(topic: object) -> str:
    """The name itself; TopicNameInvalid when it is none. The topic may be there, by whatever rule
    its name was made.
    """
    if not isinstance(topic, str) or TOPIC_NAME.fullmatch(topic) is None:
        raise TopicNameInvalid(f"{topic!r} is not a topic name.")
    return topic


def tags_of(wanted: str | Collection[str]) -> frozenset[str]:
    """The tags of an expression, or of a collection; empty = every message. FilterInvalid."""
    from cometmq.filters import tags

    return tags.parse(wanted) if isinstance(wanted, str) else check_tags(wanted)


def check_tags(wanted: Collection[str]) -> frozenset[str]:
    """The tags of a collection; empty = every message. InvalidRequest for a text, FilterInvalid."""
    from cometmq.filters import tags

    check_texts("tags", wanted)
    return tags.check(wanted)


def filter_of(expression: str | Collection[str] = "*", sql: str | None = None) -> Filter:
    """The filter of an expression of tags, or a collection of them, or else of an SQL92 expression.
    FilterInvalid, InvalidRequest.
    """
    wanted = tags_of(expression)
    if sql is None:
        return Filter(wanted)
    from cometmq.filters import sql as sql_filter

    sql_filter.compile_expression(sql)  # says what is wrong before a call is made
    sql_filter.program_of(sql, wanted)
    return Filter(sql=sql)


def check_queues(queues: Iterable[QueueRef]) -> list[QueueRef]:
    """The queues, sorted. InvalidRequest when one of them is none, or has no broker group."""
    if isinstance(queues, QueueRef | str) or not isinstance(queues, Iterable):
        raise InvalidRequest(f"A collection of queues is wanted, [queue] for one, not {queues!r}.")
    found = list(queues)
    for queue in found:
        check_queue(queue)
        check_topic(queue.topic)
        if not queue.broker_group:
            raise InvalidRequest(f"{queue} names no broker group: `queues(topic)` lists them all.")
    return sorted(set(found))


def check_position(position: object) -> None:
    """InvalidRequest for what is no place in a queue."""
    if not isinstance(position, Position):
        raise InvalidRequest(f"A position is a Position(generation, offset), not {position!r}.")
    for name, limit in (("generation", 2**64), ("offset", 2**63)):
        value = getattr(position, name)
        if type(value) is not int or not 0 <= value < limit:
            raise InvalidRequest(f"The {name} of a position counts from 0: {value!r}.")


def of(queue: QueueRef) -> dict[str, str]:
    """The fields by which a log line names a queue."""
    return {"topic": queue.topic, "queue": f"{queue.broker_group}/{queue.queue_id}"}


def own_group(group: str, client_id: str) -> str:
    """The group that keeps the offsets of one broadcasting consumer. ConfigInvalid: its name would
    be too long.
    """
    name = f"{BROADCAST_PREFIX}{group}-{blake2b(client_id.encode(), digest_size=8).hexdigest()}"
    if not GROUP_NAME.fullmatch(name):
        raise ConfigInvalid(f"broadcast_offsets_at_broker: the group's name is too long: {group}.")
    return name
