"""``cometmq store``: a store's folder without a broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from cometmq.admin import inspection, render
from cometmq.admin.commandline import EXIT_FAULTY, Group, output_option
from cometmq.admin.views import LogFileView, PlaceView, RecordView, StoreView, UnitView
from cometmq.format.indexfile import Sizes
from cometmq.store.repair.repair import Accepted
from cometmq.store.repair.smallfiles import NEW_STORE_ID, STORE_ID

RANGE = re.compile(r"(\d+)-(\d+)")

directory_argument = click.argument(
    "directory", type=click.Path(path_type=Path, exists=True, file_okay=False, readable=True)
)
slots_option = click.option(
    "--hash-slots", type=click.IntRange(1),
    help="The broker's max_hash_slot_num. Default: as the store was opened with last.",
)  # fmt: skip
entries_option = click.option(
    "--index-entries", type=click.IntRange(2),
    help="The broker's max_index_num. Default: as the store was opened with last.",
)  # fmt: skip


def _index_sizes(hash_slots: int | None, index_entries: int | None) -> Sizes | None:
    """None: neither was given."""
    if hash_slots is None and index_entries is None:
        return None
    return Sizes(hash_slots or Sizes().hash_slots, index_entries or Sizes().entries)


def _queue(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """The ``--units`` option."""
    topic, _slash, number = (value or "").rpartition("/")
    if value is not None and not (topic and number.isdecimal()):
        raise click.UsageError(f"--units {value!r} is not TOPIC/QUEUE")
    return (topic, int(number)) if value is not None else None


@click.group("store", cls=Group)
def store_group() -> None:
    """A store's folder, without a broker: look, verify, repair."""


@store_group.command("dump")
@directory_argument
@click.option("--scan", is_flag=True, help="Read and count every record.")
@click.option("--records", is_flag=True, help="List records of the log instead.")
@click.option(
    "--units", "queue", metavar="TOPIC/QUEUE", callback=_queue,
    help="List units of this queue instead.",
)  # fmt: skip
@click.option("--files", is_flag=True, help="List the log's files instead.")
@click.option(
    "--at", metavar="LOG_OFFSET", type=click.IntRange(0), help="Show what lies there instead."
)
@click.option("--from", "start", type=click.IntRange(0), help="First log or queue offset to list.")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True, help="Rows.")
@output_option
def store_dump(
    directory: Path,
    scan: bool,
    records: bool,
    queue: tuple[str, int] | None,
    files: bool,
    at: int | None,
    start: int | None,
    count: int,
    output: str,
) -> None:
    """Show what is in a store.

    DIRECTORY is a broker's store_path. The command only reads, also beside a running broker.
    """
    found: StoreView | list[RecordView] | list[UnitView] | list[LogFileView] | PlaceView
    if scan + records + files + (queue is not None) + (at is not None) > 1:
        raise click.UsageError("--scan, --records, --units, --files and --at exclude each other")
    if records:
        found = inspection.records(directory, start=start, count=count)
    elif files:
        found = inspection.files(directory)
    elif at is not None:
        found = inspection.place(directory, at)
    elif queue is not None:
        found = inspection.units(directory, *queue, start=start or 0, count=count)
    else:
        found = inspection.store(directory, scan=scan)
    render.show(found, output)


@store_group.command("verify")
@directory_argument
@slots_option
@entries_option
@output_option
@click.pass_context
def store_verify(
    ctx: click.Context,
    directory: Path,
    hash_slots: int | None,
    index_entries: int | None,
    output: str,
) -> None:
    """Read a whole store and name every fault.

    Compares log, queues, key index and marks of DIRECTORY. Changes nothing, and may run beside a
    broker. Ends with status 3 when something is wrong.
    """
    found = inspection.verify(directory, _index_sizes(hash_slots, index_entries))
    render.show(found, output)
    if found.faults:
        ctx.exit(EXIT_FAULTY)


def _ranges(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """``START-END`` options."""
    found = [RANGE.fullmatch(value) for value in values]
    if None in found:
        raise click.BadParameter(f"{values[found.index(None)]!r} is not START-END")
    return tuple((int(match[1]), int(match[2])) for match in found if match is not None)


def _store_id(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """The ``--store-id`` option."""
    if value is None or value == NEW_STORE_ID or STORE_ID.fullmatch(value):
        return value
    raise click.BadParameter(f"{value!r} is neither 32 hexadecimal digits nor {NEW_STORE_ID}")


@store_group.command("repair")
@directory_argument
@click.option(
    "--write-off", multiple=True, callback=_ranges, metavar="START-END",
    help="Give up these damaged bytes of the log; may be repeated.",
)  # fmt: skip
@click.option(
    "--accept-end", "end", type=click.IntRange(0), metavar="LOG_OFFSET",
    help="Let a log end here that was longer.",
)  # fmt: skip
@click.option(
    "--cut-at", type=click.IntRange(0), metavar="LOG_OFFSET",
    help="Remove the record that starts here, and all behind it.",
)  # fmt: skip
@click.option(
    "--epoch", type=click.IntRange(1), metavar="NUMBER",
    help="Where cometmq.epochs is gone: a number above every epoch that the group ever had.",
)  # fmt: skip
@click.option(
    "--store-id", callback=_store_id, metavar=f"ID|{NEW_STORE_ID}",
    help="Where cometmq.json is gone: the id that it named, or a new one.",
)  # fmt: skip
@click.option(
    "--rebuild-tables", is_flag=True,
    help="Where the log has lost changes of topics, groups or offsets: let the next writer make "
    "them again from what is left, config/*.json and the queues.",
)  # fmt: skip
@click.option(
    "--restored", is_flag=True,
    help="It is an older copy, from a backup or a snapshot: give it an id of its own, by which no "
    "lease takes it for the store that it was.",
)  # fmt: skip
@slots_option
@entries_option
@click.option(
    "--queue-file-bytes", type=click.IntRange(20),
    help="The broker's mapped_file_size_consume_queue. Default: as the store was opened with last.",
)  # fmt: skip
@output_option
def store_repair(
    directory: Path,
    *,
    hash_slots: int | None,
    index_entries: int | None,
    queue_file_bytes: int | None,
    output: str,
    **accepted: Any,
) -> None:
    """Rebuild queues and key index from the log.

    The broker of DIRECTORY must be down. The command refuses a damaged log, and log files that are
    missing or cut short; it then prints the options that give up what is lost. Copy the folder
    first.
    """
    done = inspection.repair(
        directory,
        Accepted(**accepted),
        index_sizes=_index_sizes(hash_slots, index_entries),
        queue_file_bytes=queue_file_bytes,
    )
    render.show(done, output)
