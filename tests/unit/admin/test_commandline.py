from __future__ import annotations

import click
import pytest

from cometmq.admin.commandline import parse_places


def test_places_are_a_broker_group_and_an_offset() -> None:
    assert parse_places(["g1/0", f"a/b/{2**63 - 1}"]) == [("g1", 0), ("a/b", 2**63 - 1)]
    for text in ("g1", "/1", "g1/", "g1/-1", "g1/x", f"g1/{2**63}"):
        with pytest.raises(click.UsageError):
            parse_places([text])
