"""Views → text for a person or a program: results on standard output, errors on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, TextIO

from rich.console import Console

from cometmq.admin import tables, views
from cometmq.admin.forms import JSON, TABLE, WIDE
from cometmq.errors import CometError

Column = tuple[str, Callable[[Any], object]]


def show(result: Any, form: str) -> None:
    """Print a view or a list of views, as one JSON document or as tables."""
    if form == JSON:
        print(to_json(result, indent=2))
        return
    forms: dict[type, Callable[[Any], None]] = {
        views.LocalView: _show_local,
        views.GroupProgressView: _show_progress,
        views.ListenerResultView: _show_listener_result,
        views.GroupReportView: _show_report,
        views.StoreView: _show_store,
        views.PlaceView: _show_place,
        views.VerifiedView: _show_verified,
        views.RepairedView: _show_repaired,
    }
    many: dict[type, Callable[[Any], None]] = {
        views.MessageView: _show_messages,
        views.GroupMemberView: partial(_show_members, wide=form == WIDE),
        views.GroupStatusView: _show_groups,
        views.BrokerMemberView: partial(_show_broker_members, wide=form == WIDE),
        views.ClientDescriptionView: partial(_show_each, partial(_show_client, wide=form == WIDE)),
        views.ClientStacksView: partial(_show_each, _show_stacks),
    }
    match result:
        case views.MessageView():
            show_message(result, form)
        case [first, *_] if type(first) in many:
            many[type(first)](result)
        case list():
            _print_table(result, wide=form == WIDE)
        case _ if type(result) in forms:
            forms[type(result)](result)
        case _:
            _print_table([result])


def _show_messages(messages: Sequence[views.MessageView]) -> None:
    for message in messages:
        show_message(message, TABLE)


def show_message(message: views.MessageView, form: str) -> None:
    """Print one message of a stream of them; as JSON it is one line."""
    if form == JSON:
        print(to_json(message), flush=True)
        return
    where = f"queue {message.queue_id} offset {message.queue_offset}"
    facts = [message.message_id, where, _time(message.store_time_ms)]
    facts += [f"tag={message.tag}"] if message.tag else []
    facts += [f"keys={','.join(message.keys)}"] if message.keys else []
    facts += [f"{name}={value}" for name, value in message.properties.items()]
    body = message.body_text
    if message.withheld:
        body = "(withheld: the message waits, and no client may read it)"
    elif body is None:
        kind = "compressed" if message.compressed else "not text"
        body = f"({message.body_bytes} bytes, {kind}; --output json shows them)"
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print("  ".join(map(_printable, facts)), style="dim")
    console.print(_printable(body))


def to_json(result: object, *, indent: int | None = None) -> str:
    """A view as an object, a list of views as an array; keys are the views' field names."""
    one: Any = result
    plain = [asdict(row) for row in result] if isinstance(result, list) else asdict(one)
    return json.dumps(plain, indent=indent, ensure_ascii=False)


def show_error(error: CometError, form: str) -> None:
    """Print an error of the catalogue: what happened, and what to do next."""
    if form == JSON:
        print(json.dumps({"error": error_fields(error)}, ensure_ascii=False), file=sys.stderr)
        return
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    console.print(f"error: {error.name()} ({error.code})", style="bold red")
    console.print(_printable(error.message))
    if error.advice:
        console.print(error.advice, style="cyan")


def show_warning(text: str, form: str) -> None:
    """Print to standard error why a result may be incomplete or wrong."""
    line = json.dumps({"warning": text}, ensure_ascii=False) if form == JSON else f"warning: {text}"
    print(_printable(line), file=sys.stderr)


def error_fields(error: CometError) -> dict[str, object]:
    """What ``{"error": …}`` holds."""
    return {
        "code": error.code,
        "name": error.name(),
        "message": error.message,
        "advice": error.advice,
    }


# --- tables -------------------------------------------------------------------------------------


def _show_local(view: views.LocalView) -> None:
    if not view.processes:
        print(f"Nothing is up in {view.directory}. Start a cluster with: cometmq local up")
        return
    _print_table(view.processes)
    here = os.path.relpath(view.directory)
    folder = view.directory if here.startswith("..") else here  # the shorter one
    print(f"\nLogs: {folder}/PROCESS/log.txt")
    print("Commands of this folder find it by themselves. For programs, and elsewhere:\n")
    for line in export_lines(view):
        print(f"    {line}")
    print()


