"""Route tables: broker groups, their members, their topics. Pure; time is passed in.

The rules are RocketMQ's, with epochs in place of "master wins":

- A group's epoch is the highest that any live member of it registered. Older registrations are
  refused, and those far above; a newer one removes a writer of an older epoch.
- Within an epoch the writer's place is its store's: nobody else takes it, or takes it away.
- Only a writer's topics count, and only when their version changed or the epoch is new.
- A member silent for ``silence_max_s`` is removed; with its last member a group is forgotten.
- Taking the write permission lasts until the topics are replaced.

``changed`` hears, after each change, the topics whose route is now another one; ``moved`` the
(group, member id) that are registered otherwise now, or no longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from cometmq.errors import (
    GroupNotFound,
    InvalidRequest,
    LimitExceeded,
    QueueCountInvalid,
    StaleEpoch,
    TopicNotFound,
)
from cometmq.messaging.topics import check_name, check_settings
from cometmq.model import COUNTER_MAX, EPOCH_LEAP_MAX, EPOCH_MAX, PERMISSION_WRITE, TopicConfig

TOPICS_PER_GROUP_MAX = 100_000
MEMBER_ID_MAX = 1_023

NAME = re.compile(r"[%|a-zA-Z0-9._-]{1,127}")
STORE_ID = re.compile(r"[a-zA-Z0-9._-]{0,64}")
ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]{2,45}\]|[a-zA-Z0-9._-]{1,253}):[0-9]{1,5}")


class Role(Enum):
    """What a member does; the values are those of ``cometmq.v1.MemberRole``."""

    WRITER = 1
    FOLLOWER = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a broker group, as it registered."""

    cluster: str
    broker_group: str
    member_id: int
    role: Role
    address: str
    internal_address: str  # empty: it has none
    epoch: int


@dataclass(frozen=True, slots=True, order=True)
class DataVersion:
    """State of a group's topic table."""

    epoch: int
    counter: int


@dataclass(frozen=True, slots=True)
class LiveMember:
    """A member and when it was last heard."""

    member: Member
    data_version: DataVersion
    topic_count: int
    heard_s: float  # monotonic, for expiry
    heard_ms: int  # wall clock, for people
    store_id: str = ""  # empty: of an older release


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """One broker group's share of a topic; members by id."""

    broker_group: str
    topic: TopicConfig
    members: tuple[Member, ...]


@dataclass(slots=True)
class _Group:
    """Invariants: at least one member; every member's epoch ≤ ``epoch``; at most one writer."""

    cluster: str
    epoch: int
    live: dict[int, LiveMember] = field(default_factory=dict)
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    topics_from: tuple[int, DataVersion] | None = None  # epoch of the writer that sent them
    writable: bool = True

    @property
    def writing(self) -> LiveMember | None:
        return next((x for x in self.live.values() if x.member.role is Role.WRITER), None)

    @property
    def writer(self) -> Member | None:
        return None if self.writing is None else self.writing.member

    def members(self) -> tuple[Member, ...]:
        return tuple(self.live[number].member for number in sorted(self.live))

    def topic(self, name: str) -> TopicConfig:
        """The topic's settings as a client may use them now."""
        topic = self.topics[name]
        if self.writable:
            return topic
        return replace(topic, permission=topic.permission & ~PERMISSION_WRITE)


