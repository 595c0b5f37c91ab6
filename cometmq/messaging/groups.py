"""Consumer groups: their names and settings, and who is in them now.

Settings are RocketMQ's subscription group with its defaults and are part of the state. Membership
is not: it is the set of streams that clients hold open, and it dies with the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.errors import GroupNameInvalid, InvalidRequest, LimitExceeded
from cometmq.messaging import group_policy, topics
from cometmq.messaging.group_policy import GroupPolicy
from cometmq.model import GROUP_NAME, QUEUES_PER_TOPIC_MAX, Subscription

GROUPS_MAX = 100_000
MEMBERS_PER_GROUP_MAX = 10_000
SUBSCRIPTIONS_PER_MEMBER_MAX = 1_000
CLIENT_ID_LENGTH_MAX = 255
DETAIL_LENGTH_MAX = 64
HELD_QUEUES_MAX = 16_384
RETRY_TIMES_MAX = 1_000_000
MEMBER_ID_MAX = 1_000


def check_name(name: str) -> None:
    """Raises ``GroupNameInvalid`` unless ``name`` is one to 255 characters of ``%|a-zA-Z0-9_-``."""
    if not GROUP_NAME.fullmatch(name):
        raise GroupNameInvalid(f"{name[:300]!r} is not a consumer group name")


def check_client_id(client_id: str) -> None:
    """Raises ``InvalidRequest`` unless it is one to 255 printable characters."""
    if not (1 <= len(client_id) <= CLIENT_ID_LENGTH_MAX and client_id.isprintable()):
        raise InvalidRequest(f"client_id {client_id[:300]!r} is not 1 to 255 printable characters")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A consumer group's settings: RocketMQ's subscriptionGroup.json in plain words. ``policy``:
    what RocketMQ 4 did not have.
    """

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_count: int = 1
    retry_times_max: int = 16
    broker_id: int = 0  # member that serves the group, 0 = the writer
    broker_id_when_slow: int = 1  # member that serves it when it lags far behind
    notify_members_enable: bool = True
    policy: GroupPolicy = group_policy.DEFAULT


def check_settings(settings: GroupSettings, longest_ms: int) -> None:
    """Raises ``GroupNameInvalid``, ``InvalidRequest``. ``longest_ms``: no message waits longer."""
    check_name(settings.name)
    group_policy.check_policy(settings.policy, longest_ms)
    if not 1 <= settings.retry_queue_count <= QUEUES_PER_TOPIC_MAX:
        raise InvalidRequest(
            f"retry_queue_count is 1 to {QUEUES_PER_TOPIC_MAX}, not {settings.retry_queue_count}"
        )
    for name, number in (
        ("broker_id", settings.broker_id),
        ("broker_id_when_slow", settings.broker_id_when_slow),
    ):
        if not 0 <= number <= MEMBER_ID_MAX:
            raise InvalidRequest(f"{name} is the number of a member, 0 to {MEMBER_ID_MAX}")
    if not 0 <= settings.retry_times_max <= RETRY_TIMES_MAX:
        raise InvalidRequest(
            f"retry_times_max is 0 to {RETRY_TIMES_MAX}, not {settings.retry_times_max}"
        )


@dataclass(frozen=True, slots=True)
class HeldQueues:
    """Queues of a topic at one broker group."""

    topic: str
    broker_group: str
    queue_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberDetails:
    """What a client tells the group's other members besides what it reads. The broker passes it on.

    ``instance_id``: of the running consumer; another one under the same client id is another
    client. ``allocation``: how it divides the queues. ``held``: queues that it reads, or is about
    to. ``retry_times_max`` is for the broker; None: the member says nothing.
    """

    instance_id: str = ""
    allocation: str = ""
    held: tuple[HeldQueues, ...] = ()
    is_broadcasting: bool = False
    retry_times_max: int | None = None


NO_DETAILS = MemberDetails()


@dataclass(frozen=True, slots=True)
class Member:
    """One live client of a group, and the stream that holds it: higher = opened later."""

    client_id: str
    stream: int
    subscriptions: tuple[Subscription, ...]
    details: MemberDetails = NO_DETAILS


@dataclass(frozen=True, slots=True)
class Membership:
    """A group as its members see it.

    The version rises with every change; members stand in order of client id.
    """

    version: int
    members: tuple[Member, ...]


