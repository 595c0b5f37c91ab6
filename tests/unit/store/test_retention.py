from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.store.retention import (
    RESUME_MARGIN,
    LogFile,
    Look,
    MovePass,
    Reason,
    RetentionRules,
    Space,
    Verdict,
    decide,
    kept_back,
    quota,
    quota_room,
)

RULES = RetentionRules(reserved_ms=1_000, delete_hours=frozenset({4}), files_max=3)
FILE_BYTES = 10
ROOMY = Space(0, 1_000)


def full(percent: int) -> Space:
    return Space(percent * 10, 1_000 - percent * 10)


def files(*newest_ms: int) -> list[LogFile]:
    return [
        LogFile(i * FILE_BYTES, (i + 1) * FILE_BYTES, newest) for i, newest in enumerate(newest_ms)
    ]


def look(*newest_ms: int, space: Space = ROOMY, **fields: Any) -> Look:
    """At 10,000 ms, when nothing is due but by ``fields``: files up to 9,000 are expired."""
    base = Look(files(*newest_ms), now_ms=10_000, hour=12, spaces=[space], keep_from=10**9)
    return replace(base, **fields)


def removed(verdict: Verdict) -> list[tuple[int, Reason]]:
    return [(file.start // FILE_BYTES, reason) for file, reason in verdict.remove]


AGE, SPACE = Reason.AGE, Reason.SPACE


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, []),
        ({"hour": 4}, [(0, AGE), (1, AGE)]),
        ({"commanded": True}, [(0, AGE), (1, AGE)]),
        ({"space": full(75)}, []),
        ({"space": full(76)}, [(0, AGE), (1, AGE)]),
        ({"space": full(85)}, [(0, AGE), (1, AGE)]),
        ({"space": full(88)}, [(0, AGE), (1, AGE), (2, SPACE)]),
        ({"out_of_space": True}, [(0, SPACE)]),
        ({"hour": 4, "keep_from": 15}, [(0, AGE)]),
        ({"hour": 4, "keep_from": 20}, [(0, AGE), (1, AGE)]),
        ({"hour": 4, "pinned_from": 12}, [(0, AGE)]),
        ({"hour": 4, "pinned_from": 12, "pinned_s": 119.0}, [(0, AGE)]),
        ({"hour": 4, "pinned_from": 12, "pinned_s": 120.0}, [(0, AGE), (1, AGE)]),
        ({"space": full(86), "pinned_from": 0}, [(0, AGE), (1, AGE)]),
        ({"space": full(86), "keep_from": 5}, []),
    ],
)
def test_the_rules(fields: dict[str, Any], wanted: list[tuple[int, Reason]]) -> None:
    """The last age that is expired is exactly the reserved time ago."""
    assert removed(decide(RULES, look(8_999, 9_000, 9_001, 9_500, **fields))) == wanted


def test_as_many_of_the_oldest_go_as_it_takes_and_no_more() -> None:
    young = [9_500] * 8
    assert removed(decide(RULES, look(*young, space=full(87)))) == [(0, SPACE), (1, SPACE)]
    assert len(decide(RULES, look(*young, space=full(99))).remove) == RULES.files_max


@pytest.mark.parametrize(
    ("percent", "refusing", "wanted"),
    [(90, False, False), (91, False, True), (90, True, True), (89, True, False)],
)
def test_sends_are_refused_with_a_margin(percent: int, refusing: bool, wanted: bool) -> None:
    verdict = decide(RULES, look(9_500, space=full(percent), refusing=refusing, keep_from=0))
    assert verdict.refuse is wanted


def test_as_long_as_sends_are_refused_files_go() -> None:
    """Else a store whose two marks are one would stay just above the place where it resumes."""
    rules = replace(RULES, forcible_ratio=0.9)
    almost = look(9_500, 9_500, space=Space(895, 105))
    assert removed(decide(rules, almost)) == []
    assert removed(decide(rules, replace(almost, refusing=True))) == [(0, SPACE)]


def test_what_goes_now_counts_as_gone() -> None:
    """Else a small quota would refuse for a moment with every new file."""
    assert not decide(RULES, look(*[9_500] * 8, space=full(92))).refuse
    assert decide(RULES, look(*[9_500] * 8, space=full(94))).refuse


def test_the_fullest_space_counts() -> None:
    assert quota(870, 1_000) == full(87)
    assert quota(1_200, 1_000).ratio == 1
    crowded = look(*[9_500] * 8, spaces=[ROOMY, quota(870, 1_000)])
    assert removed(decide(RULES, crowded)) == [(0, SPACE), (1, SPACE)]
    assert Space(0, 0).ratio == 1, "a volume of no size has no room"


def test_who_waits_for_whom_is_told() -> None:
    waits = decide(RULES, look(8_000, hour=4, pinned_from=0))
    assert (waits.waits_for_readers, waits.waits_for_state) == (True, False)
    blocked = decide(RULES, look(8_000, hour=4, keep_from=0))
    assert (blocked.waits_for_readers, blocked.waits_for_state) == (False, True)
    soon = decide(RULES, look(9_500, space=full(76), keep_from=0))
    assert (soon.remove, soon.waits_for_state) == ([], True)
    idle = decide(RULES, look(8_000, pinned_from=0, keep_from=0))
    assert (idle.waits_for_readers, idle.waits_for_state) == (False, False)