class RouteTable:
    """All that a name server knows about brokers."""

    def __init__(
        self,
        *,
        silence_max_s: float = 120.0,
        members_max: int = 10_000,
        topics_max: int = 1_000_000,
        changed: Callable[[Iterable[str]], None] = lambda topics: None,
        moved: Callable[[str, int], None] = lambda broker_group, member_id: None,
    ) -> None:
        self._silence_max_s = silence_max_s
        self._members_max = members_max
        self._topics_max = topics_max  # of all groups together, one for each group that has it
        self._changed = changed
        self._moved = moved
        self._groups: dict[str, _Group] = {}
        self._groups_of: dict[str, set[str]] = {}  # topic → names of the groups that have it
        self._member_count = 0

    # --- what members say ---

    def register(
        self,
        member: Member,
        version: DataVersion,
        topics: Iterable[TopicConfig],
        *,
        topic_count: int,
        now_s: float,
        now_ms: int,
        store_id: str = "",
    ) -> Member | None:
        """Take a member in, or hear that it still lives. Returns its group's live writer.

        Either raises and changes nothing (InvalidRequest, TopicNameInvalid, StaleEpoch,
        LimitExceeded), or takes the registration as a whole. The ``topic_count`` ``topics`` are
        looked at only when they count: a heartbeat repeats them all.
        """
        _check_member(member)
        _check_version(version)
        if not STORE_ID.fullmatch(store_id):
            raise InvalidRequest(f"store_id: {store_id[:64]!r} is not one")
        group = self._groups.get(member.broker_group) or _Group(member.cluster, member.epoch)
        _check_epoch(group, member, store_id)
        if topic_count > TOPICS_PER_GROUP_MAX:
            limit = TOPICS_PER_GROUP_MAX
            raise LimitExceeded(f"{topic_count} topics, {limit} is the limit of a group")
        new_topics = _checked(topics) if _count_topics(group, member, version) else None
        self._check_room(group, member, new_topics or {})

        self._groups[member.broker_group] = group
        before = group.members()
        self._take_member(group, LiveMember(member, version, topic_count, now_s, now_ms, store_id))
        touched: set[str] = set()
        if new_topics is not None:
            touched = self._replace_topics(member.broker_group, group, new_topics)
            group.topics_from = (member.epoch, version)
        after = group.members()
        if after != before:
            touched.update(group.topics)
        self._validate_group(member.broker_group)
        self._tell(touched)
        for number in {one.member_id for one in set(before) ^ set(after)}:
            self._moved(member.broker_group, number)
        return group.writer

    def unregister(
        self, cluster: str, broker_group: str, member_id: int, epoch: int, store_id: str = ""
    ) -> bool:
        """Take a member out; False: it was not there. StaleEpoch: a newer incarnation is, or one
        with another store. InvalidRequest.
        """
        if epoch > EPOCH_MAX:
            raise InvalidRequest(f"epoch: {epoch} is above {EPOCH_MAX}")
        group = self._groups.get(broker_group)
        known = group.live.get(member_id) if group and group.cluster == cluster else None
        if group is None or known is None:
            return False
        if epoch < known.member.epoch:
            raise StaleEpoch(
                f"member {member_id} of {broker_group} is of epoch {known.member.epoch}"
            )
        if store_id != known.store_id:
            raise StaleEpoch(
                f"member {member_id} of {broker_group} is registered with another store"
            )
        self._remove(broker_group, [member_id])
        return True

    def expire(self, now_s: float) -> list[Member]:
        """Remove the members that were not heard for too long, and return them."""
        gone: list[Member] = []
        for name, group in list(self._groups.items()):
            silent = [
                number
                for number, known in group.live.items()
                if now_s - known.heard_s >= self._silence_max_s
            ]
            gone += [group.live[number].member for number in silent]
            self._remove(name, silent)
        return gone

    def set_write_permission(self, broker_group: str, writable: bool) -> int:
        """Take the write permission from all topics of a group, or give it back.

        Returns the number of topics whose permission changed. GroupNotFound.
        """
        group = self._groups.get(broker_group)
        if group is None:
            raise GroupNotFound(f"no broker group {broker_group[:127]!r} is registered")
        if group.writable == writable:
            return 0
        group.writable = writable
        touched = [name for name, topic in group.topics.items() if topic.writable]
        self._tell(touched)
        return len(touched)

    # --- what clients ask ---

    def route(self, topic: str) -> list[GroupRoute]:
        """Where a topic is, by group name; empty: nobody serves it."""
        return [
            GroupRoute(name, self._groups[name].topic(topic), self._groups[name].members())
            for name in sorted(self._groups_of.get(topic, ()))
        ]

    def find(self, topic: str) -> list[GroupRoute]:
        """As :meth:`route`; TopicNameInvalid, TopicNotFound instead of an empty one."""
        check_name(topic)
        if topic not in self._groups_of:
            raise TopicNotFound(f"no registered broker has the topic {topic}")
        return self.route(topic)

    def topics(self) -> list[str]:
        """Names of all topics that have a route, in order."""
        return sorted(self._groups_of)

    def member(self, cluster: str, broker_group: str, member_id: int) -> Member | None:
        """How a member is registered; None: it is not."""
        group = self._groups.get(broker_group)
        known = group.live.get(member_id) if group and group.cluster == cluster else None
        return None if known is None else known.member

    def members(self) -> Iterator[LiveMember]:
        """All members, by cluster, group and id."""
        for _, group in sorted(self._groups.items(), key=lambda item: (item[1].cluster, item[0])):
            yield from (group.live[number] for number in sorted(group.live))

    def census(self) -> dict[tuple[str, str], dict[Role, int]]:
        """How many members of each role every group has, by cluster and group.

        Asked by the metrics' thread: it copies each table in one step and reads nothing twice.
        """
        counts = {}
        for name, group in list(self._groups.items()):
            roles = [known.member.role for known in list(group.live.values())]
            counts[group.cluster, name] = {role: roles.count(role) for role in Role}
        return counts

    @property
    def member_count(self) -> int:
        return self._member_count

    @property
    def topic_count(self) -> int:
        return len(self._groups_of)

    # --- the inside ---

    def _check_room(self, group: _Group, member: Member, topics: dict[str, TopicConfig]) -> None:
        if member.member_id not in group.live and self._member_count >= self._members_max:
            raise LimitExceeded(f"{self._members_max} members are registered (members_max)")
        growth = len(topics) - len(group.topics)
        if growth > 0 and growth + self._entry_count() > self._topics_max:
            raise LimitExceeded(f"{self._topics_max} topics are registered (topics_max)")

    def _entry_count(self) -> int:
        return sum(len(group.topics) for group in self._groups.values())

    def _take_member(self, group: _Group, entry: LiveMember) -> None:
        """Put the member in the place of its older self, of deposed writers, of its address."""
        member = entry.member
        group.epoch = max(group.epoch, member.epoch)
        replaced = [
            number
            for number, known in group.live.items()
            if number == member.member_id
            or known.member.address == member.address
            or (known.member.role is Role.WRITER and known.member.epoch < group.epoch)
        ]
        for number in replaced:
            del group.live[number]
        group.live[member.member_id] = entry
        self._member_count += 1 - len(replaced)

    def _replace_topics(self, name: str, group: _Group, topics: dict[str, TopicConfig]) -> set[str]:
        """Returns the topics whose settings changed, came or went."""
        before = {topic: group.topic(topic) for topic in group.topics}
        group.topics = topics
        group.writable = True
        for topic in before.keys() - topics.keys():
            self._forget_topic(topic, name)
        for topic in topics:
            self._groups_of.setdefault(topic, set()).add(name)
        every = before.keys() | topics.keys()
        return {topic for topic in every if before.get(topic) != topics.get(topic)}

    def _remove(self, name: str, member_ids: Sequence[int]) -> None:
        """Take members out of a group; with the last one the group goes."""
        if not member_ids:
            return
        group = self._groups[name]
        for number in member_ids:
            del group.live[number]
        self._member_count -= len(member_ids)
        if not group.live:
            del self._groups[name]
            for topic in group.topics:
                self._forget_topic(topic, name)
        else:
            self._validate_group(name)
        self._tell(group.topics)
        for number in member_ids:
            self._moved(name, number)

    def _forget_topic(self, topic: str, name: str) -> None:
        groups = self._groups_of[topic]
        groups.remove(name)
        if not groups:
            del self._groups_of[topic]

    def _tell(self, topics: Iterable[str]) -> None:
        touched = list(topics)
        if touched:
            self._changed(touched)

    def validate(self) -> None:
        """The invariants of the whole table; for tests."""
        groups_of: dict[str, set[str]] = {}
        for name, group in self._groups.items():
            self._validate_group(name)
            for topic in group.topics:
                groups_of.setdefault(topic, set()).add(name)
            assert group.topics_from is not None or not group.topics, name
        assert self._groups_of == groups_of
        assert self._member_count == sum(len(group.live) for group in self._groups.values())
        assert self._member_count <= self._members_max
        assert sum(len(group.topics) for group in self._groups.values()) <= self._topics_max

    def _validate_group(self, name: str) -> None:
        """The invariants of a group, after each change of it."""
        group = self._groups[name]
        addresses = {known.member.address for known in group.live.values()}
        assert len(addresses) == len(group.live), (name, addresses)
        assert all(number == known.member.member_id for number, known in group.live.items()), name
        writers = [x for x in group.live.values() if x.member.role is Role.WRITER]
        assert group.live
        assert len(writers) <= 1
        assert all(known.member.epoch <= group.epoch for known in group.live.values())
        assert all(writer.member.epoch == group.epoch for writer in writers)


