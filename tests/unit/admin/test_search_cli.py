from __future__ import annotations

from datetime import UTC, datetime

import click
import pytest
from click.testing import CliRunner

from cometmq.admin.cli import cli
from cometmq.admin.search_cli import Time

NEW_YEAR_MS = 1_767_225_600_000


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        (str(NEW_YEAR_MS), NEW_YEAR_MS),
        ("2026-01-01T00:00:00Z", NEW_YEAR_MS),
        ("2026-01-01 01:00:00.250+01:00", NEW_YEAR_MS + 250),
    ],
)
def test_times(text: str, time_ms: int) -> None:
    assert Time().convert(text, None, None) == time_ms


def test_a_time_without_a_zone_is_local() -> None:
    local = datetime.fromtimestamp(NEW_YEAR_MS / 1000, tz=UTC).astimezone()
    assert Time().convert(local.replace(tzinfo=None).isoformat(), None, None) == NEW_YEAR_MS


@pytest.mark.parametrize("text", ["", "soon", "-5", "2026-13-01", "1969-12-30", "9" * 20])
def test_no_times(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Time().convert(text, None, None)


@pytest.mark.parametrize("arguments", [[], ["--key", "k", "--unique-id", "u"]])
def test_one_thing_is_looked_for(arguments: list[str]) -> None:
    command = ["message", "query", "--topic", "T", "--namesrv", "127.0.0.1:1", *arguments]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert "--key or --unique-id" in result.output


def test_a_range_that_ends_before_it_begins_is_told_as_it_could_be_given() -> None:
    command = ["message", "query", "--topic", "T", "--key", "k", "--namesrv", "127.0.0.1:1"]
    times = ["--begin", "2026-01-02T00:00:00", "--end", "2026-01-01T00:00:00.5"]
    result = CliRunner().invoke(cli, [*command, *times])
    assert result.exit_code == 2
    complaint = "--begin 2026-01-02T00:00:00.000 is later than --end 2026-01-01T00:00:00.500"
    assert complaint in result.output
    delayed = CliRunner().invoke(cli, ["message", "delayed", *command[-2:], *times])
    assert complaint in delayed.output
