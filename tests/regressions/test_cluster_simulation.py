"""Seeds of the cluster simulation that once found a bug."""

from __future__ import annotations

import pytest

from tests.sim.run import play


@pytest.mark.parametrize("seed", [67, 69, 225, 302, 674, 714, 825, 1114, 1893, 8334, 29, 79])
def test_a_seed_that_found_a_bug_finds_none_any_more(seed: int) -> None:
    assert play(seed)["acknowledged"]
