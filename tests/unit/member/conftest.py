from __future__ import annotations

import pytest

from tests.support.stores.refusals import refusals_change_nothing  # noqa: F401


@pytest.fixture(autouse=True)
def compared(refusals_change_nothing: object) -> None:  # noqa: F811
    """Whatever start is refused in here."""
