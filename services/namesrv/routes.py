"""Route tables: broker groups, their members, their topics. Pure; time is passed in.

The rules are RocketMQ's, with epochs in place of "master wins":

- A group's epoch is the highest that any live member of it registered. Older registrations are
  refused, and those far above; a newer one removes a writer of an older epoch.
- Within an epoch the writer's place belongs to its store: no other member replaces or removes it.
- Only a writer's topics count, and only when their version changed or the epoch is new.
- A member silent for ``silence_max_s`` is removed; with its last member a group is forgotten.
- Taking the write permission lasts until the topics are replaced.

After each change ``changed`` gets the topics whose route differs now, and ``moved`` each (group,
member id) whose registration differs now, or is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    """The values are those of ``cometmq.v1.MemberRole``."""

    WRITER = 1
    FOLLOWER = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a broker group, as it registered."""

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
    """A member and its last registration."""

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
    """The broker groups, their members and their topics."""

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
        self.member_count = 0

    # --- calls of members ---

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
        """Adds a member, or notes that it is alive. Returns its group's live writer.

        InvalidRequest, TopicNameInvalid, StaleEpoch, LimitExceeded: nothing has changed. The
        ``topic_count`` ``topics`` are read only when they replace the known ones: a heartbeat
        repeats them all.
        """
        _check_registration(member, version, store_id)
        name = member.broker_group
        group = self._groups.get(name) or _Group(member.cluster, member.epoch)
        _check_epoch(group, member, store_id)
        if topic_count > TOPICS_PER_GROUP_MAX:
            limit = TOPICS_PER_GROUP_MAX
            raise LimitExceeded(f"{topic_count} topics, {limit} is the limit of a group")
        new_topics = _checked(topics) if _replaces_topics(group, member, version) else None
        self._check_room(group, member, new_topics or {})

        self._groups[name] = group
        before = group.members()
        group.epoch = max(group.epoch, member.epoch)
        # The member replaces its older self, the member at its address, and deposed writers.
        replaced = [
            number
            for number, known in group.live.items()
            if number == member.member_id
            or known.member.address == member.address
            or (known.member.role is Role.WRITER and known.member.epoch < group.epoch)
        ]
        for number in replaced:
            del group.live[number]
        group.live[member.member_id] = LiveMember(
            member, version, topic_count, now_s, now_ms, store_id
        )
        self.member_count += 1 - len(replaced)
        touched: set[str] = set()
        if new_topics is not None:
            touched = self._replace_topics(name, group, new_topics)
            group.topics_from = (member.epoch, version)
        after = group.members()
        if after != before:
            touched.update(group.topics)
        self._validate_group(name)
        self._notify(touched, name, {one.member_id for one in set(before) ^ set(after)})
        return group.writer

    def unregister(
        self, cluster: str, broker_group: str, member_id: int, epoch: int, store_id: str = ""
    ) -> bool:
        """Removes a member; False: it was not registered. StaleEpoch: it is registered with a newer
        epoch or another store. InvalidRequest.
        """
        if epoch > EPOCH_MAX:
            raise InvalidRequest(f"epoch: {epoch} is above {EPOCH_MAX}")
        known = self._find_member(cluster, broker_group, member_id)
        if known is None:
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
        """Removes and returns the members that were silent for too long."""
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
        """Takes the write permission from all topics of a group, or gives it back. Returns how
        many topics have another permission now. GroupNotFound.
        """
        group = self._groups.get(broker_group)
        if group is None:
            raise GroupNotFound(f"no broker group {broker_group[:127]!r} is registered")
        if group.writable == writable:
            return 0
        group.writable = writable
        touched = [name for name, topic in group.topics.items() if topic.writable]
        self._notify(touched)
        return len(touched)

    # --- calls of clients ---

    def route(self, topic: str) -> list[GroupRoute]:
        """The groups that have a topic, by name; empty: none has it."""
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
        """A member as it is registered; None: it is not."""
        known = self._find_member(cluster, broker_group, member_id)
        return None if known is None else known.member

    def members(self) -> Iterator[LiveMember]:
        """All members, by cluster, group and id."""
        for _, group in sorted(self._groups.items(), key=lambda item: (item[1].cluster, item[0])):
            yield from (group.live[number] for number in sorted(group.live))

    def census(self) -> dict[tuple[str, str], dict[Role, int]]:
        """The number of members of each role, by cluster and group. For the metrics' thread: each
        table is copied in one step and read once.
        """
        counts = {}
        for name, group in list(self._groups.items()):
            roles = [known.member.role for known in list(group.live.values())]
            counts[group.cluster, name] = {role: roles.count(role) for role in Role}
        return counts

    @property
    def topic_count(self) -> int:
        return len(self._groups_of)

    # --- internals ---

    def _find_member(self, cluster: str, broker_group: str, member_id: int) -> LiveMember | None:
        group = self._groups.get(broker_group)
        return group.live.get(member_id) if group and group.cluster == cluster else None

    def _check_room(self, group: _Group, member: Member, topics: dict[str, TopicConfig]) -> None:
        if member.member_id not in group.live and self.member_count >= self._members_max:
            raise LimitExceeded(f"{self._members_max} members are registered (members_max)")
        growth = len(topics) - len(group.topics)
        if growth <= 0:
            return
        if growth + sum(len(known.topics) for known in self._groups.values()) > self._topics_max:
            raise LimitExceeded(f"{self._topics_max} topics are registered (topics_max)")

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
        """Removes members from a group, and the group with its last member."""
        if not member_ids:
            return
        group = self._groups[name]
        for number in member_ids:
            del group.live[number]
        self.member_count -= len(member_ids)
        if not group.live:
            del self._groups[name]
            for topic in group.topics:
                self._forget_topic(topic, name)
        else:
            self._validate_group(name)
        self._notify(group.topics, name, member_ids)

    def _forget_topic(self, topic: str, name: str) -> None:
        groups = self._groups_of[topic]
        groups.remove(name)
        if not groups:
            del self._groups_of[topic]

    def _notify(
        self, topics: Collection[str], broker_group: str = "", member_ids: Iterable[int] = ()
    ) -> None:
        """Reports topics whose route differs now, and members whose registration does."""
        if topics:
            self._changed(list(topics))
        for number in member_ids:
            self._moved(broker_group, number)

    def validate(self) -> None:
        """The invariants of the whole table; for tests."""
        groups_of: dict[str, set[str]] = {}
        for name, group in self._groups.items():
            self._validate_group(name)
            for topic in group.topics:
                groups_of.setdefault(topic, set()).add(name)
            assert group.topics_from is not None or not group.topics, name
        assert self._groups_of == groups_of
        assert self.member_count == sum(len(group.live) for group in self._groups.values())
        assert self.member_count <= self._members_max
        assert sum(len(group.topics) for group in self._groups.values()) <= self._topics_max

    def _validate_group(self, name: str) -> None:
        """The invariants of a group, checked after each change of it."""
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


