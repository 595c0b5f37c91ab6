"""The route table, rule by rule, and against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.errors import (
    CometError,
    GroupNotFound,
    InvalidRequest,
    LimitExceeded,
    StaleEpoch,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.model import TopicConfig
from services.namesrv import routes
from services.namesrv.routes import DataVersion, Member, Role, RouteTable

V1, V2 = DataVersion(1, 0), DataVersion(1, 1)
T = TopicConfig("t")


def _member(
    number: int = 0, *, group: str = "g", epoch: int = 1, role: Role = Role.WRITER
) -> Member:
    address = f"10.0.0.{number}:10911"
    return Member("c", group, number, role, address, "", epoch)


@dataclass
class Bench:
    """A table, its clock in seconds, and the changes it told."""

    table: RouteTable = field(default_factory=RouteTable)
    now_s: float = 0.0
    told: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table._changed = lambda topics: self.told.append(sorted(topics))

    def register(
        self, member: Member, *topics: TopicConfig, version: DataVersion = V1
    ) -> Member | None:
        now_ms = int(self.now_s * 1000)
        return self.table.register(
            member, version, topics, topic_count=len(topics), now_s=self.now_s, now_ms=now_ms
        )

    def where(self, topic: str = "t") -> list[tuple[str, int, list[int]]]:
        """(group, permission, member ids) of a topic's route."""
        route = self.table.route(topic)
        return [
            (g.broker_group, g.topic.permission, [m.member_id for m in g.members]) for g in route
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_writer_brings_its_topics(bench: Bench) -> None:
    assert bench.register(_member(), T) == _member()
    assert bench.where() == [("g", 6, [0])]
    assert bench.told == [["t"]]


def test_a_topic_is_where_any_group_has_it(bench: Bench) -> None:
    bench.register(_member(1, group="b"), T)
    bench.register(_member(0, group="a"), T, TopicConfig("u"))

    assert bench.where() == [("a", 6, [0]), ("b", 6, [1])]
    assert bench.table.topics() == ["t", "u"]


def test_a_follower_joins_the_route_and_learns_the_writer(bench: Bench) -> None:
    assert bench.register(_member(1, role=Role.FOLLOWER), T) is None
    assert bench.where() == []
    bench.register(_member(), T)
    assert bench.register(_member(1, role=Role.FOLLOWER)) == _member()
    assert bench.where() == [("g", 6, [0, 1])]


def test_an_unchanged_registration_tells_nobody(bench: Bench) -> None:
    bench.register(_member(), T)
    bench.register(_member(), T)
    assert len(bench.told) == 1


def test_topics_change_only_with_their_version(bench: Bench) -> None:
    bench.register(_member(), T)
    bench.register(_member(), TopicConfig("u"), version=V1)
    assert bench.table.topics() == ["t"]
    bench.register(_member(), TopicConfig("u"), version=V2)
    assert bench.table.topics() == ["u"]
    assert bench.told == [["t"], ["t", "u"]]


def test_a_heartbeat_does_not_look_at_its_topics(bench: Bench) -> None:
    bench.register(_member(), T)
    topics = iter([TopicConfig("u")])
    bench.table.register(_member(), V1, topics, topic_count=1, now_s=0, now_ms=0)
    assert next(topics) == TopicConfig("u")


def test_an_overtaken_registration_changes_no_topics(bench: Bench) -> None:
    bench.register(_member(), TopicConfig("u"), version=V2)
    bench.register(_member(), T, version=V1)
    assert bench.table.topics() == ["u"]


def test_only_topics_that_differ_are_told(bench: Bench) -> None:
    bench.register(_member(), T, TopicConfig("u"))
    bench.register(_member(), T, replace(TopicConfig("u"), read_queue_count=8), version=V2)
    assert bench.told[-1] == ["u"]


def test_a_new_epoch_replaces_topics_whatever_their_version(bench: Bench) -> None:
    bench.register(_member(), T, version=V2)
    bench.register(_member(epoch=2), TopicConfig("u"), version=V1)
    assert bench.table.topics() == ["u"]


def test_an_older_epoch_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.register(_member(epoch=3), T)
    for role in Role:
        with pytest.raises(StaleEpoch, match="epoch 3") as refused:
            bench.register(_member(1, epoch=2, role=role), TopicConfig("u"), version=V2)
        assert refused.value.epoch == 3
    assert bench.where() == [("g", 6, [0])]
    assert bench.table.member_count == 1


def test_a_new_writer_deposes_the_old_one(bench: Bench) -> None:
    bench.register(_member(0, epoch=1), T)
    bench.register(_member(1, epoch=2), T)
    assert bench.where() == [("g", 6, [1])]
    bench.register(_member(0, epoch=2, role=Role.FOLLOWER))
    assert bench.where() == [("g", 6, [0, 1])]


def test_a_follower_of_a_newer_writer_deposes_the_old_one(bench: Bench) -> None:
    bench.register(_member(0, epoch=1), T)
    assert bench.register(_member(1, epoch=2, role=Role.FOLLOWER)) is None
    assert bench.where() == [("g", 6, [1])]


def test_two_writers_of_one_epoch_cannot_be(bench: Bench) -> None:
    bench.register(_member(0), T)
    with pytest.raises(StaleEpoch, match=r"member 0 at 10\.0\.0\.0:10911 is the writer") as refused:
        bench.register(_member(1), T)
    assert refused.value.epoch == 1
    with pytest.raises(StaleEpoch):
        bench.register(replace(_member(0), address="10.0.0.9:1"), T)


def test_one_address_is_one_member(bench: Bench) -> None:
    bench.register(_member(0), T)
    bench.register(_member(1, role=Role.FOLLOWER))
    moved = replace(_member(2, role=Role.FOLLOWER), address=_member(1).address)
    bench.register(moved)
    assert bench.where() == [("g", 6, [0, 2])]
    assert bench.table.member_count == 2


def test_a_stopped_member_leaves_at_once(bench: Bench) -> None:
    bench.register(_member(), T)
    assert bench.table.unregister("c", "g", 0, 1)
    assert bench.where() == []
    assert bench.told[-1] == ["t"]
    assert (bench.table.member_count, bench.table.topic_count) == (0, 0)


@pytest.mark.parametrize("who", [("c", "g", 1, 1), ("c", "h", 0, 1), ("d", "g", 0, 1)])
def test_an_unknown_member_is_no_error(bench: Bench, who: tuple[str, str, int, int]) -> None:
    bench.register(_member(), T)
    assert not bench.table.unregister(*who)
    assert bench.where() == [("g", 6, [0])]


def test_an_older_self_cannot_unregister_the_newer(bench: Bench) -> None:
    bench.register(_member(epoch=2), T)
    with pytest.raises(StaleEpoch):
        bench.table.unregister("c", "g", 0, 1)


def test_topics_stay_while_a_follower_lives(bench: Bench) -> None:
    bench.register(_member(), T)
    bench.register(_member(1, role=Role.FOLLOWER))
    bench.table.unregister("c", "g", 0, 1)
    assert bench.where() == [("g", 6, [1])]


def test_a_silent_member_is_removed_on_the_120th_second(bench: Bench) -> None:
    bench.register(_member(0), T)
    bench.now_s = 60.0
    bench.register(_member(1, role=Role.FOLLOWER))

    assert bench.table.expire(119.9) == []
    assert [member.member_id for member in bench.table.expire(120.0)] == [0]
    assert bench.where() == [("g", 6, [1])]
    bench.table.expire(180.0)
    assert bench.where() == []


def test_a_heartbeat_keeps_a_member(bench: Bench) -> None:
    bench.register(_member(), T)
    bench.now_s = 119.0
    bench.register(_member(), T)
    assert bench.table.expire(238.0) == []


def test_the_write_permission_goes_and_comes(bench: Bench) -> None:
    bench.register(_member(), T, TopicConfig("read", permission=4))
    assert bench.table.set_write_permission("g", False) == 1
    assert bench.where() == [("g", 4, [0])]
    assert bench.table.set_write_permission("g", False) == 0
    assert bench.table.set_write_permission("g", True) == 1
    assert bench.where() == [("g", 6, [0])]
    assert bench.told[1:] == [["t"], ["t"]]


def test_a_wiped_permission_survives_heartbeats_but_no_new_version(bench: Bench) -> None:
    bench.register(_member(), T)
    bench.table.set_write_permission("g", False)
    bench.register(_member(), T)
    assert bench.where() == [("g", 4, [0])]
    bench.register(_member(), T, version=V2)
    assert bench.where() == [("g", 6, [0])]
    assert bench.told[-1] == ["t"]


def test_unknown_groups_have_no_permission_to_set(bench: Bench) -> None:
    with pytest.raises(GroupNotFound):
        bench.table.set_write_permission("g", False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cluster": ""}, "cluster"),
        ({"cluster": "x" * 128}, "cluster"),
        ({"broker_group": "a/b"}, "broker_group"),
        ({"broker_group": "g\n"}, "broker_group"),
        ({"member_id": -1}, "member_id"),
        ({"member_id": routes.MEMBER_ID_MAX + 1}, "member_id"),
        ({"epoch": 0}, "epoch"),
        ({"address": ""}, "address"),
        ({"address": "host:1\n"}, "address"),
        ({"address": "a b:1"}, "address"),
        ({"internal_address": "x"}, "internal_address"),
    ],
)
def test_bad_members_are_refused(bench: Bench, change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        bench.register(replace(_member(), **change), T)  # type: ignore[arg-type]
    assert bench.table.member_count == 0


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        (TopicConfig("../x"), TopicNameInvalid),
        (TopicConfig("t\n"), TopicNameInvalid),
        (TopicConfig("t", read_queue_count=0), InvalidRequest),
        (TopicConfig("t", write_queue_count=1025), InvalidRequest),
        (TopicConfig("t", permission=8), InvalidRequest),
    ],
)
def test_bad_topics_are_refused(bench: Bench, topic: TopicConfig, kind: type[CometError]) -> None:
    with pytest.raises(kind):
        bench.register(_member(), TopicConfig("good"), topic)
    assert bench.table.topics() == []
    assert bench.table.member_count == 0


