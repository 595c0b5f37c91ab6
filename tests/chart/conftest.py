"""The chart with each file of values in turn."""

from __future__ import annotations

import pytest

from tests.support.kube.chart import VALUES_FILES, Rendered, rendered


@pytest.fixture(params=VALUES_FILES)
def chart(request: pytest.FixtureRequest) -> Rendered:
    """What ``tests/chart/values/<param>.yaml`` gives."""
    return rendered(request.param)