def _check_registration(member: Member, version: DataVersion, store_id: str) -> None:
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
    # A version above all that are to come would keep the topics as they are for ever.
    if version.epoch > EPOCH_MAX or version.counter > COUNTER_MAX:
        raise InvalidRequest(
            f"data_version: {version.epoch}, {version.counter} is above {EPOCH_MAX}, {COUNTER_MAX}"
        )
    if not STORE_ID.fullmatch(store_id):
        raise InvalidRequest(f"store_id: {store_id[:64]!r} is not one")


def _check_epoch(group: _Group, member: Member, store_id: str) -> None:
    """An epoch has one writer with one store; ``group`` may be new."""
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
    """Whether ``member`` is not the writer of its own epoch, but would replace it."""
    writer = writing.member
    if writer.epoch != member.epoch:
        return False
    here = (writer.member_id == member.member_id, writer.address == member.address)
    other_store = writing.store_id not in ("", store_id)
    if member.role is Role.WRITER:
        return not all(here) or other_store
    return any(here) and other_store


def _replaces_topics(group: _Group, member: Member, version: DataVersion) -> bool:
    """Whether the topics of a registration replace the known ones."""
    if member.role is not Role.WRITER:
        return False
    if group.topics_from is None:
        return True
    epoch, known = group.topics_from
    return epoch != member.epoch or version > known  # else a repetition, or overtaken on its way


def _checked(topics: Iterable[TopicConfig]) -> dict[str, TopicConfig]:
    found: dict[str, TopicConfig] = {}
    for topic in topics:
        try:
            check_settings(topic)
        except QueueCountInvalid as error:
            raise InvalidRequest(error.message) from error
        if topic.name in found:
            raise InvalidRequest(f"topics: {topic.name} is there twice")
        found[topic.name] = topic
    return found
