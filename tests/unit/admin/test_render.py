from __future__ import annotations

import dataclasses
import fcntl
import inspect
import io
import json
import os
import pty
import struct
import termios
from pathlib import Path
from typing import Any

import pytest

from cometmq.admin import forms, render, views
from cometmq.errors import TopicNotFound

MESSAGE = views.MessageView(
    message_id="g1/7",
    topic="T",
    queue_id=1,
    queue_offset=2,
    log_offset=7,
    tag="a",
    keys=["k"],
    properties={"p": "v"},
    flag=0,
    born_time_ms=0,
    born_host="",
    store_time_ms=1_700_000_000_123,
    store_host="",
    reconsume_times=0,
    unique_id="",
    compressed=False,
    body_bytes=5,
    body_text="[red]",
    body_base64="W3JlZF0=",
)
TOPIC = views.TopicView(
    "T", "g1", 4, 4, "rw", "async", "appended", 3_600_000, "fifo", True, "100/0"
)
VIEWS = [kind for _, kind in inspect.getmembers(views, dataclasses.is_dataclass)]
WITH_FORMS_OF_THEIR_OWN = {
    views.ClientDescriptionView,
    views.ClientStacksView,
    views.GroupProgressView,
    views.GroupReportView,
    views.ListenerResultView,
    views.LocalView,
    views.MessageView,
    views.PlaceView,
    views.RepairedView,
    views.StoreView,
    views.VerifiedView,
}


def test_every_view_has_its_columns() -> None:
    assert set(render._COLUMNS) == set(VIEWS) - WITH_FORMS_OF_THEIR_OWN


@pytest.mark.parametrize("view", [TOPIC, MESSAGE], ids=["topic", "message"])
def test_json_has_every_field(view: Any, capsys: pytest.CaptureFixture[str]) -> None:
    render.show(view, forms.JSON)
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(view)


def test_json_of_a_list_is_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([TOPIC, TOPIC], forms.JSON)
    assert json.loads(capsys.readouterr().out) == [dataclasses.asdict(TOPIC)] * 2
    render.show([], forms.JSON)
    assert json.loads(capsys.readouterr().out) == []


def test_a_message_of_a_stream_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    render.show_message(MESSAGE, forms.JSON)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_table_is_not_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    long = "N" * 127
    render.show([dataclasses.replace(TOPIC, topic=long)], forms.TABLE)
    out = capsys.readouterr().out
    assert long in out
    assert "async" in out


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([], forms.TABLE)
    assert capsys.readouterr().out == "(none)\n"


def test_contents_are_neither_markup_nor_control(capsys: pytest.CaptureFixture[str]) -> None:
    evil = dataclasses.replace(MESSAGE, tag="\x1b[2J", body_text="[red]\x07\nnext")
    render.show(evil, forms.TABLE)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert "[red]\\x07\nnext" in out


def test_markup_in_a_table_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([views.GroupView("[bold]x[/bold]", ["g1"])], forms.TABLE)
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_a_body_that_is_not_text_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    render.show(dataclasses.replace(MESSAGE, body_text=None), forms.TABLE)
    assert "5 bytes, not text" in capsys.readouterr().out


def test_progress_shows_members_queues_and_lag(capsys: pytest.CaptureFixture[str]) -> None:
    member = views.GroupMemberView("c1", {"T": [], "U": ["a", "b"]}, "clustering", "average", 3)
    queue = views.QueueProgressView("T", "g1", 0, 1, None, None, 0, 1500, None)
    render.show(views.GroupProgressView("G", [member], [queue], 1234), forms.TABLE)
    out = capsys.readouterr().out
    for text in ("T [*]", "U [a || b]", "1,500", "–", "lag 1,234"):
        assert text in out


def test_errors_go_to_stderr_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    render.show_error(TopicNotFound("no topic [x]"), forms.TABLE)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "TOPIC_NOT_FOUND (2000)" in captured.err
    assert "no topic [x]" in captured.err
    assert "cometmq topic create" in captured.err


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    render.show_error(TopicNotFound("no x"), forms.JSON)
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["code"], error["name"], error["message"]) == (2000, "TOPIC_NOT_FOUND", "no x")
    assert error["advice"]


def test_never_is_a_dash() -> None:
    assert render._time(0) == "–"
    assert render._time(None) == "–"
    assert render._time(1).endswith(".001")


def test_messages_of_a_list_are_shown_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([MESSAGE, MESSAGE], forms.TABLE)
    shown = capsys.readouterr().out
    render.show(MESSAGE, forms.TABLE)
    assert shown == capsys.readouterr().out * 2
    render.show([MESSAGE, MESSAGE], forms.JSON)
    assert json.loads(capsys.readouterr().out) == [dataclasses.asdict(MESSAGE)] * 2


