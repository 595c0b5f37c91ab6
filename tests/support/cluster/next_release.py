"""A release after this one, as far as state goes: it has one kind of change more, and writes it
with each topic whose name begins with ``noted``. All members of the process are of it while the
block lasts; a follower may still say that it knows no more than this release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cometmq.messaging import changes
from cometmq.messaging.state import BrokerState
from cometmq.model import TopicConfig
from services.broker.replication import servicer
from services.haslave import following

KIND = "note"
_Kind = changes._Kind


@dataclass(frozen=True, slots=True)
class Noted:
    """The change of the kind."""

    text: str


NOTE: Any = Noted("x")


@contextmanager
def next_release() -> Iterator[None]:
    """State records with the kind ``note`` are read and written, without effect on the tables."""
    kind = _Kind(KIND, frozenset("t"), lambda c: {"t": c.text}, lambda f: NOTE)
    names = changes.KINDS | {KIND}
    apply: Callable[[BrokerState, Any], None] = BrokerState.apply

    def apply_known(state: BrokerState, change: Any) -> None:
        if not isinstance(change, Noted):
            apply(state, change)

    extras: Callable[[BrokerState, TopicConfig], list[Any]] = BrokerState.plan_extras

    def plan_extras(state: BrokerState, config: TopicConfig) -> list[Any]:
        return [*extras(state, config), *([NOTE] if config.name.startswith("noted") else [])]

    with (
        mock.patch.dict(changes._KINDS, {Noted: kind}),
        mock.patch.dict(changes._BY_NAME, {KIND: kind}),
        mock.patch.object(changes, "KINDS", names),
        mock.patch.object(servicer, "KINDS", names),
        mock.patch.object(following, "KINDS", names),
        mock.patch.object(BrokerState, "apply", apply_known),
        mock.patch.object(BrokerState, "plan_extras", plan_extras),
    ):
        yield


@contextmanager
def followers_of_before() -> Iterator[None]:
    """Followers that start within the block do not say that they read the kind."""
    with mock.patch.object(following, "KINDS", changes.KINDS - {KIND}):
        yield