# --- checks of a registration ---------------------------------------------------------------------


def _check_member(member: Member) -> None:
    for what, name in (("cluster", member.cluster), ("broker_group", member.broker_group)):
        if not NAME.fullmatch(name):
            raise InvalidRequest(f"{what}: {name[:127]!r} is not a name")
    if not 0 <= member.member_id <= MEMBER_ID_MAX:
        raise InvalidRequest(f"member_id: {member.member_id} is not within 0 to {MEMBER_ID_MAX}")
    if not 1 <= member.epoch <= EPOCH_MAX:
        raise InvalidRequest(f"epoch: {member.epoch} is not within 1 to {EPOCH_MAX}")
    if not ADDRESS.fullmatch(member.address):
        raise InvalidRequest(f"address: {member.address[:127]!r} is not host:port")
    if member.internal_address and not ADDRESS.fullmatch(member.internal_address):
        raise InvalidRequest(
            f"internal_address: {member.internal_address[:127]!r} is not host:port"
        )


def _check_version(version: DataVersion) -> None:
    # One above all that are to come would keep the topics as they are for good.
    if version.epoch > EPOCH_MAX or version.counter > COUNTER_MAX:
        raise InvalidRequest(
            f"data_version: {version.epoch}, {version.counter} is above {EPOCH_MAX}, {COUNTER_MAX}"
        )