def export_lines(view: views.LocalView) -> list[str]:
    """Shell commands that set the variables by which clients and commands find the cluster."""
    observed = {
        "COMETMQ_NAMESRV": view.namesrv,
        "COMETMQ_INTERNAL_SECRET_FILE": view.internal_secret_file,
    }
    return [f"export {name}='{value}'" for name, value in observed.items() if value]


def _show_members(members: list[views.GroupMemberView], *, wide: bool = False) -> None:
    _print_table(members, empty="There is no member.", wide=wide)
    if away := [one for one in members if one.is_away]:
        left_s = max(one.session_left_ms for one in away) / 1000
        print(
            f"{len(away)} away: nobody reads their share of the queues until their sessions end, "
            f"in {left_s:,.0f} s at most. cometmq group members NAME --remove CLIENT_ID, or "
            "--remove-away, gives it to the others."
        )


def _show_progress(view: views.GroupProgressView) -> None:
    _show_members(view.members)
    _print_table(view.queues, empty="Nothing was committed, and no member subscribes.")
    print(f"lag {view.lag_count:,}")


def _show_report(view: views.GroupReportView) -> None:
    _show_members(view.members)
    print()
    _print_table(view.topics, empty="Nothing was committed, and no member subscribes.")
    print()
    _print_table(view.settings)
    print(f"lag {view.lag_count:,}")


def _show_groups(groups: Sequence[views.GroupStatusView]) -> None:
    """A table that fits into 80 columns, and what there is to say of each group."""
    _print_table(groups)
    for group in groups:
        since = f" since {_time(group.since_ms)[:-4]} ({group.reason})" if group.since_ms else ""
        leads = "no writer" if group.writer is None else f"member {group.writer} leads{since}"
        print(f"{_printable(group.broker_group)}: {leads}")
        for line in (*group.troubles, *filter(None, [group.advice])):
            print(f"    {_printable(line)}")


def _show_broker_members(members: Sequence[views.BrokerMemberView], *, wide: bool) -> None:
    """A table that fits into 120 columns, and why members have no room."""
    _print_table(members, wide=wide)
    for member in members:
        if member.refusal:
            who = f"member {member.member_id} of {member.broker_group}"
            print(_printable(f"{who} has no room for sends: {member.refusal}"))


def _show_each(show_one: Callable[[Any], None], found: Sequence[object]) -> None:
    """With a blank line between them."""
    for number, one in enumerate(found):
        if number:
            print()
        show_one(one)


def _show_client(view: views.ClientDescriptionView, *, wide: bool) -> None:
    facts: dict[str, object] = {
        "client": view.client_id,
        "group": view.group,
        "role": view.role.replace("_", " ") + (", suspended" if view.is_suspended else ""),
        "program": ", ".join(filter(None, [f"cometmq {view.version}", view.language])),
        "address": f"{view.address} at {view.broker_group}",
        "started": _time(view.start_time_ms),
    }
    _print_facts(facts)
    if view.role == "producer":
        _print_part("sends", view.sending, "Nothing was sent yet.")
    else:
        _print_part("reads", view.subscriptions, "It has subscribed to nothing.")
    if view.role in ("push_pop", "simple"):
        _print_part("holds", view.leases, "It has received nothing yet.")
    elif view.role != "producer":
        shown = "" if len(view.queues) == view.queue_count else f" (of {view.queue_count:,})"
        _print_part(f"queues{shown}", view.queues, "It has no queue.", wide=wide)
    seconds = f"{view.rates_window_ms / 1000:.0f} s"
    _print_part(f"per second, of the last {seconds}", view.rates, "No message has passed yet.")
    if view.role.startswith("push") or view.role == "simple":
        shown = "" if len(view.calls) == view.call_count else f" (of {view.call_count:,})"
        calls = "receives in work" if view.role == "simple" else "listener calls that run"
        _print_part(f"{calls}{shown}", view.calls, "None.")
        _print_stacks([call for call in view.calls if call.stack], view.role)
    if wide:
        print("\noptions")
        longest = max(map(len, view.options), default=0)
        for name, value in view.options.items():
            print(_printable(f"{name:<{longest}}  {value or '–'}"))


def _print_part(title: str, rows: Sequence[object], empty: str, *, wide: bool = False) -> None:
    print(f"\n{title}")
    _print_table(rows, empty=empty, wide=wide)


