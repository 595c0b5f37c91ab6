"""What a person sees: progress bars while the job runs, tables at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.roundtrip.lagging import Lag
from examples.roundtrip.logs import LogCopy
from examples.roundtrip.metrics import Movement
from examples.roundtrip.outcome import Outcome, Trip

PLAIN_LINE_S = 2.0


class Bars:
    """Two bars; where the output is no terminal, a plain line every two seconds instead."""

    def __init__(self, console: Console, messages: int) -> None:
        self._console = console
        self._messages = messages
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:>9,.0f} messages/s"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._stored = self._progress.add_task("stored", total=messages, rate=0.0)
        self._placed = self._progress.add_task("placed", total=messages, rate=0.0)
        self._started_s = 0.0
        self._next_line_s = 0.0
        self._printed = (0, 0)

    def __enter__(self) -> Bars:
        self._started_s = time.monotonic()
        self._next_line_s = self._started_s + PLAIN_LINE_S
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, stored: int, placed: int) -> None:
        """Shows both counts; rates are means from the start to the latest change."""
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._started_s, 0.001)
        for bar, count in ((self._stored, stored), (self._placed, placed)):
            if count != self._progress.tasks[bar].completed:
                self._progress.update(bar, completed=count, rate=count / elapsed_s)
        if self._console.is_terminal or self._printed == (stored, placed):
            return
        if now_s >= self._next_line_s:
            self._next_line_s, self._printed = now_s + PLAIN_LINE_S, (stored, placed)
            self._console.print(
                f"  stored {stored:,}, placed {placed:,} of {self._messages:,} messages"
            )


def lag_table(lag: Lag) -> Table:
    """`cometmq group progress` and Spark side by side, of one moment."""
    title = "The same lag, counted by `cometmq group progress` and by Spark"
    table = _table(title, "queue", "committed", "end", "progress", "Spark", "oldest waits", "equal")
    for row in lag.queues:
        known = row.progress or row.spark
        assert known is not None
        table.add_row(
            row.queue,
            number(known.committed_offset),
            number(known.max_offset),
            number(row.progress and row.progress.lag),
            number(row.spark and row.spark.lag),
            seconds(row.waiting_ms),
            verdict(row.equal),
        )
    table.add_section()
    equal = verdict(lag.progress_sum == lag.spark_sum)
    table.add_row("all", "", "", number(lag.progress_sum), number(lag.spark_sum), "", equal)
    return table


def logs_table(copies: Sequence[LogCopy]) -> Table:
    table = _table("The logs of each broker group's members", "member", "role", "from", "to")
    for title in ("SHA-256", "by its files"):
        table.add_column(title)
    for copy in copies:
        told = copy.told
        table.add_row(
            f"{told.broker_group}-{told.member_id}",
            told.role,
            number(told.from_offset),
            number(told.to_offset),
            f"{told.sha256[:16]}…",
            "the same" if copy.file_sha256 == told.sha256 else "[bold red]ANOTHER[/]",
        )
    return table


def metrics_table(movements: Sequence[Movement]) -> Table:
    table = _table("What the servers counted", "metric", "rose by", "wanted", "in", "of")
    table.add_column("good")
    for movement in movements:
        wanted = movement.wanted
        table.add_row(
            wanted.metric,
            f"{movement.rise:,.0f}",
            "0" if wanted.still else f"≥ {max(wanted.least, 1):,.0f}",
            f"{movement.moved_processes} of {len(movement.rises)}",
            wanted.where,
            verdict(movement.good),
        )
    return table


def trip_table(trip: Trip) -> Table:
    table = _table("Round trip", "what", "how much")
    for label, text in trip.rows():
        table.add_row(label, text)
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(first, title=title)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def seconds(milliseconds: int | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def verdict(good: bool) -> str:
    return "yes" if good else "[bold red]NO[/]"


def show(console: Console, outcome: Outcome) -> None:
    """The tables, then what went wrong, then the verdict."""
    console.print(metrics_table(outcome.movements))
    if outcome.lag is not None:
        console.print(lag_table(outcome.lag))
    console.print(logs_table(outcome.logs))
    console.print(trip_table(outcome.trip))
    for sentence in outcome.trip.duplicates.sentences():
        console.print(sentence)
    for complaint in outcome.complaints():
        console.print(f"[bold red]✗[/] {escape(complaint)}")
    if outcome.good:
        files = f"{outcome.trip.file_count:,} files"
        console.print(f"[bold green]✓[/] all {files} came back, byte for byte")
