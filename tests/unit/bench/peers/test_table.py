"""What is divided by what, and which limit it meets."""

from __future__ import annotations

import json

from bench.peers import table


def line(peer: str, way: str, run: str, number: int, rate: float) -> str:
    values = {"rate": rate, "cpu_us_client": 1.0, "cpu_us_broker": 2.0, "cpu_us_server": 2.0}
    named = {"what": "batch", "body_bytes": 128, "flush": "async", "way": way, "peer": peer}
    return json.dumps({"run": run, "round": number, "other_cores": 0.0, **named, **values})


LINES = [
    line("cometmq", "one future each", "morning", 1, 200),
    line("rocketmq", "batches of 1,024", "morning", 1, 100),
    line("rocketmq", "batches of 1,024", "morning", 2, 900),  # a round without ours
    line("rocketmq", "batches of 1,024", "evening", 1, 50),  # as slow a minute as that of ours
    line("cometmq", "one future each", "evening", 1, 40),
    json.dumps({"what": "skip", "peer": "nats", "flush": "async", "why": "apt-get install"}),
    json.dumps({"what": "versions", "run": "morning", "peer": "rocketmq", "java": "17"}),
]


def row(text: str, *cells: str) -> list[str]:
    """The cells of the row that begins with these."""
    rows = ([cell.strip() for cell in one.strip("|").split("|")] for one in text.splitlines())
    (found,) = (one for one in rows if one[: len(cells)] == list(cells))
    return found


def test_rounds_of_one_run_are_divided_by_each_other() -> None:
    text = table.markdown_of(LINES)
    quotient = row(text, "batch", "128 B", "async", "one future each", "rocketmq")
    assert quotient[-2:] == ["1.40 (0.80–2.00)", "2"]
    assert row(text, "batch", "128 B", "async", "batches of 1,024")[5] == "100 (50.00–900)"


def test_limits_are_met_by_the_median_or_are_not_shown() -> None:
    text = table.markdown_of(LINES)
    assert row(text, "one future each / RocketMQ's batches, 128 B")[1:] == [
        *("1.40", "0.80–2.00", "×", "≥ 0.9", "yes")
    ]
    assert "512 callers / NATS" not in text


def test_what_was_left_out_is_named() -> None:
    text = table.markdown_of(LINES)
    assert "skipped: nats async: apt-get install" in text
    assert "java 17" in text
