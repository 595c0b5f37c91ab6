from __future__ import annotations

import pytest

from scripts.releases import Program, ReleaseMissing, earlier


@pytest.fixture(scope="session")
def release_before() -> Program:
    return _earlier("before")


@pytest.fixture(scope="session")
def release_of_protocol_2() -> Program:
    return _earlier("protocol-2")


def _earlier(name: str) -> Program:
    try:
        return earlier(name)
    except ReleaseMissing as error:
        pytest.skip(str(error))