def _show_stacks(view: views.ClientStacksView) -> None:
    shown = "" if len(view.calls) == view.call_count else f", {len(view.calls):,} of them here"
    member = f"{view.client_id} of group {view.group}"
    one, many = "listener call runs", "listener calls run"
    if view.role == "simple":
        one, many = "receive has messages in work", "receives have messages in work"
    calls = f"{view.call_count:,} {one if view.call_count == 1 else many}{shown}"
    print(f"{_printable(member)}: {'it has no listener' if view.role == 'pull' else calls}")
    _print_stacks(view.calls, view.role)


def _print_stacks(calls: Sequence[views.ClientCallView], role: str) -> None:
    for call in calls:
        messages = f", {call.message_count:,} messages" if call.message_count > 1 else ""
        where = f"{call.topic} {call.broker_group}/{call.queue_id} offset {call.queue_offset:,}"
        late = ", late" if call.is_late else ""
        age = _seconds(call.age_ms)
        since = f"received {age} ago" if role == "simple" else f"runs for {age}{late}"
        print(f"\n{_printable(where)}{messages}: {since}")
        print(_printable(call.stack) if call.stack else "  (its stack is not known)")


def _show_listener_result(view: views.ListenerResultView) -> None:
    facts: dict[str, object] = {
        "message": view.message_id,
        "client": f"{view.client_id} of group {view.group}",
        "result": view.verdict,
        "took": _seconds(view.spent_ms),
    }
    if view.is_orderly:
        facts["order"] = "beside the calls in order of the message's queue"
    _print_facts(facts)
    if view.text:
        print(_printable(view.text))


def _seconds(time_ms: int) -> str:
    return f"{time_ms / 1000:,.1f} s" if time_ms >= 1000 else f"{time_ms} ms"


def _ago(time_ms: int | None) -> str:
    return "" if time_ms is None else f"{_seconds(time_ms)} ago"


def _show_store(view: views.StoreView) -> None:
    identity = view.identity or {"store_id": "not ours", "clean": None}
    facts: dict[str, object] = {
        "directory": view.directory,
        "store id": identity["store_id"],
        "closed cleanly": "no: in use, or crashed" if view.in_use_or_crashed else "yes",
        **{f"log {name}": value for name, value in view.log.items() if value != ""},
        **{
            f"checkpoint {name.removesuffix('_time_ms')}": _time(int(str(at)))
            for name, at in view.checkpoint.items()
            if name.endswith("_time_ms")
        },
        "checkpoint mark": _mark(view.checkpoint.get("mark")),
        "index files": view.index["files"],
        "index entries": view.index["entries"],
        "epochs": ", ".join("@".join(map(str, epoch.values())) for epoch in view.epochs[-8:]),
    }
    _print_facts(facts)
    for complaint in view.complaints:
        print(complaint)
    _print_table(view.queues, empty="No queue has messages.")


def _mark(mark: object) -> str:
    """Up to where all is on the disk, and what the queues held there."""
    if not isinstance(mark, dict):
        return ""
    return f"{mark['end']:,} ({mark['queue_count']:,} queues, {mark['unit_count']:,} messages)"


def _show_place(view: views.PlaceView) -> None:
    facts: dict[str, object] = {
        "file": view.path,
        "log offset": view.log_offset,
        "what": f"{view.kind}: {view.reason}" if view.reason else view.kind,
        "bytes": view.size_bytes,
        "goes on at": "nowhere" if view.goes_on < 0 else view.goes_on,
    }
    _print_facts(facts)
    if view.record is not None:
        _print_table([view.record])


def _show_verified(view: views.VerifiedView) -> None:
    facts: dict[str, object] = {
        "directory": view.directory,
        "log": f"{view.log_start:,} to {view.log_end:,} ({view.end_reason})",
        "records": view.record_count,
        "written off, bytes": view.lost_bytes,
        "queues": view.queue_count,
        "messages in queues": view.unit_count,
        "index entries": view.index_entry_count,
        "seconds": f"{view.seconds:.1f}",
    }
    _print_facts(facts)
    for note in view.notes:
        print(f"note: {_printable(note)}")
    _print_table(view.faults, empty="No faults.")


def _show_repaired(view: views.RepairedView) -> None:
    for action in view.actions:
        print(action)
    facts: dict[str, object] = {
        "log": f"{view.log_start:,} to {view.log_end:,}",
        "records": view.record_count,
        "queues": view.queue_count,
        "index entries": view.index_entry_count,
        "seconds": f"{view.seconds:.1f}",
    }
    _print_facts(facts)
    _print_table(
        view.losses, empty=f"No message is missing before the log's end, {view.log_end:,}."
    )


