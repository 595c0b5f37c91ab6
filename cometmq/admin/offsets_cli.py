"""``cometmq offsets``: snapshots for the lag job."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from cometmq.admin import forms, offsets
from cometmq.admin.cluster_command import connection_to
from cometmq.admin.commandline import Group, namesrv_option, or_before, secret_option
from cometmq.admin.offsets import Snapshot
from cometmq.clock import SystemClock

PATIENCE_S = 15.0  # a planned change of the writer takes seconds, a fail-over some more


@click.group("offsets", cls=Group)
def offsets_group() -> None:
    """Offsets of all queues and groups, for the lag job."""


@offsets_group.command("export")
@click.option(
    "--output",
    "directory",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the snapshots; each has a folder of its own in it.",
)
@click.option(
    "--at-most-once-per",
    "interval_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Do nothing when the newest snapshot in DIR is complete and younger than that.",
)
@click.option(
    "--forget",
    multiple=True,
    metavar="BROKER_GROUP",
    help="Expect it no more, though the snapshot before did; may be repeated.",
)
@click.option(
    "--form",
    "output",
    callback=or_before,
    type=click.Choice(forms.FORMS),
    default=forms.TABLE,
    show_default=True,
    help="Form of the answer, and of errors.",
)
@namesrv_option
@secret_option
def offsets_export(
    directory: Path,
    interval_s: float | None,
    forget: tuple[str, ...],
    output: str,
    namesrv: str | None,
    secret_file: Path | None,
) -> None:
    """Write a snapshot of all offsets as Parquet files.

    Exit code 0: a snapshot was written to DIR. The manifest and standard error name broker groups
    that did not answer; the exit code is 1 only if none did.

    mqadmin has no such verb.
    """
    clock = SystemClock()
    newest = offsets.newest(directory, clock.wall_ms())
    if newest is not None and interval_s and newest.completeness == 1:
        age_s = (clock.wall_ms() - newest.started_ms) / 1000
        if age_s < interval_s:
            print(
                f"the newest snapshot is {max(0, age_s):.0f} s old: nothing to do", file=sys.stderr
            )
            _show(directory, newest, output)
            return

    async def run() -> Snapshot:
        async with connection_to(namesrv, secret_file) as connection:
            return await offsets.export(
                connection, directory, clock, forget=forget, patience_s=PATIENCE_S
            )

    _show(directory, asyncio.run(run()), output)


def _show(directory: Path, snapshot: Snapshot, form: str) -> None:
    for group in snapshot.failed:
        print(f"{group.broker_group} is missing: {group.error} {group.message}", file=sys.stderr)
    folder = directory / f"snapshot={snapshot.snapshot_id}"
    if form == forms.JSON:
        print(json.dumps({**asdict(snapshot), "folder": str(folder)}, indent=2))
        return
    print(f"{folder}: {len(snapshot.exported)} of {len(snapshot.expected)} broker groups")
    for row in snapshot.exported:
        print(
            f"  {row.broker_group}  epoch {row.broker_epoch}"
            f"  {row.queue_count:,} queues  {row.row_count:,} rows"
        )
