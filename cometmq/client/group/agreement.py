"""Agreement of the members of a group on all that gives each queue one reader. Each member logs
differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from cometmq.client.group.membership import KnownMember
from cometmq.client.group.rebalance import Allocation, Strategy
from cometmq.model import Filter, QueueRef
from cometmq.telemetry import fields, logger

_log = logger(__name__)


def common_strategy(own: Strategy, members: Collection[KnownMember]) -> Strategy:
    """The strategy that all members use: their own if they agree, else AVERAGE, so that each queue
    has one owner. Members that tell nothing agree.
    """
    told = {member.allocation for member in members if member.allocation}
    return own if told <= {own.label} else Allocation.AVERAGE


class Agreement:
    """``patience_s``: queues change hands meanwhile; after it a queue without a reader, or with
    two, is a mistake in the members' lists.
    """

    def __init__(self, group: str, own: Strategy, patience_s: float) -> None:
        self._group = group
        self._own = own
        self._patience_s = patience_s
        self._differing: set[str] = set()  # as logged
        self._odd_since_s: dict[tuple[str, str], float] = {}  # (what is wrong, topic)
        self._odd_logged: set[tuple[str, str]] = set()

    def strategy(
        self,
        members_by_topic: Mapping[str, Mapping[str, KnownMember]],
        subscriptions: Mapping[str, Filter],
        some_broadcast: bool,
    ) -> Strategy:
        """The strategy that all members use. Differences between members are logged once."""
        members = [member for some in members_by_topic.values() for member in some.values()]
        agreed = common_strategy(self._own, members)
        differing = {
            f"the filter of {topic}"
            for topic, some in members_by_topic.items()
            if any(one.filters[topic] != subscriptions[topic] for one in some.values())
        }
        if some_broadcast:
            differing.add("the message model")
        if agreed is not self._own:
            differing.add("the allocation: all use AVERAGE")
        for what in sorted(differing - self._differing):
            _log.warning(
                "members of the group do not agree", extra=fields(group=self._group, on=what)
            )
        self._differing = differing
        return agreed

    def check_readers(
        self,
        queues_by_topic: Mapping[str, Collection[QueueRef]],
        members_by_topic: Mapping[str, Mapping[str, KnownMember]],
        now_s: float,
    ) -> bool:
        """Logs queues without a reader, or with several, once they have been so for ``patience_s``.
        Only strategies of one's own make them. True: look again by then.
        """
        odd: dict[tuple[str, str], list[QueueRef]] = {}
        for topic, queues in queues_by_topic.items():
            members = members_by_topic[topic].values()
            readers = Counter(queue for member in members for queue in member.held)
            for queue in sorted(queues):
                if readers[queue] != 1:
                    what = "no member reads" if not readers[queue] else "several members want"
                    odd.setdefault((what, topic), []).append(queue)
        self._odd_since_s = {key: self._odd_since_s.get(key, now_s) for key in odd}
        self._odd_logged &= odd.keys()
        for (what, topic), wrong in sorted(odd.items()):
            is_late = now_s - self._odd_since_s[what, topic] >= self._patience_s
            if is_late and (what, topic) not in self._odd_logged:
                self._odd_logged.add((what, topic))
                _log.warning(
                    f"{what} queues: check the allocation of each member",
                    extra=fields(
                        group=self._group,
                        topic=topic,
                        queue_count=len(wrong),
                        first=f"{wrong[0].broker_group}/{wrong[0].queue_id}",
                    ),
                )
        return bool(odd.keys() - self._odd_logged)