def _print_facts(facts: dict[str, object]) -> None:
    for name, value in facts.items():
        shown = _time(value) if name.endswith("_ms") and isinstance(value, int) else _cell(value)
        print(f"{name.replace('_', ' '):<22}{shown}")


def _print_table(rows: Sequence[object], *, empty: str = "(none)", wide: bool = False) -> None:
    if not rows:
        print(empty)
        return
    kind = type(rows[0])
    more = () if wide else _WIDE_ONLY.get(kind, ())
    columns = [(title, value) for title, value in _COLUMNS[kind] if title not in more]
    found = [[value(row) for _, value in columns] for row in rows]
    lines = tables.lay_out(
        [title for title, _ in columns],
        [[" ".join(_cell(value).splitlines()) for value in row] for row in found],
        right=[
            all(type(v) in (int, type(None)) for v in values) for values in zip(*found, strict=True)
        ],
        width=_width(sys.stdout),
    )
    for line in lines:
        print(line)


def _width(stream: TextIO) -> int | None:
    """Columns of the terminal. None: there is none, or it does not say; then nothing is wrapped."""
    if not stream.isatty():
        return None
    observed = os.environ.get("COLUMNS", "")
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
        return int(observed) if observed.isdecimal() and int(observed) else columns or None
    except (OSError, ValueError):
        return None


def _cell(value: object) -> str:
    if value is None or value in ("", []):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(_printable(str(item)) for item in value)
    return _printable(str(value))