HEALTHY = views.GroupStatusView(
    broker_group="g1",
    status="ok",
    writer=0,
    epoch=7,
    reason="failover",
    since_ms=1_700_000_000_123,
    in_sync=[0, 1],
    electable=[0, 1, 2],
    min_in_sync=2,
    members=[0, 1, 2],
    missing=[],
    silent=[],
    troubles=[],
    behind_bytes_max=1_500,
    clock_skew_ms_max=4,
    advice="",
)


def test_a_group_is_seen_at_a_glance(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([HEALTHY], forms.TABLE)
    table, _, observed = capsys.readouterr().out.partition("g1: ")
    for text in ("ok", "0 1 (min 2)", "0 1 2", "1,500"):
        assert text in table
    assert observed.startswith("member 0 leads since 2023-11-1")
    assert observed.endswith("(failover)\n")


def test_a_group_in_trouble_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    troubles = ["member 0 does not answer", "member 2 is not registered"]
    lost = dataclasses.replace(
        HEALTHY, status="no writer", writer=None, troubles=troubles, advice="mend it"
    )
    render.show([lost], forms.TABLE)
    observed = capsys.readouterr().out.splitlines()[-4:]
    assert observed == [
        "g1: no writer",
        "    member 0 does not answer",
        "    member 2 is not registered",
        "    mend it",
    ]


MEMBER = views.MemberView(
    cluster="c",
    broker_group="g1",
    member_id=7,
    role="follower",
    address="h:1",
    internal_address="h:2",
    epoch=3,
    topic_count=0,
    last_heard_ms=0,
    reachable=False,
)


def test_a_member_is_shown_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    render.show([MEMBER, dataclasses.replace(MEMBER, member_id=8)], forms.TABLE)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "g1" in line]
    assert [row[:2] for row in rows] == [["g1", "7"], ["g1", "8"]]


