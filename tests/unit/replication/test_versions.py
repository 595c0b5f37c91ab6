from __future__ import annotations

from dataclasses import replace

import pytest

from cometmq.errors import InvalidRequest, VersionUnsupported
from cometmq.replication.versions import (
    CLOCK_COMPARISON,
    FEATURES_OF_3,
    NAMES_MAX,
    Agreed,
    Release,
    agree,
    agreed_by,
    introduced,
    own_release,
)

KINDS_OF_3 = frozenset({"topic", "group"})
BEFORE = introduced(3, 0, 1, [], [], KINDS_OF_3)
OURS = own_release(KINDS_OF_3 | {"kinds"})
NEXT = Release(4, 5, 1, frozenset({CLOCK_COMPARISON, "next"}), OURS.state_kinds | {"next"})
LATER = Release(5, 6, 1, frozenset(), frozenset())


def both_ways(one: Release, other: Release) -> Agreed:
    """What the two agree on, whoever writes; the follower hears what its writer has decided."""
    agreed = agree(one, other)
    assert agree(other, one) == agreed
    for follower, writer in (one, other), (other, one):
        if follower is not BEFORE:  # it knows one version, and names nothing
            heard = agreed_by(agreed.protocol, writer.format_version, writer.features, follower)
            assert heard == agreed
    return agreed


def test_the_newest_version_counts_that_both_speak_and_the_features_that_both_know() -> None:
    assert both_ways(OURS, OURS) == Agreed(4, frozenset({CLOCK_COMPARISON}))
    assert both_ways(BEFORE, OURS) == Agreed(3, frozenset({CLOCK_COMPARISON}))
    assert both_ways(OURS, NEXT) == Agreed(4, frozenset({CLOCK_COMPARISON}))
    assert both_ways(NEXT, NEXT) == Agreed(5, NEXT.features)
    assert agree(OURS, replace(OURS, features=frozenset())).features == frozenset()


@pytest.mark.parametrize(
    ("follower", "writer", "says"),
    [
        (BEFORE, NEXT, "the follower speaks replication protocol 3, the writer protocols 4 to 5"),
        (NEXT, BEFORE, "the follower speaks replication protocols 4 to 5, the writer protocol 3"),
        (LATER, OURS, "the follower speaks replication protocols 5 to 6, the writer protocols 3 "),
    ],
)
def test_without_a_common_version_the_refusal_says_who_speaks_what(
    follower: Release, writer: Release, says: str
) -> None:
    with pytest.raises(VersionUnsupported, match=says):
        agree(follower, writer)


def test_a_follower_refuses_an_answer_that_it_does_not_speak() -> None:
    for protocol in (2, 5):
        with pytest.raises(VersionUnsupported, match=f"{protocol}, this follower protocols 3 to 4"):
            agreed_by(protocol, 1, [], OURS)


def test_a_follower_reads_the_log_formats_of_all_releases_before() -> None:
    newer = replace(OURS, format_version=2)
    assert agree(newer, OURS) == agree(OURS, OURS)
    assert agreed_by(4, 1, [], newer) == Agreed(4, frozenset())
    with pytest.raises(
        VersionUnsupported, match="has format 2, the follower reads formats up to 1"
    ):
        agree(OURS, newer)
    with pytest.raises(VersionUnsupported, match="has format 2, this follower reads formats up to"):
        agreed_by(4, 2, [], OURS)


def test_who_says_nothing_is_of_the_release_before() -> None:
    assert Release(3, 3, 1, FEATURES_OF_3, KINDS_OF_3) == BEFORE
    assert agreed_by(3, 1, [], OURS) == Agreed(3, FEATURES_OF_3)


@pytest.mark.parametrize(
    ("protocol_max", "features", "kinds"),
    [
        (2, [], []),
        (-1, [], []),
        (4, ["f"] * (NAMES_MAX + 1), []),
        (4, [], ["k"] * (NAMES_MAX + 1)),
        (4, ["f" * 65], []),
        (4, [], ["k" * 65]),
    ],
)
def test_what_no_release_says_is_refused(
    protocol_max: int, features: list[str], kinds: list[str]
) -> None:
    with pytest.raises(InvalidRequest):
        introduced(3, protocol_max, 1, features, kinds, KINDS_OF_3)
