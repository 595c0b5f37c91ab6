"""Producers that send to whoever says that he writes, consumers that follow their positions."""

from __future__ import annotations

from cometmq.errors import NotWriter, PositionFenced
from cometmq.model import Position
from tests.sim.member import Group, Role
from tests.sim.world import Violation

READ_MAX = 30  # messages at once
UNTOLD = Position(0, 0)


class Producer:
    """Sends batches to random queues. A writer that is none any more gets its share too."""

    def __init__(self, group: Group, pause_s: float) -> None:
        self._group = group
        self._pause_s = pause_s
        self.over = False

    def go_on(self) -> None:
        if self.over:
            return
        group, rng = self._group, self._group.world.rng
        queues = len(group.rules.demands)
        for writer in group.writers():
            chosen = sorted(rng.sample(range(queues), rng.randint(1, min(2, queues))))
            writer.call(lambda writer=writer, chosen=chosen: writer.send(chosen))  # type: ignore[misc]
        group.world.at(group.world.between(0.1, 2.0) * self._pause_s, self.go_on)


class Consumer:
    """Reads one queue, wherever it gets to. It remembers a hash of all that it has read: a position
    that is not fenced has to mean exactly this.
    """

    def __init__(self, group: Group, queue: int, pause_s: float) -> None:
        self._group = group
        self._queue = queue
        self._pause_s = pause_s
        self._position = UNTOLD
        self._chains = [0]  # of what was read, after each message
        self._epoch = 0  # of whoever gave the position

    def go_on(self) -> None:
        group, rng = self._group, self._group.world.rng
        serving = [m.process for m in group.members if m.process and m.process.serving]
        if serving:
            role = rng.choice(serving)
            if not role.member.machine.stopped:
                self._pull(role)
        group.world.at(group.world.between(0.5, 1.5) * self._pause_s, self.go_on)

    def _pull(self, role: Role) -> None:
        history = role.history(self._queue)
        if history is None:
            return
        try:
            check = history.validate if role.writes else history.validate_at_copy
            self._read(role, check(self._position))
        except NotWriter:
            return
        except PositionFenced as error:
            self._fenced(role, Position(*(error.fence or (0, 0))))

    def _read(self, role: Role, position: Position) -> None:
        units = role.disk.queues[self._queue]
        readable, offset = role.readable(self._queue), position.offset
        if offset > len(units):
            # What a writer has, that was deposed and does not know it, is old.
            if role.writes and role.epoch >= self._epoch:
                raise Violation(f"{role.disk.replica_id} takes {position}, it has {len(units)}")
            return
        if offset > readable and not role.writes:
            return  # a copy that is not so far yet answers nothing, and moves nobody
        there = units[offset - 1].chain if offset else 0
        if there != self._chains[offset]:
            raise Violation(
                f"{role.disk.replica_id} of epoch {role.epoch} takes {self._position} as {position}"
                f" of queue {self._queue}: other messages than those that were read"
            )
        for unit in units[offset : min(readable, offset + READ_MAX)]:
            self._chains.append(unit.chain)
        self._position = Position(position.generation, len(self._chains) - 1)
        self._epoch = max(self._epoch, role.epoch)

    def _fenced(self, role: Role, fence: Position) -> None:
        """It is told that what it has read is not there. Below the fence it is, unless he who says
        so is behind himself.
        """
        group = self._group
        units = role.disk.queues[self._queue]
        offset = min(fence.offset, len(units))
        chains = [0, *(unit.chain for unit in units[:offset])]
        if role.epoch < self._epoch:
            group.world.counts["positions fenced by a writer of before"] += 1
        else:
            group.world.counts["positions fenced"] += 1
            read = self._chains[min(offset, len(self._chains) - 1)]
            if fence.offset > len(units) or chains[-1] != read:
                raise Violation(
                    f"{role.disk.replica_id} of epoch {role.epoch} fences {self._position} "
                    f"at {fence}: below it are other messages than those that were read"
                )
        self._chains = chains
        self._position = Position(fence.generation, offset)
        self._epoch = role.epoch