def test_after_a_removal_the_next_look_is_soon() -> None:
    assert decide(RULES, look(8_000, hour=4)).next_look_s == 1.0
    assert decide(RULES, look(9_500, hour=4)).next_look_s == RULES.interval_s
    hasty = replace(RULES, interval_s=0.1)
    assert decide(hasty, look(8_000, hour=4)).next_look_s == 0.1


# --- against a model ------------------------------------------------------------------------------


def model(rules: RetentionRules, look: Look) -> tuple[list[tuple[LogFile, Reason]], bool]:
    """One file at a time: does a rule let the oldest go, and none keep it?"""
    gone: list[tuple[LogFile, Reason]] = []
    left = list(look.files)
    used = [space.used_bytes for space in look.spaces]
    sizes = [space.used_bytes + space.free_bytes for space in look.spaces]

    def fullest() -> float:
        return max(u / s if s else 1.0 for u, s in zip(used, sizes, strict=True))

    at_first = fullest()
    while left and len(gone) < rules.files_max:
        file = left[0]
        expired = look.now_ms - file.newest_ms >= rules.reserved_ms
        any_hour = look.hour in rules.delete_hours or look.commanded
        if expired and (any_hour or at_first > rules.max_used_ratio):
            reason = AGE
        elif fullest() > rules.forcible_ratio or (look.out_of_space and not gone):
            reason = SPACE
        else:
            break
        if file.end > look.keep_from:
            break
        in_use = look.pinned_from is not None and look.pinned_from < file.end
        urgent = look.out_of_space or at_first > rules.forcible_ratio
        if in_use and not urgent and look.pinned_s < rules.forced_after_s:
            break
        gone.append((left.pop(0), reason))
        used = [max(0, u - (file.end - file.start)) for u in used]
    mark = rules.full_ratio - (RESUME_MARGIN if look.refusing else 0)
    return gone, fullest() > mark


spaces = st.builds(Space, st.integers(0, 200), st.integers(0, 60))
looks = st.builds(
    Look,
    files=st.lists(st.integers(8_900, 9_100), max_size=8).map(lambda ages: files(*sorted(ages))),
    now_ms=st.just(10_000),
    hour=st.integers(3, 5),
    spaces=st.lists(spaces, min_size=1, max_size=2),
    keep_from=st.integers(0, 90),
    pinned_from=st.none() | st.integers(0, 90),
    pinned_s=st.sampled_from([0.0, 119.9, 120.0]),
    out_of_space=st.booleans(),
    commanded=st.booleans(),
    refusing=st.booleans(),
)


@given(looks)
def test_the_rules_are_the_models(look: Look) -> None:
    verdict = decide(RULES, look)
    gone, refuse = model(RULES, look)
    assert (list(verdict.remove), verdict.refuse) == (gone, refuse)


@given(looks)
def test_only_the_front_goes_and_nothing_that_must_stay(look: Look) -> None:
    gone = [file for file, _ in decide(RULES, look).remove]
    assert gone == list(look.files[: len(gone)])
    assert all(file.end <= look.keep_from for file in gone)


@given(looks)
def test_a_refusal_ends_when_there_is_room(look: Look) -> None:
    """Whatever has been: with room nothing is refused, so it never needs a hand."""
    freed = replace(look, spaces=[full(89)], refusing=True)
    assert not decide(RULES, freed).refuse


# --- messages that wait ---------------------------------------------------------------------------


def test_a_full_store_of_waiting_messages_does_not_write_for_ever() -> None:
    """All of each file waits. A pass goes once through the log, the next one waits for others."""
    passes, first, end = MovePass(), 0, 1_000
    while passes.may_go_on(first, end, 100):
        passes.moved(100)
        first, end = first + 100, end + 100
    assert (first, end) == (1_000, 2_000)
    assert not passes.may_go_on(first, end + 30, 100)
    assert passes.may_go_on(first, end + 33, 100)


@given(st.integers(1, 64), st.integers(0, 1_000), st.integers(0, 64))
def test_a_delivery_that_found_room_lets_a_pass_begin(
    files_count: int, state_bytes: int, waiting_files: int
) -> None:
    """Else a full store could neither deliver what waits nor remove a file."""
    file_bytes, log_bytes = 6_400, files_count * 6_400
    room = quota_room(state_bytes, waiting_files * file_bytes, log_bytes, file_bytes)
    passes = MovePass()
    assert passes.may_go_on(0, log_bytes, file_bytes)
    delivered = min(room.deliveries, waiting_files * file_bytes)
    if waiting_files:
        assert passes.may_go_on(log_bytes, log_bytes + delivered, file_bytes)
    assert room.behind_moves <= room.behind_deliveries <= room.behind_sends
    assert room.moves >= min(file_bytes, waiting_files * file_bytes)


def test_files_in_which_messages_wait_make_no_room() -> None:
    pressed = look(9_999, 9_999, 9_999, space=full(91))
    verdict = decide(RULES, pressed)
    count = len(verdict.remove)
    assert count > 0
    assert not verdict.refuse
    assert kept_back(RULES, pressed, verdict, count) == verdict
    kept = kept_back(RULES, pressed, verdict, 0)
    assert kept.refuse, "what is to go stays, so sends have to"
    assert kept.waits_for_messages
    assert not kept.remove
