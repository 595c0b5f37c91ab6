"""One run: a group of members, faults for a while, then peace until all is as it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cometmq.replication.insync import SetPolicy
from cometmq.replication.lease import Reason
from cometmq.replication.watermarks import DurabilityClass
from tests.sim.clients import RESEND_S, Producer, Reader
from tests.sim.consumers import Consumer
from tests.sim.crew import Crew
from tests.sim.faults import FAULTS, OFTEN, SELDOM, Faults, force
from tests.sim.follower import Follower
from tests.sim.inquirers import Inquirer
from tests.sim.judge import Forgotten, Judge
from tests.sim.lease import LeaseService
from tests.sim.member import Group, Member, Role, Rules
from tests.sim.network import Network
from tests.sim.newcomers import Newcomer
from tests.sim.receivers import Receiver
from tests.sim.topics import Topics
from tests.sim.transactors import Transactor
from tests.sim.world import Violation, World
from tests.sim.writer import Writer

CALM_S = 5.0  # at the beginning
PEACE_S_MAX = 120.0
DRAIN_S_MAX = 400.0  # the last retry comes after 40 s, by a clock that may be behind for long
TIME_OF_DAY_MS = 1_790_000_000_000  # an early release began to count generations there
QUESTION_S_MAX = 4.0  # what was asked has ended by then
STUCK_S = 40.0  # in peace without a writer: then an operator looks

C = DurabilityClass
REPLICATED_TOPICS = [
    C.ASYNC,
    C.FLUSHED,
    C.REPLICATED,
    C.REPLICATED_FLUSHED,
    C.FLUSHED | C.REPLICATED,
    C.FLUSHED | C.REPLICATED_FLUSHED,
]
ASYNC_TOPICS = [C.ASYNC, C.FLUSHED]


def play(seed: int, told: Callable[[str], None] | None = None) -> Counter[str]:
    """Play one seed; what has happened. Raises Violation, and whatever a machine asserts."""
    world = World(seed, told)
    group, judge, kinds = _made(world, TIME_OF_DAY_MS if seed % 4 == 0 else 0)
    for member in group.members:
        member.execute(delay_s=world.between(0.0, 1.0))
    crew = Crew(group)
    faults = Faults(group, judge, crew, kinds, pause_s=world.between(1, 5))
    for queue in range(group.rules.topics.count):
        for _ in range(2):
            Reader(group, queue, pause_s=0.5).go_on()
    world.at(CALM_S, faults.go_on)
    try:
        world.run(CALM_S + world.between(20, 70))
        faults.end()
        _converge(group, judge, faults, crew)
    except Forgotten:
        world.counts["everything forgotten"] += 1
    world.counts["acknowledged"] += judge.acked_count
    return world.counts


def _made(world: World, counted_to: int) -> tuple[Group, Judge, list[str]]:
    rng = world.rng
    members = rng.choice([2, 3, 3])
    replicated = rng.random() < 0.7
    modes = REPLICATED_TOPICS if replicated else ASYNC_TOPICS
    policy = SetPolicy(
        size_min=rng.randint(1, members) if replicated else 1,
        promote_async=rng.random() < 0.8,
        async_lag_bytes_max=rng.choice([3_000, 10_000, 1_000_000]),
    )
    kinds = rng.sample(OFTEN, rng.randint(3, len(OFTEN))) + rng.sample(SELDOM, rng.randint(0, 3))
    topics = Topics(tuple(rng.sample(modes, rng.randint(1, len(modes)))))
    rules = Rules(
        members,
        topics,
        topics.all_demands(),
        policy,
        # Without a list of peers a lost lease is anybody's whose store is empty.
        knows_peers="lease deleted" in kinds or rng.random() < 0.8,
        counted_to=counted_to,
    )
    judge = Judge(world)
    lease = LeaseService(world)
    lease.on_change = judge.lease_written
    group = Group(world, rules, Network(world, range(members)), lease, judge)
    judge.group = group
    group.members.extend(Member(group, number, _role) for number in range(members))
    world.tell("", f"seed: {rules} {kinds}")
    return group, judge, kinds


def _role(member: Member, writer: Reason | None) -> Role:
    return Follower(member) if writer is None else Writer(member, writer)


def _converge(group: Group, judge: Judge, faults: Faults, crew: Crew) -> None:
    """In peace there is a writer soon, consumers come to the end of everything, everybody is in
    sync, and all logs are equal.
    """
    world, start_s = group.world, group.world.now
    _wait(group, faults, lambda: _served(group), PEACE_S_MAX)
    crew.stop(Producer)
    crew.stop_transactions()
    world.run(world.now + RESEND_S)  # what they have begun comes to its end
    _wait(group, faults, lambda: _is_drained(group, judge), DRAIN_S_MAX)
    for kind in (Consumer, Receiver, Transactor, Newcomer, Inquirer):
        crew.stop(kind)
    world.run(world.now + QUESTION_S_MAX)
    _wait(group, faults, lambda: _settled(group) is not None, PEACE_S_MAX)
    writer = _settled(group)
    assert writer is not None
    judge.check_converged(writer)
    judge.groups.check_end(writer)
    judge.messages.check_end(writer)
    if writer.broker.asking.open_count:
        raise Violation(f"{writer.broker.asking.open_count} questions wait for ever")
    world.counts["seconds until all was well"] += round(world.now - start_s)


def _wait(group: Group, faults: Faults, condition: Callable[[], bool], within_s: float) -> None:
    world = group.world
    start_s = helped_s = world.now
    while not condition():
        world.run(world.now + 0.5)
        if world.now - helped_s > STUCK_S and not group.writers():
            _help(group, faults)
            helped_s = world.now
        if world.now - start_s > within_s:
            if group.judge.is_overtaken():
                raise Forgotten  # name servers, which are not here, would tell the writer
            raise Violation(f"no peace after {within_s:g} s: {_story(group)}")


def _is_drained(group: Group, judge: Judge) -> bool:
    """Consumers are at the end of everything."""
    writers = group.writers()
    return len(writers) == 1 and all(
        part.is_drained(writers[0]) for part in (judge.groups, judge.messages)
    )


def _served(group: Group) -> bool:
    """A writer has all members in sync."""
    sizes = [len(writer.state.record.in_sync) for writer in group.writers()]
    return sizes == [len(group.members)] or (not group.rules.replicated and len(sizes) == 1)


def _settled(group: Group) -> Writer | None:
    """The writer, once everybody is in sync and has everything."""
    writers = group.writers()
    if len(writers) != 1:
        return None
    writer = writers[0]
    in_sync = {replica_id for replica_id in writer.state.record.in_sync}
    wanted = {member.disk.replica_id for member in group.members}
    if not (group.rules.replicated or group.rules.policy.promote_async):
        wanted = {writer.disk.replica_id}
    ends = {(member.disk.end, member.disk.flushed) for member in group.members}
    whole = ends == {(writer.disk.end, writer.disk.end)}
    return writer if in_sync == wanted and whole and writer.is_valid() else None


def _help(group: Group, faults: Faults) -> None:
    """An operator forces an election where nobody may lead; where somebody may, that is wrong."""
    record = group.lease.reading.record
    if record is None and group.rules.knows_peers:
        raise Violation(f"nobody takes the lease that was lost: {_story(group)}")
    most = max((member.disk.epoch, member.disk.end) for member in group.members)
    for member in group.members:
        disk = member.disk
        former = disk.replica_id._replace(store_id=disk.former_store_id)
        may_ask = group.rules.knows_peers or (record and record.in_sync == (former,))
        longest = may_ask and (disk.epoch, disk.end) == most
        if record and (
            disk.replica_id in record.electable or (former in record.in_sync and longest)
        ):
            raise Violation(f"{disk.replica_id} may lead and does not: {_story(group)}")
    group.world.counts["stuck, and helped"] += 1
    best = max(group.members, key=lambda member: (member.disk.epoch, member.disk.end))
    force(faults, best)


def _story(group: Group) -> str:
    members = [
        f"n{m.id} {type(m.process).__name__} {m.disk.replica_id.store_id} "
        f"(was {m.disk.former_store_id or '-'}) epoch {m.disk.epoch} end {m.disk.end} "
        f"flushed {m.disk.flushed}"
        for m in group.members
    ]
    return f"{group.lease.reading}; " + "; ".join(members)


assert set(OFTEN) | set(SELDOM) == set(FAULTS)
