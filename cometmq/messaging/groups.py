"""Consumer groups: their names and settings, and their members now.

Settings are RocketMQ's subscription group with its defaults and are part of the state. Membership
is not: it is the set of streams that clients hold open, and it dies with the broker.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cometmq.errors import ClientIdInUse, GroupNameInvalid, InvalidRequest, LimitExceeded
from cometmq.messaging import group_policy, topics
from cometmq.messaging.group_policy import GroupPolicy
from cometmq.model import GROUP_NAME, QUEUES_PER_TOPIC_MAX, Subscription
from cometmq.names import CLIENT_ID_LENGTH_MAX, check_client_id

GROUPS_MAX = 100_000
MEMBERS_PER_GROUP_MAX = 10_000
SUBSCRIPTIONS_PER_MEMBER_MAX = 1_000
DETAIL_LENGTH_MAX = 64
HELD_QUEUES_MAX = 16_384
SESSION_MS_MAX = 1_800_000
SESSIONS_NOTED_MIN = 1_024
# A client that restarts under its id is back by then.
BACK_S = 5.0
# A deploy starts a new process so long before it stops the old one, at most.
SURGE_S = 120.0
NAMED_MAX = 5  # members, in an error
REPLACED_MAX = 8  # instances of a member that may not come back, remembered
RETRY_TIMES_MAX = 1_000_000
MEMBER_ID_MAX = 1_000
INSTANCE_NUMBER_MAX = 1 << 62


def check_name(name: str) -> None:
    """Raises ``GroupNameInvalid`` unless ``name`` is one to 255 characters of ``%|a-zA-Z0-9_-``: a
    group may have it that is there. :mod:`cometmq.names` says which one may be made.
    """
    if not GROUP_NAME.fullmatch(name):
        raise GroupNameInvalid(f"{name[:300]!r} is not a consumer group name")


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


def check_settings(settings: GroupSettings) -> None:
    """Raises ``GroupNameInvalid``, ``InvalidRequest``."""
    check_name(settings.name)
    group_policy.check_policy(settings.policy)
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
    """What a client sends to the other members of its group besides its subscriptions. The broker
    passes it on.

    ``instance_id``: of the running consumer; another one under the same client id is another
    client. ``instance_number``: which of them is the newer one; 0: it has no number yet.
    ``allocation``: how it divides the queues. ``held``: queues that it reads, or is about
    to. ``retry_times_max`` is for the broker; None: the member says nothing.
    ``session_ms``: how long it stays a member without a stream; 0: not at all. ``receives``: it
    receives (POP), and divides no queues.
    """

    instance_id: str = ""
    allocation: str = ""
    held: tuple[HeldQueues, ...] = ()
    is_broadcasting: bool = False
    retry_times_max: int | None = None
    session_ms: int = 0
    receives: bool = False
    instance_number: int = 0


NO_DETAILS = MemberDetails()


@dataclass(frozen=True, slots=True)
class Member:
    """One client of a group, and the stream that holds it: higher = opened later.

    ``since_s``: when the client became a member. ``away_until_s``: its stream has ended, and it
    stays a member until then; None: it is there.
    ``instance_number``: see :class:`MemberTable`. ``replaced``: the instances that had its name
    before, and may not have it again.
    """

    client_id: str
    stream: int
    subscriptions: tuple[Subscription, ...]
    details: MemberDetails = NO_DETAILS
    since_s: float = 0.0
    away_until_s: float | None = None
    instance_number: int = 0
    replaced: tuple[str, ...] = ()

    @property
    def is_away(self) -> bool:
        """Whether it has no stream."""
        return self.away_until_s is not None

    @property
    def away_since_s(self) -> float | None:
        """When its stream ended; None: it is there."""
        if self.away_until_s is None:
            return None
        return self.away_until_s - self.details.session_ms / 1000


@dataclass(frozen=True, slots=True)
class Membership:
    """A group as its members see it.

    The version rises with every change; members stand in order of client id.
    """

    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """For how long a client has been a member, and for how long of that it has been away; None: it
    has a stream.
    """

    client_id: str
    member_s: float
    away_s: float | None = None


def changed_ids(stays: Iterable[Stay]) -> str:
    """Why the client ids of a group seem to change at restarts: static members are away, and others
    have come in their place, after them or a little before. Empty: they do not.
    """
    stays = list(stays)
    away = [one for one in stays if one.away_s is not None and one.away_s >= BACK_S]
    away_s = max((one.away_s or 0.0 for one in away), default=0.0)
    oldest_s = max((one.member_s for one in away), default=0.0)
    new = [
        one
        for one in stays
        if one.away_s is None
        # A deploy may start a process before it stops another one, that was there long before.
        and one.member_s < away_s + (SURGE_S if one.member_s + SURGE_S < oldest_s else 0.0)
    ]
    if not away or not new:
        return ""
    ids = [[one.client_id for one in some] for some in (away, new)]
    return (
        f"{_some(ids[0])} {'is' if len(away) == 1 else 'are'} away, and nobody reads the queues; "
        f"{_some(ids[1])} came in the place. Give a consumer with session_ms the same client_id "
        "after each restart, or no session_ms; cometmq group members NAME --remove-away gives the "
        "queues to the others"
    )


def in_the_way(group: str, members: Mapping[str, bool]) -> str:
    """Why a group cannot go. ``members``: by client id, whether it is away."""
    connected = [client_id for client_id, is_away in members.items() if not is_away]
    away = [client_id for client_id, is_away in members.items() if is_away]
    kinds = ((connected, "is connected", "are connected"), (away, "is away", "are away"))
    said = " and ".join(
        f"{_some(ids)} {one if len(ids) == 1 else many}" for ids, one, many in kinds if ids
    )
    if not away:
        return f"group {group} has members: {said}"
    which = f"--remove {away[0]}" if len(away) == 1 else "--remove-away"
    return (
        f"group {group} has members: {said}; cometmq group members {group} {which} ends "
        "the sessions of those that are away"
    )


def _some(client_ids: Sequence[str]) -> str:
    named = ", ".join(client_ids[:NAMED_MAX])
    more = len(client_ids) - NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


class _Group:
    """Its members by client id, and how they look to them; None: nobody has asked since the last
    change.
    """

    __slots__ = ("members", "version", "view")

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.version = 0
        self.view: Membership | None = None


class MemberTable:
    """The members of all groups, by group and client id. Pure: the time is passed in.

    A client is one member of a group. When it comes back on a new stream before the old one is
    known to be dead, the newer stream wins: the older can neither change nor end the membership any
    more. Versions come from one counter, so that they rise even when a group empties and fills
    again.

    A static member, one with a session, stays when its stream ends: it is away. It is a member as
    before until it comes back or its session ends.

    The table dies with its broker, so a consumer brings the number that it got when it joined
    first: the time, and above that of the consumer that it replaced. Of two consumers with one
    client id, the one with the lower number does not come back at any broker.
    """

    def __init__(
        self, groups_max: int = GROUPS_MAX, members_max: int = MEMBERS_PER_GROUP_MAX
    ) -> None:
        self.groups_max = groups_max
        self.members_max = members_max
        self._changes = 0
        self._groups: dict[str, _Group] = {}
        self._sessions: list[tuple[float, str, str]] = []  # a heap; some are over long ago
        self._sessions_max = SESSIONS_NOTED_MIN  # then those are looked for

    def put(
        self,
        group: str,
        client_id: str,
        stream: int,
        subscriptions: Sequence[Subscription],
        details: MemberDetails = NO_DETAILS,
        now_s: float = 0.0,
        wall_ms: int = 0,
    ) -> bool:
        """Lets a client join, or replaces what it reads.

        False: a newer stream of the same client holds the membership, this one is to be ended.
        Raises ``GroupNameInvalid``, ``TopicNameInvalid``, ``InvalidRequest`` (client id, topic
        twice), ``LimitExceeded``, and ``ClientIdInUse``: another instance has replaced this one.
        """
        self._check(group, client_id, subscriptions)
        _check_details(details)
        known = self._groups.get(group)
        before = known.members.get(client_id) if known is not None else None
        if before is not None and before.stream > stream:
            return False
        member = Member(
            client_id,
            stream,
            tuple(subscriptions),
            replace(details, instance_number=0),  # told once: else its own would be a change
            since_s=now_s if before is None else before.since_s,
            instance_number=_instance_number(before, details, wall_ms),
            replaced=_replaced(before, details),
        )
        if known is None or before is None:
            self._check_room(group, known)
            known = self._groups.setdefault(group, _Group())
        if member != before:
            known.members[client_id] = member
            self._changed(known)
        return True

    def touch(self, group: str) -> None:
        """Something else about the group has changed that its members have to know."""
        if group in self._groups:
            self._changed(self._groups[group])

    def leave(
        self,
        group: str,
        client_id: str,
        stream: int,
        now_s: float = 0.0,
        *,
        for_good: bool = False,
    ) -> bool:
        """The stream has ended; ``for_good``: a static member, too, is one no more. False: the
        stream did not hold the membership, so nothing has changed.
        """
        known = self._groups.get(group)
        member = known.members.get(client_id) if known is not None else None
        if known is None or member is None or member.stream != stream:
            return False
        if member.details.session_ms and not for_good:
            until_s = now_s + member.details.session_ms / 1000
            known.members[client_id] = replace(member, away_until_s=until_s)
            self._note_session(until_s, group, client_id)
            self._changed(known)
        else:
            self._remove(group, known, client_id)
        return True

    def _note_session(self, until_s: float, group: str, client_id: str) -> None:
        if len(self._sessions) >= self._sessions_max:  # members have come and gone again and again
            self._sessions = [one for one in self._sessions if self._is_open(*one)]
            heapq.heapify(self._sessions)
            self._sessions_max = max(SESSIONS_NOTED_MIN, 2 * len(self._sessions))
        heapq.heappush(self._sessions, (until_s, group, client_id))

    def _is_open(self, until_s: float, group: str, client_id: str) -> bool:
        member = self.member(group, client_id)
        return member is not None and member.away_until_s == until_s

    def is_away(self, group: str, client_id: str) -> bool:
        """Whether it is a member without a stream."""
        known = self._groups.get(group)
        member = known.members.get(client_id) if known is not None else None
        return member is not None and member.is_away

    @property
    def next_session_s(self) -> float | None:
        """When the next session may end; None: nobody is away."""
        return self._sessions[0][0] if self._sessions else None

    def end_sessions(self, now_s: float) -> list[tuple[str, str]]:
        """Removes the members that were away for too long; (group, client id) of each."""
        ended = []
        while self._sessions and self._sessions[0][0] <= now_s:
            until_s, group, client_id = heapq.heappop(self._sessions)
            known = self._groups.get(group)
            member = known.members.get(client_id) if known is not None else None
            if known is not None and member is not None and member.away_until_s == until_s:
                self._remove(group, known, client_id)
                ended.append((group, client_id))
        return ended

    def away(self, group: str) -> list[Member]:
        """The members without a stream, in order of client id."""
        return [one for one in self.view(group).members if one.is_away]

    def stays(self, group: str, now_s: float) -> list[Stay]:
        """For how long the members have been there, or away, in order of client id."""
        return [
            Stay(
                one.client_id,
                now_s - one.since_s,
                None if one.away_since_s is None else now_s - one.away_since_s,
            )
            for one in self.view(group).members
        ]

    def remove_away(self, group: str, client_id: str) -> bool:
        """Ends a session before its time. False: there is no such member, or it has a stream."""
        known = self._groups.get(group)
        if known is None or not self.is_away(group, client_id):
            return False
        self._remove(group, known, client_id)
        return True

    def view(self, group: str) -> Membership:
        """The group now; a group without members has version 0."""
        known = self._groups.get(group)
        if known is None:
            return Membership(0, ())
        if known.view is None:
            members = tuple(known.members[client_id] for client_id in sorted(known.members))
            known.view = Membership(known.version, members)
        return known.view

    def member(self, group: str, client_id: str) -> Member | None:
        known = self._groups.get(group)
        return known.members.get(client_id) if known is not None else None

    def count(self, group: str) -> int:
        """Members of the group, those that are away included."""
        known = self._groups.get(group)
        return len(known.members) if known is not None else 0

    def retry_times_max(self, group: str) -> int | None:
        """What the member says that joined last of those that say something; None: none does."""
        telling = (m for m in self.view(group).members if m.details.retry_times_max is not None)
        last = max(telling, key=lambda member: member.stream, default=None)
        return None if last is None else last.details.retry_times_max

    def groups(self) -> list[str]:
        """Names of the groups that have members, in order."""
        return sorted(self._groups)

    def _changed(self, known: _Group) -> None:
        self._changes += 1
        known.version, known.view = self._changes, None

    def _remove(self, group: str, known: _Group, client_id: str) -> None:
        del known.members[client_id]
        self._changed(known)
        if not known.members:
            del self._groups[group]

    def _check_room(self, group: str, known: _Group | None) -> None:
        if known is not None and len(known.members) >= self.members_max:
            raise LimitExceeded(f"group {group} has its {self.members_max} members (members_max)")
        if known is None and len(self._groups) >= self.groups_max:
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


def _replaced(before: Member | None, details: MemberDetails) -> tuple[str, ...]:
    """The instances that may not come back. ClientIdInUse: this is one of them, such as a process
    that was stopped while another one was started in its place.
    """
    instance_id = details.instance_id
    if before is None or not instance_id:
        return ()
    if instance_id in before.replaced:
        raise ClientIdInUse(
            f"another client has joined as {before.client_id}: this one is no member any more"
        )
    earlier = before.details.instance_id
    if not earlier or earlier == instance_id:
        return before.replaced
    return (*before.replaced, earlier)[-REPLACED_MAX:]


def _instance_number(before: Member | None, details: MemberDetails, wall_ms: int) -> int:
    """The number of a consumer that joins. ClientIdInUse: one with its client id is newer."""
    number = details.instance_number
    if not details.instance_id:
        return 0
    if before is None:
        return number or wall_ms
    if before.details.instance_id == details.instance_id:
        return max(number, before.instance_number)
    if not number:
        return max(wall_ms, before.instance_number + 1)
    if (number, details.instance_id) < (before.instance_number, before.details.instance_id):
        raise ClientIdInUse(
            f"a newer client has joined as {before.client_id}: this one is no member any more"
        )
    return number


def _check_details(details: MemberDetails) -> None:
    if not 0 <= details.session_ms <= SESSION_MS_MAX:
        raise InvalidRequest(f"session_ms is 0 to {SESSION_MS_MAX}, not {details.session_ms}")
    for name, value in (
        ("instance_id", details.instance_id),
        ("allocation", details.allocation),
    ):
        if len(value) > DETAIL_LENGTH_MAX or not value.isprintable():
            raise InvalidRequest(f"{name} is at most {DETAIL_LENGTH_MAX} printable characters")
    if not 0 <= details.instance_number <= INSTANCE_NUMBER_MAX:
        raise InvalidRequest(f"instance_number is 0 to {INSTANCE_NUMBER_MAX}")
    if not 0 <= (details.retry_times_max or 0) <= RETRY_TIMES_MAX:
        raise InvalidRequest(f"retry_times_max is 0 to {RETRY_TIMES_MAX}")
    _check_held(details.held)


def _check_held(held: Sequence[HeldQueues]) -> None:
    if sum(len(one.queue_ids) for one in held) > HELD_QUEUES_MAX:
        raise LimitExceeded(f"a member holds at most {HELD_QUEUES_MAX} queues")
    for one in held:
        topics.check_name(one.topic)
        if not 0 < len(one.broker_group) <= CLIENT_ID_LENGTH_MAX:
            raise InvalidRequest("held: a broker group has a name of 1 to 255 characters")
        if not one.queue_ids:
            raise InvalidRequest(f"held: no queue of {one.topic} is named")
        if not 0 <= min(one.queue_ids) <= max(one.queue_ids) < QUEUES_PER_TOPIC_MAX:
            raise InvalidRequest(
                f"held: queues of {one.topic} are numbered 0 to {QUEUES_PER_TOPIC_MAX - 1}"
            )
    if len({(one.topic, one.broker_group) for one in held}) != len(held):
        raise InvalidRequest("held: a topic of a broker group is named twice")
