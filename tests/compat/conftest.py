from __future__ import annotations

import pytest

from scripts.maven import JavaMissing
from tests.compat.listing import rocketmq
from tests.compat.rocketmq import VERSIONS, RocketMq


@pytest.fixture(scope="session", params=VERSIONS)
def mq(request: pytest.FixtureRequest) -> RocketMq:
    """Each version of RocketMQ."""
    try:
        return rocketmq(request.param)
    except JavaMissing as error:
        pytest.skip(str(error))