class MemberTable:
    """The live members of all groups, by group and client id.

    A client is one member of a group. When it comes back on a new stream before the old one is
    known to be dead, the newer stream wins: the older can neither change nor end the membership any
    more. Versions come from one counter, so that they rise even when a group empties and fills
    again.
    """

    def __init__(
        self, groups_max: int = GROUPS_MAX, members_max: int = MEMBERS_PER_GROUP_MAX
    ) -> None:
        self.groups_max = groups_max
        self.members_max = members_max
        self._changes = 0
        self._groups: dict[str, dict[str, Member]] = {}
        self._views: dict[str, Membership] = {}

    def put(
        self,
        group: str,
        client_id: str,
        stream: int,
        subscriptions: Sequence[Subscription],
        details: MemberDetails = NO_DETAILS,
    ) -> Membership | None:
        """Lets a client join, or replaces what it reads; answers the group afterwards.

        None: a newer stream of the same client holds the membership, this one is to be ended.
        Raises ``GroupNameInvalid``, ``TopicNameInvalid``, ``InvalidRequest`` (client id, topic
        twice) and ``LimitExceeded``.
        """
        self._check(group, client_id, subscriptions)
        _check_details(details)
        members = self._groups.get(group, {})
        before = members.get(client_id)
        if before is not None and before.stream > stream:
            return None
        member = Member(client_id, stream, tuple(subscriptions), details)
        if member == before:
            return self._views[group]
        if before is None:
            self._check_room(group, members)
        self._groups[group] = members | {client_id: member}
        return self._changed(group)

    def touch(self, group: str) -> None:
        """Something else about the group has changed that its members have to know."""
        if group in self._groups:
            self._changed(group)

    def leave(self, group: str, client_id: str, stream: int) -> Membership | None:
        """The stream has ended; answers the group afterwards.

        None: the stream did not hold the membership, so nothing has changed.
        """
        member = self._groups.get(group, {}).get(client_id)
        if member is None or member.stream != stream:
            return None
        del self._groups[group][client_id]
        return self._changed(group)

    def view(self, group: str) -> Membership:
        """The group now; a group without members has version 0."""
        return self._views.get(group, Membership(0, ()))

    def retry_times_max(self, group: str) -> int | None:
        """What the member says that joined last of those that say something; None: none does."""
        telling = (m for m in self.view(group).members if m.details.retry_times_max is not None)
        last = max(telling, key=lambda member: member.stream, default=None)
        return None if last is None else last.details.retry_times_max

    def groups(self) -> list[str]:
        """Names of the groups that have members, in order."""
        return sorted(self._groups)

    def _changed(self, group: str) -> Membership:
        self._changes += 1
        members = self._groups[group]
        view = Membership(self._changes, tuple(members[client_id] for client_id in sorted(members)))
        if members:
            self._views[group] = view
        else:
            del self._groups[group], self._views[group]
        return view

    def _check_room(self, group: str, members: dict[str, Member]) -> None:
        if len(members) >= self.members_max:
            raise LimitExceeded(f"group {group} has its {self.members_max} members (members_max)")
        if not members and len(self._groups) >= self.groups_max:
            raise LimitExceeded(f"{self.groups_max} groups have members here (groups_max)")

    @staticmethod
    def _check(group: str, client_id: str, subscriptions: Sequence[Subscription]) -> None:
        check_name(group)
        check_client_id(client_id)
        if len(subscriptions) > SUBSCRIPTIONS_PER_MEMBER_MAX:
            raise LimitExceeded(
                f"{len(subscriptions)} subscriptions, {SUBSCRIPTIONS_PER_MEMBER_MAX} are allowed"
            )
        for subscription in subscriptions:
            topics.check_name(subscription.topic)
        if len({s.topic for s in subscriptions}) != len(subscriptions):
            raise InvalidRequest(f"client {client_id} subscribes to a topic twice")


def _check_details(details: MemberDetails) -> None:
    for name, value in (
        ("instance_id", details.instance_id),
        ("allocation", details.allocation),
    ):
        if len(value) > DETAIL_LENGTH_MAX or not value.isprintable():
            raise InvalidRequest(f"{name} is at most {DETAIL_LENGTH_MAX} printable characters")
    if sum(len(one.queue_ids) for one in details.held) > HELD_QUEUES_MAX:
        raise LimitExceeded(f"a member holds at most {HELD_QUEUES_MAX} queues")
    if not 0 <= (details.retry_times_max or 0) <= RETRY_TIMES_MAX:
        raise InvalidRequest(f"retry_times_max is 0 to {RETRY_TIMES_MAX}")
    for one in details.held:
        topics.check_name(one.topic)
        if not 0 < len(one.broker_group) <= CLIENT_ID_LENGTH_MAX:
            raise InvalidRequest("held: a broker group has a name of 1 to 255 characters")