def _check_epoch(group: _Group, member: Member, store_id: str) -> None:
    """An epoch is one incarnation of one writer; ``group`` may be new."""
    if member.cluster != group.cluster:
        raise InvalidRequest(
            f"cluster: {member.broker_group} is registered in cluster {group.cluster}"
        )
    if member.epoch < group.epoch:
        raise StaleEpoch(
            f"{member.broker_group} is in epoch {group.epoch}, the registration in {member.epoch}",
            epoch=group.epoch,
        )
    if member.epoch > group.epoch + EPOCH_LEAP_MAX:
        raise InvalidRequest(
            f"epoch: {member.epoch} is far above epoch {group.epoch} of {member.broker_group}"
        )
    if group.writing is not None and _takes_place(group.writing, member, store_id):
        writer = group.writing.member
        raise StaleEpoch(
            f"member {writer.member_id} at {writer.address} is the writer of {member.broker_group} "
            f"in epoch {writer.epoch}",
            epoch=writer.epoch,
        )


def _takes_place(writing: LiveMember, member: Member, store_id: str) -> bool:
    """Whether ``member`` would stand in the place of the writer of its own epoch, and is not it."""
    writer = writing.member
    if writer.epoch != member.epoch:
        return False
    here = (writer.member_id == member.member_id, writer.address == member.address)
    other_store = writing.store_id not in ("", store_id)
    if member.role is Role.WRITER:
        return not all(here) or other_store
    return any(here) and other_store


def _count_topics(group: _Group, member: Member, version: DataVersion) -> bool:
    """Whether the topics of a registration replace the known ones."""
    if member.role is not Role.WRITER:
        return False
    if group.topics_from is None:
        return True
    epoch, known = group.topics_from
    return epoch != member.epoch or version > known  # else heard before, or overtaken on its way


def _checked(topics: Iterable[TopicConfig]) -> dict[str, TopicConfig]:
    found: dict[str, TopicConfig] = {}
    for topic in topics:
        try:
            check_settings(topic)
        except QueueCountInvalid as error:
            raise InvalidRequest(error.message) from error
        if topic.name in found:
            raise InvalidRequest(f"topics: {topic.name} stands there twice")
        found[topic.name] = topic
    return found
