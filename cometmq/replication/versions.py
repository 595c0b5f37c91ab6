"""Which releases replicate with each other: the protocol versions, the features and the kinds of
state records that each side of a stream knows. Pure.

The follower speaks first, and its first version is the lowest that it speaks: a writer of before
version 4 takes that for the only one. The writer answers with the version of the stream.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cometmq.errors import InvalidRequest, StateTooNew, VersionUnsupported

PROTOCOL_MIN = 3
PROTOCOL_MAX = 4
NAMES_FROM = 4  # the version from which on a side names its features and kinds
FORMAT_VERSION = 1  # of the log

# The other side's clock is compared with this machine's.
CLOCK_COMPARISON = "clock-comparison"
FEATURES = frozenset({CLOCK_COMPARISON})
FEATURES_OF_3 = frozenset({CLOCK_COMPARISON})

NAMES_MAX = 1_000  # of features, and of kinds
NAME_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class Release:
    """What one side of a stream speaks. ``format_version``: the newest of the log that it reads;
    all older ones it reads too.
    """

    protocol_min: int
    protocol_max: int
    format_version: int
    features: frozenset[str]
    state_kinds: frozenset[str]

    @property
    def protocols(self) -> str:
        """The protocol versions, for people."""
        low, high = self.protocol_min, self.protocol_max
        return f"protocol {low}" if low == high else f"protocols {low} to {high}"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both sides of a stream go by."""

    protocol: int
    features: frozenset[str]


def own_release(state_kinds: frozenset[str]) -> Release:
    """What this program speaks."""
    return Release(PROTOCOL_MIN, PROTOCOL_MAX, FORMAT_VERSION, FEATURES, state_kinds)


def introduced(
    protocol_min: int,
    protocol_max: int,
    format_version: int,
    features: Collection[str],
    state_kinds: Collection[str],
    kinds_of_3: frozenset[str],
) -> Release:
    """What a follower says of itself. ``protocol_max`` 0: it is of a release that spoke one version
    and named nothing; it knows ``kinds_of_3``. InvalidRequest: no release is like that.
    """
    if protocol_max == 0:
        return Release(protocol_min, protocol_min, format_version, FEATURES_OF_3, kinds_of_3)
    if protocol_max < protocol_min:
        raise InvalidRequest("protocol_version_max: must not be below protocol_version")
    for field, names in ("features", features), ("state_kinds", state_kinds):
        if len(names) > NAMES_MAX or any(len(name) > NAME_CHARS_MAX for name in names):
            raise InvalidRequest(
                f"{field}: at most {NAMES_MAX} names of {NAME_CHARS_MAX} characters"
            )
    return Release(
        protocol_min, protocol_max, format_version, frozenset(features), frozenset(state_kinds)
    )


def agree(follower: Release, writer: Release) -> Agreed:
    """The newest version that both speak, and the features that both know. VersionUnsupported."""
    protocol = min(follower.protocol_max, writer.protocol_max)
    if protocol < max(follower.protocol_min, writer.protocol_min):
        raise VersionUnsupported(
            f"the follower speaks replication {follower.protocols}, the writer {writer.protocols}"
        )
    if not 0 < writer.format_version <= follower.format_version:
        raise VersionUnsupported(
            f"the writer's log has format {writer.format_version}, the follower reads formats up "
            f"to {follower.format_version}"
        )
    return Agreed(protocol, follower.features & writer.features)


def agreed_by(
    protocol: int, format_version: int, features: Collection[str], own: Release
) -> Agreed:
    """What the writer has answered to this follower. VersionUnsupported: the follower does not
    speak that.
    """
    if not own.protocol_min <= protocol <= own.protocol_max:
        raise VersionUnsupported(
            f"the writer speaks replication protocol {protocol}, this follower {own.protocols}"
        )
    if not 0 < format_version <= own.format_version:
        raise VersionUnsupported(
            f"the writer's log has format {format_version}, this follower reads formats up to "
            f"{own.format_version}"
        )
    named = frozenset(features) if protocol >= NAMES_FROM else FEATURES_OF_3
    return Agreed(protocol, own.features & named)


def check_state_kinds(follower: Release, used: frozenset[str]) -> None:
    """StateTooNew: the log has state records of kinds that the follower does not know. ``used``:
    of the kinds that only some releases know those that the log may have.
    """
    if unknown := used - follower.state_kinds:
        raise StateTooNew(
            f"the state of this broker group has changes of kinds that the follower's release does "
            f"not know: {', '.join(sorted(unknown))}"
        )
