"""The network between the members: streams in order, requests and answers, each as slow as its
link. A stream that breaks is noticed by its two ends at different times, or not at all, and what
was sent before may still arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from tests.sim.world import Process, World

NOTICE_S_MAX = 3.0  # until an end notices a broken stream, where it can
LATE_SHARE = 0.05  # of messages that are sent again on the way

FIRST_CLIENT = 100  # members have the ids below

M = TypeVar("M")
Link = tuple[int, int]


class Network:
    """Members and clients by id. A link that is cut lets nothing through in that direction."""

    def __init__(self, world: World, members: Iterable[int]) -> None:
        self.world = world
        self.cut: set[Link] = set()
        self.slow_s: dict[Link, float] = {}
        self.loss = 0.0  # share of requests and answers
        self.client_loss = 0.0  # the same, of those that come from clients or go there
        self.streams: list[Stream] = []
        self._members = list(members)

    def delay_s(self, link: Link) -> float:
        world = self.world
        if world.rng.random() < LATE_SHARE:
            return world.between(0.05, 0.5) + self.slow_s.get(link, 0.0)
        return world.between(0.0002, 0.004) + self.slow_s.get(link, 0.0)

    def send(self, link: Link, deliver: Callable[[], None]) -> None:
        """One message by itself: it may be lost, come twice, or come late."""
        loss = self.client_loss if max(link) >= FIRST_CLIENT else self.loss
        if link in self.cut or self.world.rng.random() < loss:
            return
        copies = 2 if self.world.rng.random() < loss else 1
        for _ in range(copies):
            self.world.at(self.delay_s(link), deliver)


class End(Generic[M]):
    """One end of a stream. ``taken`` hears of messages, ``ended`` that the stream is over."""

    def __init__(self, process: Process, member_id: int) -> None:
        self.process = process
        self.member_id = member_id
        self.taken: Callable[[M], None] = lambda _message: None
        self.ended: Callable[[], None] = lambda: None
        self.closed = False  # this end takes nothing any more
        self.last_s = 0.0  # when the last message arrives


class Stream:
    """Between a follower, which opened it, and a writer."""

    def __init__(self, network: Network, ends: tuple[End[object], End[object]]) -> None:
        self._network = network
        self._ends = ends
        self._held: list[tuple[End[object], object]] = []  # by a link that is cut
        self.broken = False
        network.streams.append(self)

    def send(self, sender: End[object], message: object) -> None:
        if self.broken or sender.closed:
            return
        receiver = self._other(sender)
        if (sender.member_id, receiver.member_id) in self._network.cut:
            self._held.append((sender, message))
            return
        world = self._network.world
        delay_s = self._network.delay_s((sender.member_id, receiver.member_id))
        receiver.last_s = max(receiver.last_s, world.now + delay_s)
        world.at(
            receiver.last_s - world.now,
            lambda: receiver.process.call(lambda: _deliver(receiver, message)),
        )

    def heal(self) -> None:
        """What a cut link held is sent again."""
        held, self._held = self._held, []
        for sender, message in held:
            self.send(sender, message)

    def close(self, end: End[object]) -> None:
        """One end ends it; the other hears of it, when nothing is between them."""
        end.closed = True
        self.break_off()

    def break_off(self) -> None:
        if self.broken:
            return
        self.broken = True
        self._network.streams.remove(self)
        world = self._network.world
        for end in self._ends:
            other = self._other(end)
            if not end.closed and (other.member_id, end.member_id) not in self._network.cut:
                world.at(world.between(0.001, NOTICE_S_MAX), lambda end=end: _end(end))  # type: ignore[misc]

    def break_if_of(self, member_id: int) -> None:
        """One of its ends has died."""
        if any(end.member_id == member_id for end in self._ends):
            self.break_off()

    def _other(self, end: End[object]) -> End[object]:
        first, second = self._ends
        return second if end is first else first


def _deliver(end: End[object], message: object) -> None:
    if not end.closed:
        end.taken(message)


def _end(end: End[object]) -> None:
    def noticed() -> None:
        if not end.closed:
            end.closed = True
            end.ended()

    end.process.call(noticed)
