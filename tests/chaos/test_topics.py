from __future__ import annotations

import pytest

from tests.chaos.topics import TOPICS

CERTAIN = {"landed", "certain", "fleeting"}
# What happened to the three members of a group, and the topics that keep everything.
WORST = [
    (False, 0, {"loose", "synced", "copied", *CERTAIN}),
    (False, 1, {"synced", "copied", *CERTAIN}),
    (True, 0, {"copied", *CERTAIN}),
    (True, 2, {"copied", *CERTAIN}),
    (False, 3, {"synced", *CERTAIN}),
    (True, 3, CERTAIN),
]


@pytest.mark.parametrize(("took_over", "power_cuts", "firm"), WORST)
def test_what_each_topic_keeps(took_over: bool, power_cuts: int, firm: set[str]) -> None:
    kept = {
        name
        for name, mode in TOPICS.items()
        if mode.keeps(took_over=took_over, power_cuts=power_cuts, members=3)
    }
    assert kept == firm
