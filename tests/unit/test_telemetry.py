"""Log lines that nobody can forge, metrics of one process."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client import Counter, generate_latest

from cometmq import native
from cometmq.clock import SystemClock
from cometmq.config import LogForm, LogLevel
from cometmq.telemetry import (
    OutageLogger,
    escape,
    fields,
    new_registry,
    setup_logging,
    version,
)

log = logging.getLogger("tests.telemetry")


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Puts the root logger back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def _setup(form: LogForm, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    setup_logging(level=level, form=form, stream=stream)
    return stream


@pytest.mark.usefixtures("root_logger")
def test_a_plain_event_is_one_line_with_its_fields() -> None:
    stream = _setup(LogForm.PLAIN)
    log.info("member registered", extra=fields(group="g1", note="two words", empty=""))

    line = stream.getvalue()
    assert line.endswith(
        'Z INFO    tests.telemetry member registered group=g1 note="two words" empty=""\n'
    )


def test_what_lasts_is_told_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger=log.name)
    trouble = OutageLogger(log, logging.WARNING, "it fails", "it works")
    trouble.recovered(of="a")
    for error in (OSError("x"), OSError("x"), OSError("y"), OSError("y")):
        trouble.failing(error, of="a")
    trouble.recovered(of="a")
    trouble.recovered(of="a")
    trouble.failing(OSError("y"), of="a")
    told = [
        (r.levelname, r.getMessage(), str(vars(r)["fields"].get("error"))) for r in caplog.records
    ]
    began = ("WARNING", "it fails", "y")
    assert told == [("WARNING", "it fails", "x"), began, ("INFO", "it works", "None"), began]


@pytest.mark.usefixtures("root_logger")
def test_a_json_event_is_one_object() -> None:
    stream = _setup(LogForm.JSON)
    log.warning("member registered", extra=fields(group="g1", number=3))

    event = json.loads(stream.getvalue())
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "WARNING",
        "logger": "tests.telemetry",
        "event": "member registered",
        "group": "g1",
        "number": 3,
    }


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("form", list(LogForm))
def test_no_name_can_forge_a_line(form: LogForm) -> None:
    stream = _setup(form)
    log.info("seen", extra=fields(topic="a\n2026 ERROR forged\r\x1b[31m\x85\u2028"))

    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("form", list(LogForm))
def test_a_traceback_stays_on_its_line(form: LogForm) -> None:
    stream = _setup(form)
    try:
        raise ValueError("inner text")
    except ValueError as error:
        log.error("failed", exc_info=error)

    assert len(stream.getvalue().splitlines()) == 1
    assert "ValueError: inner text" in stream.getvalue()


@pytest.mark.usefixtures("root_logger")
def test_events_below_the_level_are_left_out() -> None:
    stream = _setup(LogForm.PLAIN, LogLevel.WARNING)
    log.info("quiet")
    assert stream.getvalue() == ""


def test_escape_leaves_letters_alone() -> None:
    assert escape("тема ok\t") == "тема ok\\t"


def test_a_registry_tells_build_and_start() -> None:
    text = generate_latest(new_registry("namesrv", SystemClock())).decode()

    assert f'cometmq_build_info{{service="namesrv",version="{version()}"}} 1.0' in text
    assert "cometmq_start_time_seconds" in text
    assert f"cometmq_native {float(native.accelerator is not None)}" in text
    assert "process_cpu_seconds_total" in text


def test_no_series_tell_when_others_were_made() -> None:
    registry = new_registry("broker", SystemClock())
    Counter("cometmq_tests", "Tests.", registry=registry).inc()
    assert "_created" not in generate_latest(registry).decode()
