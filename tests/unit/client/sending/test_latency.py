from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.sending.latency import PROBE_S, LatencyFault, avoid_s

TIMES_S = st.floats(0, 1000)


@pytest.mark.parametrize(
    ("took_s", "rest_s"), [(0.549, 0), (0.55, 30), (1.8, 60), (3, 120), (5, 180), (15, 600)]
)
def test_rocketmqs_steps(took_s: float, rest_s: float) -> None:
    assert avoid_s(took_s) == rest_s


@given(st.lists(st.tuples(TIMES_S, TIMES_S), min_size=1), TIMES_S)
def test_the_newest_answer_decides_and_no_time_is_endless(
    answers: list[tuple[float, float]], later_s: float
) -> None:
    fault, now_s = LatencyFault(), 0.0
    for took_s, pause_s in answers:
        now_s += pause_s
        fault.answered(took_s, now_s)
    # A batch is on its way, so that none is sent as a probe.
    assert fault.is_avoided(0.1, now_s + later_s) == (now_s + later_s < now_s + avoid_s(took_s))
    assert not fault.is_avoided(0.0, now_s + 600.0)
    assert fault.is_avoided(0.55, now_s + 600.0), "what is not answered yet counts too"


def test_an_avoided_group_gets_a_batch_now_and_then_and_comes_back_by_a_quick_answer() -> None:
    fault = LatencyFault()
    fault.answered(20.0, 0.0)
    sent = [n / 10 for n in range(1, 201) if not fault.is_avoided(0.0, n / 10)]
    assert sent == [PROBE_S, 2 * PROBE_S, 3 * PROBE_S, 4 * PROBE_S]
    assert fault.is_avoided(0.2, 5 * PROBE_S), "the probe is on its way"
    fault.answered(0.2, 5 * PROBE_S)
    assert not fault.is_avoided(0.0, 5 * PROBE_S)
    assert not fault.is_avoided(0.0, 5 * PROBE_S), "not one batch: all of them"