def test_a_topic_stands_once_in_a_registration(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        bench.register(_member(), T, T)


def test_a_group_is_in_one_cluster(bench: Bench) -> None:
    bench.register(_member(), T)
    with pytest.raises(InvalidRequest, match="registered in cluster c"):
        bench.register(replace(_member(1, role=Role.FOLLOWER), cluster="d"))


def test_limits_of_the_table() -> None:
    bench = Bench(RouteTable(members_max=1, topics_max=2))
    with pytest.raises(LimitExceeded, match="topics_max"):
        bench.register(_member(), *(TopicConfig(f"t{n}") for n in range(3)))
    bench.register(_member(), T)
    with pytest.raises(LimitExceeded, match="members_max"):
        bench.register(_member(1, role=Role.FOLLOWER))
    bench.register(_member(), T)


def test_too_many_topics_of_one_group(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TOPICS_PER_GROUP_MAX", 1)
    with pytest.raises(LimitExceeded, match="limit of a group"):
        bench.register(_member(), T, TopicConfig("u"))


def test_find_refuses_bad_and_unknown_names(bench: Bench) -> None:
    bench.register(_member(), T)
    assert bench.table.find("t") == bench.table.route("t")
    with pytest.raises(TopicNotFound):
        bench.table.find("u")
    with pytest.raises(TopicNameInvalid):
        bench.table.find("t\n")


def test_members_are_listed_in_order(bench: Bench) -> None:
    bench.register(_member(3, group="b"), T)
    bench.register(_member(2, group="a", role=Role.FOLLOWER))
    bench.register(replace(_member(1, group="z"), cluster="a"))
    listed = [(m.member.cluster, m.member.broker_group) for m in bench.table.members()]
    assert listed == [("a", "z"), ("c", "a"), ("c", "b")]


# --- against a naive model ------------------------------------------------------------------------

TOPICS = ["t", "u", "v"]


class Model(RuleBasedStateMachine):
    """All registrations that hold, as a list; the route is computed from it each time."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.epoch = {"a": 0, "b": 0}
        self.live: dict[tuple[str, int], tuple[Member, float]] = {}
        self.topics: dict[str, set[str]] = {"a": set(), "b": set()}
        self.topics_epoch = {"a": 0, "b": 0}  # epoch of the writer that brought the topics
        self.closed: set[str] = set()
        self.seen: dict[str, list[tuple[str, int, list[int]]]] = {t: [] for t in TOPICS}

    @rule(
        group=st.sampled_from("ab"),
        number=st.integers(0, 2),
        ahead=st.integers(-1, 1),
        topics=st.sets(st.sampled_from(TOPICS)),
    )
    def start_writer(self, group: str, number: int, ahead: int, topics: set[str]) -> None:
        """Each writer is a new incarnation: a version of its own, an epoch around the known."""
        member = _member(number, group=group, epoch=self.epoch[group] + ahead)
        writer = next((m for m, _ in self._of(group) if m.role is Role.WRITER), None)
        fits = member.epoch >= max(1, self.epoch[group])
        fits &= not (writer and writer.epoch == member.epoch and writer != member)
        try:
            self.bench.register(
                member, *map(TopicConfig, sorted(topics)), version=DataVersion(1, 0)
            )
        except (StaleEpoch, InvalidRequest):
            assert not fits
            return
        assert fits
        self._take(member)
        if self.topics_epoch[group] != member.epoch:
            self.topics[group] = topics
            self.topics_epoch[group] = member.epoch
            self.closed.discard(group)

    @rule(group=st.sampled_from("ab"), number=st.integers(0, 2), ahead=st.integers(-1, 1))
    def start_follower(self, group: str, number: int, ahead: int) -> None:
        member = _member(number, group=group, epoch=self.epoch[group] + ahead, role=Role.FOLLOWER)
        fits = member.epoch >= max(1, self.epoch[group])
        try:
            self.bench.register(member)
        except (StaleEpoch, InvalidRequest):
            assert not fits
            return
        assert fits
        self._take(member)

    @rule(group=st.sampled_from("ab"), number=st.integers(0, 2))
    def stop(self, group: str, number: int) -> None:
        known = self.live.get((group, number))
        epoch = known[0].epoch if known else 1
        assert self.bench.table.unregister("c", group, number, epoch) is (known is not None)
        self.live.pop((group, number), None)
        self._forget_empty()

    @rule(seconds=st.sampled_from([1.0, 59.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now_s += seconds
        self.bench.table.expire(self.bench.now_s)
        self.live = {k: (m, at) for k, (m, at) in self.live.items() if self.bench.now_s - at < 120}
        self._forget_empty()

    @rule(group=st.sampled_from("ab"), writable=st.booleans())
    def set_permission(self, group: str, writable: bool) -> None:
        if not self._of(group):
            with pytest.raises(GroupNotFound):
                self.bench.table.set_write_permission(group, writable)
            return
        self.bench.table.set_write_permission(group, writable)
        (self.closed.discard if writable else self.closed.add)(group)

    @invariant()
    def routes_are_those_of_the_model(self) -> None:
        told = {topic for topics in self.bench.told for topic in topics}
        self.bench.told.clear()
        for topic in TOPICS:
            expected = self._route(topic)
            assert self.bench.where(topic) == expected
            assert expected == self.seen[topic] or topic in told  # no change goes untold
            self.seen[topic] = expected
        assert self.bench.table.member_count == len(self.live)
        self.bench.table.validate()

    def _route(self, topic: str) -> list[tuple[str, int, list[int]]]:
        return [
            (group, 4 if group in self.closed else 6, [m.member_id for m, _ in self._of(group)])
            for group in "ab"
            if topic in self.topics[group]
        ]

    def _of(self, group: str) -> list[tuple[Member, float]]:
        return [entry for (name, _), entry in sorted(self.live.items()) if name == group]

    def _take(self, member: Member) -> None:
        group = member.broker_group
        self.epoch[group] = max(self.epoch[group], member.epoch)
        self.live = {
            key: (m, at)
            for key, (m, at) in self.live.items()
            if key[0] != group or m.role is Role.FOLLOWER or m.epoch >= member.epoch
        }
        self.live[group, member.member_id] = (member, self.bench.now_s)

    def _forget_empty(self) -> None:
        for group in "ab":
            if not self._of(group):
                self.epoch[group] = 0
                self.topics[group] = set()
                self.topics_epoch[group] = 0
                self.closed.discard(group)


Model.TestCase.settings = settings(stateful_step_count=20)
TestModel = Model.TestCase
