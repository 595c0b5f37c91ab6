"""Whether a producer avoids a broker group because it answers late: RocketMQ's latency fault
tolerance. Pure; time is passed in.
"""

from __future__ import annotations

# RocketMQ's latencyMax and notAvailableDuration: an answer that took so long, and for how long the
# group is avoided then.
AVOID_S = ((15.0, 600.0), (5.0, 180.0), (3.0, 120.0), (1.8, 60.0), (0.55, 30.0))


PROBE_S = 5.0  # an avoided group gets one batch so often


def avoid_s(took_s: float) -> float:
    """For how long a group is avoided that took so long to answer; 0 = not at all."""
    return next((rest_s for least_s, rest_s in AVOID_S if took_s >= least_s), 0.0)


class LatencyFault:
    """The newest answer of a group decides: a quick one ends the time at once, and without any
    answer it ends by itself. Meanwhile a batch now and then is the probe.
    """

    def __init__(self) -> None:
        self._until_s = 0.0
        self._probe_s = 0.0  # when the next probe may go

    def answered(self, took_s: float, now_s: float) -> None:
        self._until_s = now_s + avoid_s(took_s)
        self._probe_s = now_s + PROBE_S

    def is_avoided(self, waits_s: float, now_s: float) -> bool:
        """``waits_s``: how long the oldest batch waits for its answer by now; 0 = none does. False:
        the caller sends there.
        """
        if avoid_s(waits_s) > 0.0:
            return True
        if now_s >= self._until_s:
            return False
        if waits_s or now_s < self._probe_s:
            return True
        self._probe_s = now_s + PROBE_S
        return False
