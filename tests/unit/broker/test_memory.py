from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from cometmq.client.options import ProducerOptions, PushConsumerOptions
from cometmq.messaging.groups import SESSION_MS_MAX
from services.broker.memory import BATCHES_IN_FLIGHT_MAX, request_memory

PAGE = Path(__file__).parents[3] / "docs/how-to/limits.md"


def table() -> list[tuple[str, int, str, int]]:
    """The rows of the page: option, its limit, what is remembered, its limit; "" and 0 for none."""
    rows = []
    section = PAGE.read_text().partition("## What is sent again")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| what"):
            _, option, most, memory, limit = (cell.strip() for cell in line[1:-1].split("|"))
            rows.append((option.strip("`"), int(most or 0), memory, int(limit)))
    return rows


def test_the_page_has_the_limits_of_both_sides() -> None:
    told = {field.name: value for field, value in request_memory(dedup_enable=True).ListFields()}
    asked = {
        o.name: o.metadata["limits"]
        for o in [*fields(ProducerOptions), *fields(PushConsumerOptions)]
    }
    named = {}
    for option, most, memory, limit in table():
        if option:
            assert asked[option][1] == most <= limit
        if found := re.match(r"`(\w+)`: ", memory):
            named[found[1]] = limit
        else:
            assert (option, limit) == ("session_ms", SESSION_MS_MAX)
    assert named == told


def test_a_producer_may_wait_for_no_more_batches_than_are_known() -> None:
    assert request_memory(dedup_enable=True).batches_max >= BATCHES_IN_FLIGHT_MAX