@pytest.mark.parametrize(
    ("error", "shown"), [(None, "does not answer"), ("UNAUTHENTICATED", "UNAUTHENTICATED")]
)
def test_why_a_member_tells_nothing_is_shown(
    error: str | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    render.show([dataclasses.replace(MEMBER, error=error)], forms.TABLE)
    assert f"follower ({shown})" in capsys.readouterr().out


def test_a_warning_is_json_where_errors_are(capsys: pytest.CaptureFixture[str]) -> None:
    render.show_warning("it is not", forms.JSON)
    render.show_warning("it is not", forms.TABLE)
    document, line = capsys.readouterr().err.splitlines()
    assert json.loads(document) == {"warning": "it is not"}
    assert line == "warning: it is not"


def test_groups_fit_into_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With names and numbers of a usual length."""
    monkeypatch.setattr(render, "_width", lambda stream: 80)
    usual = dataclasses.replace(HEALTHY, broker_group="broker-a", status="no writer", min_in_sync=1)
    render._print_table([usual])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "broker-a  no writer       0      7  0 1      0 1 2      0 1 2     1,500  +0.0 s"
    )


def test_members_of_broker_groups_fit_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a terminal, as through `kubectl exec`: 120 columns with long numbers. Why one
    refuses sends is a line of its own.
    """
    why = "96.0% of the store's room is used, 0.80 GiB are free: " + "words " * 40
    one = views.BrokerMemberView(
        broker_group="broker-a",
        member_id=10,
        role="follower",
        epoch=1_234,
        address="cometmq-broker-a-0.cometmq-broker-a.queues.svc.cluster.local:10911",
        reachable=True,
        error=None,
        log_min_offset=123_456_789_012,
        log_appended_offset=123_456_789_012,
        log_flushed_offset=123_456_789_012,
        behind_bytes=123_456_789_012,
        refusal=why,
        clock_skew_ms=-600_000,
    )
    render.show([one, dataclasses.replace(one, refusal="")], forms.TABLE)
    *table, last = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 120
    assert [line.split()[-3:] for line in table[2:]] == [
        ["-600.0", "s", "no"],
        ["-600.0", "s", "yes"],
    ]
    assert last == f"member 10 of broker-a has no room for sends: {why}"
    render.show([one], forms.WIDE)
    assert one.address in capsys.readouterr().out


# What a wide row holds, by the name of a field, else by its type.
WIDE_VALUES: dict[str, Any] = {
    "topic": "orders_of_the_northern_region",
    "group": "billing_of_the_northern_region",
    "client_id": "billing-7d9c5b6f4-x2x9k@1234567@a1b2c3",
    "waiting": {"billing_of_the_northern_region": 1_234_567, "audit": 7},
    "message_type": "transaction",
    "subscriptions": {"orders_of_the_northern_region": ["new", "changed"], "prices": []},
    "address": "cometmq-a-0.cometmq-a.default.svc.cluster.local:10911",
    "writer": "cometmq-a-0.cometmq-a.default.svc.cluster.local:10911",
    "followers": ["cometmq-a-1.cometmq-a.default.svc.cluster.local:10911", "127.0.0.1:10911"],
    "sha256": "0123456789abcdef" * 4,
    "path": "/data/store/commitlog/00000000001073741824",
    "what": "offset 7 of queue 0 points to log offset 1,073,741,824, where no record stands",
    "refusal": "the volume is 96% full, sends are refused above 95%",
    "error": None,
    "broker_group": "broker-a",
    "status": "no writer",
    "permission": "rw",
    "flush_mode": "async",
    "replication_mode": "appended",
    "reserve_time_ms": 259_200_000,
    "member_id": 10,
    "queue_id": 1023,
    "generation": 3,
    "epoch": 12,
    "pid": 4_194_304,
}
COUNTS_OF_FEW = ("read_queue_count", "write_queue_count", "topic_count", "min_in_sync")
WIDTHS = (80, 100, 160)
SNAPSHOTS = Path(__file__).with_name("tables.txt")
TABLES = sorted(render._COLUMNS, key=lambda kind: kind.__name__)


def wide_value(field: dataclasses.Field[Any], kind: type) -> Any:
    if field.name in WIDE_VALUES and not (field.name == "writer" and kind is views.GroupStatusView):
        return WIDE_VALUES[field.name]
    by_type = {"bool": True, "str": "follower", "list[int]": [0, 1, 2], "list[str]": ["broker-a"]}
    if field.name in COUNTS_OF_FEW:
        return 1024
    return by_type.get(str(field.type).removesuffix(" | None"), 12_345_678_901)


def shown_in(width: int | None, kind: type, form: str, shown: Any) -> str:
    row = kind(**{f.name: wide_value(f, kind) for f in dataclasses.fields(kind)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "_width", lambda stream: width)
        patch.setattr(render, "_time", lambda ms: "2026-12-31 23:59:59.123")
        render._print_table([row, row], wide=form == forms.WIDE)
    return str(shown.readouterr().out)


def test_tables_are_as_they_were_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """TEST_ACCEPT=1 writes them anew: look at every change, and take new views in."""
    parts = {
        f"=== {kind.__name__}, {form}, {width} columns": shown_in(width, kind, form, capsys)
        for kind in TABLES
        for form in (forms.TABLE, *((forms.WIDE,) if kind in render._WIDE_ONLY else ()))
        for width in WIDTHS
    }
    if os.environ.get("TEST_ACCEPT"):
        SNAPSHOTS.write_text("".join(f"{t}\n{p}\n" for t, p in parts.items()), encoding="utf-8")
    text = SNAPSHOTS.read_text(encoding="utf-8")
    titles = [line for line in text.splitlines() if line.startswith("=== ")]
    assert text == "".join(f"{title}\n{parts[title]}\n" for title in titles)


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_a_terminal_shows_what_a_pipe_gets(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    """Every word of every cell, whatever the width: none is broken, none is missing."""
    whole = shown_in(None, kind, forms.WIDE, capsys).splitlines()
    assert len(whole) == 4, "a pipe gets a line a row"
    for width in (1, 20, *WIDTHS, 4000):
        words = shown_in(width, kind, forms.WIDE, capsys).split()
        assert not set(whole[-1].split()) - set(words), width


@pytest.mark.parametrize(
    ("columns", "variable", "width"),
    [(100, None, 100), (0, None, None), (0, "120", 120), (80, "0", 80), (80, "nonsense", 80)],
)
def test_the_width_is_the_terminals(
    columns: int, variable: str | None, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if variable is not None:
        monkeypatch.setenv("COLUMNS", variable)
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with open(slave, "w", closefd=False) as stream:
            assert render._width(stream) == width
    finally:
        os.close(slave)
        os.close(master)


def test_without_a_terminal_there_is_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert render._width(io.StringIO()) is None
    with open(os.devnull, "w") as stream:
        assert render._width(stream) is None


@pytest.mark.parametrize("time_ms", [2**48, 2**60, 2**63 - 1, -(2**63)])
def test_times_that_no_calendar_has_are_numbers(
    time_ms: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged record has one."""
    render.show_message(dataclasses.replace(MESSAGE, store_time_ms=time_ms), forms.TABLE)
    assert str(time_ms) in capsys.readouterr().out