def _printable(text: str) -> str:
    """Without control characters: a message's content must not drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _time(ms: int | None) -> str:
    """Local time to the millisecond; – for never; beyond what calendars have, the number."""
    if not ms:
        return "–"
    try:
        return datetime.fromtimestamp(ms / 1000).isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(ms)


def _quota(messages_per_s: int, bytes_per_s: int) -> str:
    return f"{messages_per_s}/{bytes_per_s}" if messages_per_s or bytes_per_s else ""


def _hours(time_ms: int) -> str:
    return f"{time_ms / 3_600_000:g} h" if time_ms else ""


def _away(member: views.GroupMemberView) -> str:
    if not member.is_away:
        return ""
    return f"{member.away_ms / 1000:.0f} s, {member.session_left_ms / 1000:.0f} s left"


def _subscriptions(member: views.GroupMemberView) -> list[str]:
    return [f"{topic} [{' || '.join(tags) or '*'}]" for topic, tags in member.subscriptions.items()]


_SETTINGS: tuple[Column, ...] = (
    ("topic", lambda v: v.topic),
    ("broker group", lambda v: v.broker_group),
    ("read queues", lambda v: v.read_queue_count),
    ("write queues", lambda v: v.write_queue_count),
    ("permission", lambda v: v.permission),
    ("flush", lambda v: v.flush_mode),
    ("replication", lambda v: v.replication_mode),
)
_STORED: tuple[Column, ...] = (
    *_SETTINGS,
    ("reserve", lambda v: _hours(v.reserve_time_ms)),
    ("type", lambda v: "" if v.message_type == "unspecified" else v.message_type),
    ("ordered", lambda v: v.is_ordered),
)
_QUOTA: Column = ("send quota", lambda v: v.send_quota)
_BOUNDS: tuple[Column, ...] = (
    ("min", lambda v: v.min_offset),
    ("max", lambda v: v.max_offset),
)
_QUEUE: tuple[Column, ...] = (
    ("topic", lambda v: v.topic),
    ("broker group", lambda v: v.broker_group),
    ("queue", lambda v: v.queue_id),
    ("generation", lambda v: v.generation),
)


def _lock(queue: views.ClientQueueView) -> str:
    """The lock of a queue that is read in order: its number, and whether it is lost."""
    if queue.lock_number is None:
        return ""
    return str(queue.lock_number) if queue.is_locked else f"{queue.lock_number} (lost)"


def _numbers(values: list[int] | None) -> str | None:
    return None if values is None else " ".join(map(str, values)) or "–"


def _in_sync(group: views.GroupStatusView) -> str | None:
    """The members in sync, and how many must be where one is not enough."""
    floor = f" (min {group.min_in_sync})" if (group.min_in_sync or 1) > 1 else ""
    return None if group.in_sync is None else f"{_numbers(group.in_sync)}{floor}"


def _role(member: views.MemberView | views.BrokerMemberView) -> str:
    """And why the rest of its row is empty."""
    if member.reachable:
        return member.role
    return f"{member.role} ({member.error or 'does not answer'})"


def _skew(ahead_ms: int | None) -> str:
    """How far a clock is ahead of what most show."""
    return "" if ahead_ms is None else f"{ahead_ms / 1000:+,.1f} s"


# Columns that a table has with --wide only.
_WIDE_ONLY: dict[type, tuple[str, ...]] = {
    views.BrokerMemberView: ("address", "log begins"),
    views.ClientView: ("agent",),
    views.GroupMemberView: ("address",),
    views.ClientQueueView: ("bytes",),
    views.DelayedView: ("recall handle",),
    views.HalfView: ("unique id",),
    views.MemberView: ("cluster", "topics", "on disk", "version", "started"),
    views.GroupSettingsView: (
        "from min",
        "notify",
        "orderly",
        "timeout min",
        "mode",
        "dead letters",
        "reads from",
        "attributes",
    ),
}
# What a table shows of a view; JSON has every field.
_COLUMNS: dict[type, tuple[Column, ...]] = {
    views.MemberView: (
        ("broker group", lambda v: v.broker_group),
        ("member", lambda v: v.member_id),
        ("cluster", lambda v: v.cluster),
        ("role", _role),
        ("address", lambda v: v.address),
        ("epoch", lambda v: v.epoch),
        ("topics", lambda v: v.topic_count),
        ("log end", lambda v: v.log_appended_offset),
        ("on disk", lambda v: v.log_flushed_offset),
        ("version", lambda v: v.version),
        ("started", lambda v: _time(v.started_ms)),
        ("last heard", lambda v: _time(v.last_heard_ms)),
    ),
    views.BrokerMemberView: (
        ("broker group", lambda v: v.broker_group),
        ("member", lambda v: v.member_id),
        ("role", _role),
        ("epoch", lambda v: v.epoch),
        ("address", lambda v: v.address),
        ("log begins", lambda v: v.log_min_offset),
        ("log end", lambda v: v.log_appended_offset),
        ("on disk", lambda v: v.log_flushed_offset),
        ("behind", lambda v: v.behind_bytes),
        ("clock", lambda v: _skew(v.clock_skew_ms)),
        ("room", lambda v: None if v.refusal is None else not v.refusal),
    ),
    views.GroupStatusView: (
        ("group", lambda v: v.broker_group),
        ("status", lambda v: v.status),
        ("writer", lambda v: v.writer),
        ("epoch", lambda v: v.epoch),
        ("in sync", _in_sync),
        ("electable", lambda v: _numbers(v.electable)),
        ("members", lambda v: _numbers(v.members)),
        ("behind", lambda v: v.behind_bytes_max),
        ("clock", lambda v: _skew(v.clock_skew_ms_max)),
    ),
    views.ElectedView: (
        ("broker group", lambda v: v.broker_group),
        ("writer", lambda v: v.member_id),
        ("epoch", lambda v: v.epoch),
    ),
    views.CleanedView: (
        ("broker group", lambda v: v.broker_group),
        ("member", lambda v: v.member_id),
        ("role", lambda v: v.role),
        ("log files", lambda v: v.log_file_count),
        ("bytes", lambda v: v.log_bytes),
        ("queue files", lambda v: v.queue_file_count),
        ("topics", lambda v: ", ".join(v.topics)),
        ("log begins", lambda v: v.log_min_offset),
    ),
    views.HandoverView: (
        ("broker group", lambda v: v.broker_group),
        ("from member", lambda v: v.from_member),
        ("to member", lambda v: v.to_member),
        ("log offset", lambda v: v.log_end_offset),
        ("epoch", lambda v: v.epoch),
    ),
    views.TraceEntryView: (
        ("begin ms", lambda v: f"{v.begin_ms:.3f}"),
        ("stage", lambda v: v.stage),
        ("took ms", lambda v: f"{v.duration_ms:.3f}"),
        ("number", lambda v: v.number),
    ),
    views.TraceEventView: (
        ("time", lambda v: None if v.time_ms is None else _time(v.time_ms)),
        ("event", lambda v: v.event),
        ("group", lambda v: v.group),
        ("result", lambda v: v.result),
        ("took ms", lambda v: v.cost_ms),
        ("client", lambda v: v.client),
        ("detail", lambda v: v.detail),
        ("message", lambda v: v.message_id),
        ("from", lambda v: v.source),
    ),
    views.LogChecksumView: (
        ("broker group", lambda v: v.broker_group),
        ("member", lambda v: v.member_id),
        ("role", lambda v: v.role),
        ("from", lambda v: v.from_offset),
        ("to", lambda v: v.to_offset),
        ("SHA-256", lambda v: v.sha256),
        ("equal", lambda v: v.equal),
    ),
    views.TopicView: (*_STORED, _QUOTA),
    views.CreatedTopicView: (*_STORED, _QUOTA, ("new", lambda v: v.created)),
    views.QuotaView: (
        ("quota of", lambda v: v.scope),
        ("name", lambda v: v.name or "(each)"),
        ("broker group", lambda v: v.broker_group),
        ("send", lambda v: v.send),
        ("read", lambda v: v.read),
    ),
    views.OrderView: (
        ("topic", lambda v: v.topic),
        ("name server", lambda v: v.namesrv),
        ("broker group", lambda v: v.broker_group),
        ("queues", lambda v: v.queue_count),
    ),
    views.ShrunkTopicView: (
        ("topic", lambda v: v.topic),
        ("broker group", lambda v: v.broker_group),
        ("read queues", lambda v: v.read_queue_count),
        ("write queues", lambda v: v.write_queue_count),
        ("waits for", lambda v: [f"{name}: {count}" for name, count in v.waiting.items()]),
    ),
    views.AllocatedQueueView: (
        ("client id", lambda v: v.client_id),
        ("topic", lambda v: v.topic),
        ("broker group", lambda v: v.broker_group),
        ("queue", lambda v: v.queue_id),
    ),
    views.DeletedTopicView: (
        ("deleted topic", lambda v: v.topic),
        ("broker group", lambda v: v.broker_group),
    ),
    views.RouteView: (
        *_SETTINGS,
        ("writer", lambda v: v.writer),
        ("followers", lambda v: v.followers),
    ),
    views.QueueView: (
        *_QUEUE,
        *_BOUNDS,
        ("messages", lambda v: v.message_count),
        ("appended", lambda v: v.appended_offset),
        ("last stored", lambda v: _time(v.last_store_time_ms)),
    ),
    views.QueueTimeView: (
        *_QUEUE,
        ("offset", lambda v: v.offset),
        ("stored", lambda v: _time(v.store_time_ms)),
    ),
    views.GroupView: (
        ("group", lambda v: v.group),
        ("broker groups", lambda v: v.broker_groups),
        ("members", lambda v: v.member_count),
        ("away", lambda v: v.away_count),
        ("queues", lambda v: v.queue_count),
        ("retries", lambda v: v.retry_count),
        ("dead letters", lambda v: v.dead_letter_count),
        ("idle h", lambda v: None if v.idle_ms is None else f"{v.idle_ms / 3_600_000:.1f}"),
    ),
    views.DeadLetterView: (
        ("dead letter", lambda v: f"{v.broker_group}/{v.offset}"),
        ("topic", lambda v: v.topic),
        ("keys", lambda v: v.keys),
        ("tries", lambda v: v.tries),
        ("given up", lambda v: _time(v.store_time_ms)),
        ("resent", lambda v: v.resent),
        ("bytes", lambda v: v.body_bytes),
        ("body", lambda v: v.body),
    ),
    views.HalfView: (
        ("half", lambda v: f"{v.broker_group}/{v.offset}"),
        ("producer group", lambda v: v.producer_group),
        ("topic", lambda v: v.topic),
        ("unique id", lambda v: v.unique_id),
        ("keys", lambda v: v.keys),
        ("stored", lambda v: _time(v.store_time_ms)),
        ("checks", lambda v: v.check_count),
        ("producers", lambda v: v.producer_count),
        ("bytes", lambda v: v.body_bytes),
        ("body", lambda v: v.body),
    ),
    views.HalvesChangedView: (
        ("done", lambda v: v.done_count),
        ("done before", lambda v: v.done_before_count),
    ),
    views.DelayedView: (
        ("due", lambda v: _time(v.due_time_ms)),
        ("topic", lambda v: v.topic),
        ("queue", lambda v: v.queue_id),
        ("message id", lambda v: v.message_id),
        ("unique id", lambda v: v.unique_id),
        ("bytes", lambda v: v.size_bytes),
        ("recall handle", lambda v: v.recall_handle),
    ),
    views.DelayedCountView: (
        ("broker group", lambda v: v.broker_group),
        ("of", lambda v: v.of),
        ("messages", lambda v: v.count),
    ),
    views.RecalledView: (
        ("topic", lambda v: v.topic),
        ("unique id", lambda v: v.unique_id),
        ("due", lambda v: _time(v.due_time_ms)),
        ("recalled", lambda v: v.recalled),
    ),
    views.ResentView: (
        ("group", lambda v: v.group),
        ("resent", lambda v: v.resent_count),
        ("resent before", lambda v: v.resent_before_count),
    ),
    views.MessagesResentView: (
        ("topic", lambda v: v.topic),
        ("group", lambda v: v.group),
        ("resent", lambda v: v.resent_count),
        ("resent before", lambda v: v.resent_before_count),
        ("done", lambda v: v.done),
    ),
    views.GroupSettingsView: (
        ("group", lambda v: v.group),
        ("broker group", lambda v: v.broker_group),
        ("consume", lambda v: v.consume_enable),
        ("broadcast", lambda v: v.consume_broadcast_enable),
        ("from min", lambda v: v.consume_from_min_enable),
        ("notify", lambda v: v.notify_members_enable),
        ("orderly", lambda v: v.consume_orderly),
        ("retry times", lambda v: v.retry_times_max),
        ("retry queues", lambda v: v.retry_queue_count),
        ("retry policy", lambda v: v.retry_policy),
        ("timeout min", lambda v: v.consume_timeout_min),
        ("mode", lambda v: v.mode),
        ("read quota", lambda v: _quota(v.read_messages_per_s, v.read_bytes_per_s)),
        ("dead letters", lambda v: _hours(v.dlq_reserve_time_ms)),
        ("reads from", lambda v: f"{v.broker_id}, slow {v.broker_id_when_slow}"),
        ("attributes", lambda v: v.attributes),
        ("new", lambda v: v.created),
    ),
    views.GroupTopicView: (
        ("topic", lambda v: v.topic),
        ("broker groups", lambda v: v.broker_groups),
        ("queues", lambda v: v.queue_count),
        ("not begun", lambda v: v.new_queue_count),
        ("members", lambda v: v.member_count),
        ("lag", lambda v: v.lag_count),
    ),
    views.QueueResetView: (
        ("broker group", lambda v: v.broker_group),
        ("topic", lambda v: v.topic),
        ("queue", lambda v: v.queue_id),
        ("before", lambda v: v.before),
        ("after", lambda v: v.after),
        ("done", lambda v: v.done),
    ),
    views.ForgottenView: (
        ("forgotten group", lambda v: v.group),
        ("topic", lambda v: v.topic),
        ("broker group", lambda v: v.broker_group),
        ("queues", lambda v: v.queue_count),
    ),
    views.PurgedView: (
        ("purged group", lambda v: v.group),
        ("broker group", lambda v: v.broker_group),
    ),
    views.DeletedGroupView: (
        ("deleted group", lambda v: v.group),
        ("broker group", lambda v: v.broker_group),
        ("deleted topics", lambda v: v.topics),
    ),
    views.GroupMemberView: (
        ("client", lambda v: v.client_id),
        ("reads", _subscriptions),
        ("model", lambda v: v.message_model),
        ("allocation", lambda v: v.allocation),
        ("queues", lambda v: v.held_queue_count),
        ("session", lambda v: f"{v.session_ms / 1000:g} s" if v.session_ms else ""),
        ("away", _away),
        ("address", lambda v: v.address),
    ),
    views.RemovedMemberView: (
        ("removed member", lambda v: v.client_id),
        ("group", lambda v: v.group),
        ("at", lambda v: v.broker_groups),
        ("connected at", lambda v: v.connected),
    ),
    views.ClientView: (
        ("kind", lambda v: v.kind),
        ("broker group", lambda v: v.broker_group),
        ("group", lambda v: v.group),
        ("client", lambda v: v.client_id),
        ("address", lambda v: v.address),
        ("language", lambda v: v.language),
        ("version", lambda v: v.version),
        ("since", lambda v: _time(v.since_ms)),
        ("away", lambda v: "away" if v.is_away else ""),
        ("agent", lambda v: v.agent),
    ),
    views.ClientTopicView: (
        ("topic", lambda v: v.topic),
        ("filter", lambda v: v.sql or " || ".join(v.tags) or "*"),
    ),
    views.ClientQueueView: (
        ("topic", lambda v: v.topic),
        ("queue", lambda v: f"{v.broker_group}/{v.queue_id}"),
        ("committed", lambda v: v.committed_offset),
        ("next", lambda v: v.next_offset),
        ("cached", lambda v: v.cached_count),
        ("bytes", lambda v: v.cached_bytes),
        ("calls", lambda v: v.call_count),
        ("lock", _lock),
        ("pulled", lambda v: "paused" if v.is_paused else _ago(v.last_pull_ago_ms)),
    ),
    views.ClientLeasesView: (
        ("broker group", lambda v: v.broker_group),
        ("held", lambda v: v.held_count),
        ("bytes", lambda v: v.held_bytes or None),
        ("calls", lambda v: v.call_count),
        ("received", lambda v: _ago(v.last_receive_ago_ms)),
    ),
    views.ClientSendingView: (
        ("broker group", lambda v: v.broker_group),
        ("connected", lambda v: v.is_connected),
        ("batches in flight", lambda v: v.in_flight_count),
        ("waiting", lambda v: v.waiting_count),
        ("bytes", lambda v: v.waiting_bytes),
        ("stored", lambda v: v.stored_count),
        ("failed", lambda v: v.failed_count),
    ),
    views.ClientRatesView: (
        ("topic", lambda v: v.topic),
        ("pulled", lambda v: f"{v.pulled_per_s:,.1f}"),
        ("done", lambda v: f"{v.done_per_s:,.1f}"),
        ("failed", lambda v: f"{v.failed_per_s:,.1f}"),
        ("call takes", lambda v: f"{v.process_ms:,.2f} ms" if v.process_ms else ""),
    ),
    views.ClientCallView: (
        ("topic", lambda v: v.topic),
        ("queue", lambda v: f"{v.broker_group}/{v.queue_id}"),
        ("offset", lambda v: v.queue_offset),
        ("messages", lambda v: v.message_count),
        ("runs for", lambda v: _seconds(v.age_ms)),
        ("late", lambda v: "late" if v.is_late else ""),
    ),
    views.QueueProgressView: (
        *_QUEUE,
        ("committed", lambda v: v.committed_offset),
        *_BOUNDS,
        ("lag", lambda v: v.lag_count),
    ),
    views.SentView: (
        ("message id", lambda v: v.message_id),
        ("queue", lambda v: v.queue_id),
        ("offset", lambda v: v.queue_offset),
        ("stored", lambda v: _time(v.store_time_ms)),
    ),
    views.ProcessView: (
        ("process", lambda v: v.name),
        ("alive", lambda v: v.alive),
        ("pid", lambda v: str(v.pid)),
        ("address", lambda v: v.address),
        ("internal", lambda v: v.internal_address),
        ("metrics", lambda v: v.metrics_address),
    ),
    views.StoreQueueView: (
        ("topic", lambda v: v.topic),
        ("queue", lambda v: v.queue_id),
        ("min", lambda v: v.min_offset),
        ("next", lambda v: v.next_offset),
    ),
    views.RecordView: (
        ("log offset", lambda v: v.log_offset),
        ("bytes", lambda v: v.size_bytes),
        ("topic", lambda v: v.topic),
        ("queue", lambda v: v.queue_id),
        ("offset", lambda v: v.queue_offset),
        ("stored", lambda v: _time(v.store_time_ms)),
        ("tag", lambda v: v.tag),
        ("keys", lambda v: v.keys),
        ("body", lambda v: v.body_bytes),
    ),
    views.LogFileView: (
        ("file", lambda v: v.path),
        ("log offset", lambda v: v.start),
        ("bytes", lambda v: v.size_bytes),
        ("on disk", lambda v: v.disk_bytes),
        ("first stored", lambda v: _time(v.first_store_time_ms)),
    ),
    views.FaultView: (
        ("area", lambda v: v.area),
        ("path", lambda v: v.path),
        ("position", lambda v: v.position),
        ("what", lambda v: v.what),
    ),
    views.LossView: (
        ("topic", lambda v: v.topic),
        ("queue", lambda v: v.queue_id),
        ("first lost", lambda v: v.first_queue_offset),
        ("messages", lambda v: v.message_count),
        ("damaged at", lambda v: v.log_offset),
    ),
    views.UnitView: (
        ("offset", lambda v: v.queue_offset),
        ("log offset", lambda v: v.log_offset),
        ("bytes", lambda v: v.size_bytes),
        ("tags code", lambda v: v.tags_code),
    ),
    views.StoppedView: (
        ("directory", lambda v: v.directory),
        ("processes stopped", lambda v: v.stopped_count),
        ("data removed", lambda v: v.purged),
    ),
}
