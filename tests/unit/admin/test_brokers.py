"""Members of broker groups; tests/integration/test_admin_brokers.py asks live ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from cometmq.admin import brokers
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.admin.views import LogChecksumView
from cometmq.errors import RouteNotFound

from .conftest import FakeCluster

ONE = LogChecksumView("g1", 0, "writer", 0, 100, "ab", equal=True)
TWO = replace(ONE, member_id=1, role="follower")


def test_logs_that_are_alike_leave_no_doubt() -> None:
    assert brokers.doubt([ONE, TWO]) == ""


@pytest.mark.parametrize(
    ("compared", "doubt"),
    [
        ([ONE], "g1: only member 0 is registered"),
        ([ONE, TWO, replace(ONE, broker_group="g2", member_id=4)], "g2: only member 4"),
        (
            [replace(ONE, equal=False), replace(TWO, equal=False, sha256="cd")],
            "g1: the logs differ",
        ),
        ([replace(ONE, from_offset=100), replace(TWO, from_offset=100)], "nothing in common"),
        ([replace(ONE, missing=[2]), replace(TWO, missing=[2])], "g1: member 2 not registered"),
    ],
)
def test_what_was_not_compared_is_not_taken_for_equal(
    compared: list[LogChecksumView], doubt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object) -> list[LogChecksumView]:
        return compared

    monkeypatch.setattr(brokers, "compare_logs", found)
    arguments = ("broker", "checksum", "--namesrv", "127.0.0.1:1")
    for form in ("table", "json"):
        result = CliRunner().invoke(cli, (*arguments, "--output", form))
        assert result.exit_code == 3
        assert doubt in result.stderr
        assert "ab" in result.stdout, "what was found is shown all the same"


async def test_a_name_server_that_knows_nobody_yet_has_not_compared(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.namesrv.brokers.clear()
    with pytest.raises(RouteNotFound):
        await brokers.compare_logs(connection)
    with pytest.raises(RouteNotFound):
        await brokers.clean(connection)
