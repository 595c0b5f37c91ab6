"""A group whose members say what is so, over a network that repeats and delays what they said, and
a stranger who says anything at all. The table is played against what must hold whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.errors import InvalidRequest, StaleEpoch
from cometmq.model import EPOCH_LEAP_MAX, EPOCH_MAX, TopicConfig
from services.namesrv.routes import DataVersion, Member, Role, RouteTable

NUMBERS = st.integers(0, 2)
ROLES = st.sampled_from(Role)


def address(number: int) -> str:
    return f"10.0.0.{number}:1"


@dataclass(frozen=True)
class Life:
    """One incarnation of the group's writer."""

    number: int
    epoch: int

    @property
    def store_id(self) -> str:
        return f"store-{self.number}"

    @property
    def member(self) -> Member:
        return Member("c", "g", self.number, Role.WRITER, address(self.number), "", self.epoch)


class Forgers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable()
        self.now_s = 0.0
        self.life = Life(0, 1)
        self.said: list[Callable[[], object]] = []  # all that members ever said, for who repeats it
        self.registered = False  # the live writer, and nobody had the power to take it out since
        self.say_it_again()

    def _register(self, member: Member, store_id: str) -> None:
        self.table.register(
            member,
            DataVersion(member.epoch, 0),
            [TopicConfig("t")],
            topic_count=1,
            now_s=self.now_s,
            now_ms=0,
            store_id=store_id,
        )

    @rule()
    def say_it_again(self) -> None:
        """What a writer does that finds itself missing."""
        life = self.life
        self.said.append(lambda: self._register(life.member, life.store_id))
        try:
            self.said[-1]()
        except (StaleEpoch, InvalidRequest):
            assert not self.registered
            return
        self.registered = True

    @rule(number=NUMBERS, silently=st.booleans())
    def take_over(self, number: int, silently: bool) -> None:
        """The next life of the role, here or elsewhere; the old one may announces its stop
        first.
        """
        old, self.life = self.life, Life(number, self.life.epoch + 1)
        self.said.append(
            lambda: self.table.unregister("c", "g", old.number, old.epoch, old.store_id)
        )
        self.registered = False
        if not silently:
            with suppress(StaleEpoch):
                self.said[-1]()
        self.say_it_again()

    @rule(data=st.data())
    def come_late(self, data: st.DataObject) -> None:
        """Something that was said before arrives again."""
        again = data.draw(st.sampled_from(self.said))
        with suppress(StaleEpoch, InvalidRequest):
            again()

    @rule(number=NUMBERS, at=NUMBERS, role=ROLES, back=st.integers(0, 2), store=st.booleans())
    def forge(self, number: int, at: int, role: Role, back: int, store: bool) -> None:
        """Of no newer epoch than the group's."""
        epoch = max(1, self.life.epoch - back)
        member = Member("c", "g", number, role, address(at), "6.6.6.6:2", epoch)
        with suppress(StaleEpoch):
            self._register(member, "another" if store else "")

    @rule(number=NUMBERS, ahead=st.integers(0, EPOCH_LEAP_MAX), store=st.booleans())
    def forge_unregistration(self, number: int, ahead: int, store: bool) -> None:
        if (known := self.table.member("c", "g", number)) is None:
            return
        if known == self.life.member and self.registered:
            with suppress(StaleEpoch):
                self.table.unregister(
                    "c", "g", number, known.epoch + ahead, "another" if store else ""
                )

    @rule(ahead=st.integers(EPOCH_LEAP_MAX + 1, EPOCH_MAX * 4))
    def forge_what_is_absurd(self, ahead: int) -> None:
        if self.registered:
            member = Member("c", "g", 2, Role.WRITER, "6.6.6.6:1", "", self.life.epoch + ahead)
            with suppress(InvalidRequest):
                self._register(member, "another")

    @invariant()
    def the_table_keeps_its_invariants(self) -> None:
        self.table.validate()

    @invariant()
    def the_live_writer_is_in_its_place(self) -> None:
        if self.registered:
            assert self.table.member("c", "g", self.life.number) == self.life.member
            (route,) = self.table.route("t")
            assert [m for m in route.members if m.role is Role.WRITER] == [self.life.member]


TestForgers = Forgers.TestCase
