from __future__ import annotations

from cometmq.member.read.throttle import BEHIND_BYTES_MIN, CatchUpThrottle

MIB = 1024 * 1024
FAR = 1024 * MIB  # end of a log whose start is read


def reading(pace: CatchUpThrottle, incoming_bytes_per_s: float, *, seconds: float = 20.0) -> float:
    """Bytes a second that a reader gets who asks for the next piece as soon as it has one."""
    now_s, got = 100.0, 0
    while now_s < 100.0 + seconds:
        end = FAR + int((now_s - 100.0) * incoming_bytes_per_s)
        now_s += 0.001 + pace.delay_s(0, MIB // 4, end, now_s)
        got += MIB // 4
    return got / seconds


def test_nobody_is_slowed_while_nobody_sends() -> None:
    for of_commits in (0, 100_000):
        assert reading(CatchUpThrottle(10 * MIB), of_commits) > 200 * MIB


def test_while_producers_send_all_readers_share_the_rate() -> None:
    rate = reading(CatchUpThrottle(10 * MIB), 2 * MIB)
    assert 9.5 * MIB < rate < 20 * MIB  # the first half second is not measured yet


def test_a_reader_arrives_whatever_comes_in() -> None:
    rate = reading(CatchUpThrottle(10 * MIB), 30 * MIB)
    assert 57 * MIB < rate < 75 * MIB


def test_who_reads_near_the_end_never_waits() -> None:
    pace = CatchUpThrottle(1)
    for turn in range(100):
        now_s, end = 1.0 + turn, FAR + turn * MIB
        assert pace.delay_s(end - BEHIND_BYTES_MIN + 1, MIB, end, now_s) == 0.0


def test_0_turns_it_off() -> None:
    assert reading(CatchUpThrottle(0), 30 * MIB) > 200 * MIB
