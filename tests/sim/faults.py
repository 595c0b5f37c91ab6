"""What goes wrong: each fault by name, with what ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.crew import Crew
from tests.sim.follower import Follower
from tests.sim.judge import Judge
from tests.sim.lease import OutageLogger
from tests.sim.member import Group, Member


@dataclass
class Faults:
    """Strikes at random until :meth:`end`, after which all is well."""

    group: Group
    judge: Judge
    crew: Crew
    kinds: list[str]
    pause_s: float  # on average between two faults
    over: bool = False

    def go_on(self) -> None:
        if self.over:
            return
        world = self.group.world
        kind = world.rng.choice(self.kinds)
        FAULTS[kind](self)
        pause_s = world.rng.expovariate(1 / self.pause_s)
        # What is worst comes together.
        world.at(pause_s / 20 if world.rng.random() < 0.4 else pause_s, self.go_on)

    def some(self) -> Member:
        """A member; more often than not the writer."""
        rng, writers = self.group.world.rng, self.group.writers()
        if writers and rng.random() < 0.5:
            return rng.choice(writers).member
        return rng.choice(self.group.members)

    def later(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        world = self.group.world

        def unless_over() -> None:
            if not self.over:
                action()

        world.at(world.between(low_s, high_s), unless_over)

    def tell(self, member: Member | None, what: str) -> None:
        who = "" if member is None else f"n{member.id}"
        self.group.world.tell(who, f"*** {what}")
        self.group.world.counts[f"fault: {what}"] += 1

    def end(self) -> None:
        """Everything is mended, every member runs."""
        self.over = True
        group = self.group
        group.network.cut.clear()
        group.network.slow_s.clear()
        group.network.loss = 0.0
        group.lease.trouble = OutageLogger()
        group.lease.out_for = set()
        for stream in list(group.network.streams):
            stream.heal()
        for member in group.members:
            member.slow_disk_s = 0.0
            member.clock.jump_s = 0.0
            member.machine.go_on()
            start(member)
        self.crew.calm()
        group.world.tell("", "*** all is well")


def start(member: Member) -> None:
    """Where nothing runs, and nothing is about to."""
    if not member.runs:
        member.execute()


def _kill(faults: Faults) -> None:
    member = faults.some()
    faults.tell(member, "killed")
    member.kill()
    faults.later(0.2, 8, lambda: start(member))


def _stop(faults: Faults) -> None:
    """In order: SIGTERM."""
    member = faults.some()
    process = member.process
    if process is not None and process.serving:
        faults.tell(member, "stopped in order")

        def stop() -> None:
            if not process.serving:
                return
            process.serving = process.writes = False
            process.disk.close()
            member.kill()
            # Also when all is to be well: what has begun to stop stops.
            world.at(world.between(0.2, 10), lambda: start(member))

        world = process.world
        process.call(process.leave)
        process.after(world.between(0.0, 0.5), stop)


def lose_power(faults: Faults, member: Member) -> None:
    faults.tell(member, "loses its power")
    if not member.disk.clean:
        faults.judge.power_lost(member.disk.replica_id)
    lost = member.lose_power()
    if lost:
        faults.tell(member, "loses unsynced records")
    faults.later(0.5, 10, lambda: start(member))


def _power(faults: Faults) -> None:
    lose_power(faults, faults.some())


def _power_of_all(faults: Faults) -> None:
    for member in faults.group.members:
        lose_power(faults, member)


def _disk(faults: Faults) -> None:
    member = faults.some()
    faults.tell(member, "loses its disk")
    faults.judge.disk_lost(member.disk.replica_id)
    member.lose_disk()
    faults.later(0.5, 10, lambda: start(member))


def _pause(faults: Faults) -> None:
    member = faults.some()
    faults.tell(member, "paused")
    member.machine.stop()
    faults.later(0.2, 15, member.machine.go_on)


def _cut(faults: Faults) -> None:
    """Some links, in one direction or both."""
    group, rng = faults.group, faults.group.world.rng
    member = faults.some()
    links = {
        link
        for other in group.members
        if other is not member and rng.random() < 0.8
        for link in ((member.id, other.id), (other.id, member.id))
        if rng.random() < 0.8
    }
    faults.tell(member, "links cut")
    group.network.cut |= links
    away = rng.random() < 0.5
    if away:
        group.lease.out_for.add(member.id)

    def heal() -> None:
        group.network.cut -= links
        group.lease.out_for.discard(member.id)
        for stream in list(group.network.streams):
            stream.heal()

    faults.later(0.5, 15, heal)


def _break(faults: Faults) -> None:
    faults.tell(None, "streams break")
    for stream in list(faults.group.network.streams):
        if faults.group.world.rng.random() < 0.7:
            stream.break_off()


def _slow_link(faults: Faults) -> None:
    group, rng = faults.group, faults.group.world.rng
    member, other = rng.sample(group.members, 2)
    faults.tell(member, "slow link")
    group.network.slow_s[(member.id, other.id)] = group.world.between(0.1, 4)

    def mend() -> None:
        group.network.slow_s.pop((member.id, other.id), None)

    faults.later(2, 12, mend)


def _slow_disk(faults: Faults) -> None:
    member = faults.some()
    faults.tell(member, "slow disk")
    member.slow_disk_s = faults.group.world.between(0.1, 4)

    def mend() -> None:
        member.slow_disk_s = 0.0

    faults.later(2, 12, mend)


def _loss(faults: Faults) -> None:
    network = faults.group.network
    faults.tell(None, "messages lost and doubled")
    network.loss = 0.3

    def mend() -> None:
        network.loss = 0.0

    faults.later(2, 10, mend)


def _lease_out(faults: Faults) -> None:
    group, rng = faults.group, faults.group.world.rng
    everybody = {member.id for member in group.members}
    away = everybody if rng.random() < 0.5 else {faults.some().id}
    faults.tell(None, "lease out of reach")
    group.lease.out_for |= away

    def mend() -> None:
        group.lease.out_for -= away

    faults.later(0.5, 20, mend)


def _lease_trouble(faults: Faults) -> None:
    faults.tell(None, "lease in trouble")
    lease, world = faults.group.lease, faults.group.world
    lease.trouble = OutageLogger(
        unanswered=world.between(0, 0.4),
        never=world.between(0, 0.3),
        late=world.between(0, 0.3),
        slow_s=world.between(0.02, 3),
    )

    def mend() -> None:
        lease.trouble = OutageLogger()

    faults.later(3, 20, mend)


def _lease_deleted(faults: Faults) -> None:
    faults.tell(None, "lease deleted")
    faults.judge.lease_deleted()
    faults.group.lease.delete()


def _client_pause(faults: Faults) -> None:
    """It may be longer than a lease lasts."""
    seat = faults.crew.choose()
    faults.tell(None, "client paused")
    seat.machine.stop()
    faults.later(1, 40, seat.machine.go_on)


def _client_kill(faults: Faults) -> None:
    seat = faults.crew.choose()
    faults.tell(None, "client killed")
    seat.kill()
    faults.later(0.2, 10, seat.revive)


def _client_cut(faults: Faults) -> None:
    """From some members, in one direction or both."""
    group, rng = faults.group, faults.group.world.rng
    node = faults.crew.choose().machine.node
    links = {
        link
        for member in group.members
        for link in ((node, member.id), (member.id, node))
        if rng.random() < 0.7
    }
    faults.tell(None, "client cut off")
    group.network.cut |= links
    faults.later(0.5, 25, lambda: group.network.cut.difference_update(links))


def _island(faults: Faults) -> None:
    """The writer is cut off from the other members and from the lease; clients reach it."""
    group = faults.group
    for writer in group.writers():
        member = writer.member
        others = [other.id for other in group.members if other is not member]
        links = {link for other in others for link in ((member.id, other), (other, member.id))}
        faults.tell(member, "alone with clients")
        group.network.cut |= links
        group.lease.out_for.add(member.id)

        def heal(member: Member = member, links: set[tuple[int, int]] = links) -> None:
            group.network.cut -= links
            group.lease.out_for.discard(member.id)
            for stream in list(group.network.streams):
                stream.heal()

        faults.later(5, 40, heal)


def _hand_over(faults: Faults) -> None:
    for writer in faults.group.writers():
        faults.tell(writer.member, "told to step down")
        writer.call(writer.step_down)


def _force(faults: Faults) -> None:
    member = faults.group.world.rng.choice(faults.group.members)
    force(faults, member)


def force(faults: Faults, member: Member) -> None:
    """``cometmq broker elect --force``."""
    process = member.process
    if isinstance(process, Follower) and process.serving:
        faults.tell(member, "told to lead")
        faults.judge.ordered(member)
        process.call(process.be_told_to_lead)


def _forestall(faults: Faults) -> None:
    """A follower is told to lead, but the writer comes back first; and dies again when it has
    acknowledged what the follower, which stood still, has not got.
    """
    group = faults.group
    member = next((writer.member for writer in group.writers()), group.members[0])
    other = group.world.rng.choice([each for each in group.members if each is not member])
    faults.tell(member, "forestalls an election")
    member.kill()
    force(faults, other)
    faults.later(0.2, 1, lambda: start(member))
    faults.later(3, 4, other.machine.stop)
    faults.later(8, 10, member.kill)
    faults.later(10, 11, other.machine.go_on)
    faults.later(20, 30, lambda: start(member))


# So late may be what waits; longer errors are played by tests/model/test_clock_errors.py.
WRONG_CLOCKS_S = (20.0, 120.0, -20.0, -120.0)


def _wrong_clock(faults: Faults) -> None:
    """One at a time: of two that agree the third could not know."""
    member, members = faults.some(), faults.group.members
    if any(one.clock.jump_s for one in members):
        return
    member.clock.jump_s = faults.group.world.rng.choice(WRONG_CLOCKS_S)
    way = "ahead" if member.clock.jump_s > 0 else "behind"
    faults.tell(member, f"clock {way}")

    def mend() -> None:
        member.clock.jump_s = 0.0

    faults.later(2, 40, mend)


FAULTS: dict[str, Callable[[Faults], None]] = {
    "wrong clock": _wrong_clock,
    "kill": _kill,
    "stop": _stop,
    "power": _power,
    "power of all": _power_of_all,
    "disk": _disk,
    "pause": _pause,
    "cut": _cut,
    "break": _break,
    "slow link": _slow_link,
    "slow disk": _slow_disk,
    "loss": _loss,
    "lease out": _lease_out,
    "lease trouble": _lease_trouble,
    "lease deleted": _lease_deleted,
    "hand over": _hand_over,
    "client pause": _client_pause,
    "client kill": _client_kill,
    "client cut": _client_cut,
    "island": _island,
    "force": _force,
    "forestall": _forestall,
}
OFTEN = [
    "wrong clock",
    "kill",
    "stop",
    "power",
    "pause",
    "cut",
    "break",
    "hand over",
    "lease trouble",
    "lease out",
    "slow disk",
    "client pause",
    "client kill",
    "client cut",
    "island",
]
SELDOM = ["disk", "power of all", "slow link", "loss", "lease deleted", "force", "forestall"]
