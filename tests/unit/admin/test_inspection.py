from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cometmq.admin import inspection
from cometmq.admin.cli import cli
from cometmq.clock import SystemClock
from cometmq.errors import QueueNotFound, StoreForeignFile
from cometmq.format import properties, record
from cometmq.format.indexfile import Sizes
from cometmq.store.writer import MessageStore, StoreOptions

HOST = b"\x7f\x00\x00\x01\x00\x00\x00\x01"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store, closed cleanly, with three messages in queue 0 and one in queue 1 of topic T."""
    options = StoreOptions(commit_log_file_bytes=64 * 1024, consume_queue_file_bytes=6_000)
    store = MessageStore.open(tmp_path / "store", options, clock=SystemClock())
    for queue_id, body in ((0, b"a"), (0, b"bb"), (1, b"x"), (0, b"ccc")):
        encoded = record.encode(
            b"T",
            queue_id,
            body,
            properties.encode({"TAGS": "t", "KEYS": "k1 k2"}),
            born_time_ms=1,
            born_host=HOST,
            store_host=HOST,
        )
        store.append(encoded, [("T", queue_id, 1)], born_host=HOST, store_host=HOST)
    store.close()
    return tmp_path / "store"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["store", "dump", *map(str, arguments)])


def test_the_store_as_a_whole(directory: Path) -> None:
    view = inspection.store(directory, scan=True)
    assert not view.in_use_or_crashed
    assert view.log["records"] == 4
    ends = [(q.topic, q.queue_id, q.min_offset, q.next_offset) for q in view.queues]
    assert ends == [("T", 0, 0, 3), ("T", 1, 0, 1)]


def test_records_in_the_order_of_the_log(directory: Path) -> None:
    rows = inspection.records(directory, start=None, count=10)
    assert [(r.queue_id, r.queue_offset, r.body_bytes) for r in rows] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 1),
        (0, 2, 3),
    ]
    assert (rows[0].topic, rows[0].tag, rows[0].keys) == ("T", "t", ["k1", "k2"])
    assert rows[1].log_offset == rows[0].size_bytes
    assert inspection.records(directory, start=rows[2].log_offset, count=1) == [rows[2]]


def test_units_point_at_records(directory: Path) -> None:
    rows = inspection.units(directory, "T", 0, start=1, count=10)
    records = inspection.records(directory, start=None, count=10)
    wanted = [(r.queue_offset, r.log_offset, r.size_bytes) for r in (records[1], records[3])]
    assert [(u.queue_offset, u.log_offset, u.size_bytes) for u in rows] == wanted


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreForeignFile):
        inspection.store(tmp_path)
    assert run(tmp_path).exit_code == 1


def test_an_unknown_queue_is_refused(directory: Path) -> None:
    with pytest.raises(QueueNotFound):
        inspection.units(directory, "T", 9, start=0, count=1)


def test_the_command_writes_tables(directory: Path) -> None:
    assert "closed cleanly        yes" in run(directory, "--scan").stdout
    assert "k1, k2" in run(directory, "--records").stdout
    assert "tags code" in run(directory, "--units", "T/0").stdout


def test_the_command_writes_json(directory: Path) -> None:
    assert json.loads(run(directory, "--output", "json").stdout)["queues"][0]["next_offset"] == 3
    rows = json.loads(run(directory, "--units", "T/1", "--output", "json").stdout)
    assert [row["queue_offset"] for row in rows] == [0]
    rows = json.loads(run(directory, "--records", "--count", "2", "--output", "json").stdout)
    assert len(rows) == 2


@pytest.mark.parametrize(
    "wrong", [["--scan", "--records"], ["--units", "T"], ["--units", "T/x"], ["--count", "0"]]
)
def test_a_wrong_command_line(directory: Path, wrong: list[str]) -> None:
    assert run(directory, *wrong).exit_code == 2
    assert run(directory / "missing").exit_code == 2


# --- verify and repair ----------------------------------------------------------------------------


def command(name: str, *arguments: object) -> Result:
    sizes = ("--hash-slots", "1000", "--index-entries", "100")
    return CliRunner().invoke(cli, ["store", name, *map(str, arguments), *sizes])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A store with a small key index."""
    options = StoreOptions(64 * 1024, 6_000, index_sizes=Sizes(1000, 100))
    store = MessageStore.open(tmp_path / "whole", options, clock=SystemClock())
    for body in (b"a" * 500, b"b" * 500, b"c" * 500):
        encoded = record.encode(b"T", 0, body, b"", born_time_ms=1, born_host=HOST, store_host=HOST)
        store.append(encoded, [("T", 0, 1)], born_host=HOST, store_host=HOST)
    store.close()
    return tmp_path / "whole"


def damaged(whole: Path) -> tuple[int, int]:
    """Its second record is; where from and where to."""
    path = whole / "commitlog" / "00000000000000000000"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:4], "big")
    content[size + 200] ^= 1
    path.write_bytes(content)
    return size, 2 * size


def test_verify_says_when_nothing_is_wrong(whole: Path) -> None:
    result = command("verify", whole)
    assert result.exit_code == 0
    assert "No faults." in result.output
    said = json.loads(command("verify", whole, "--output", "json").stdout)
    assert (said["record_count"], said["queue_count"], said["faults"]) == (3, 1, [])


def test_verify_ends_with_3_and_names_what_is_wrong(whole: Path) -> None:
    start, end = damaged(whole)
    result = command("verify", whole, "--output", "json")
    assert result.exit_code == 3
    fault = json.loads(result.stdout)["faults"][0]
    assert (fault["area"], fault["position"]) == ("log", start)
    assert f"damaged up to {end}" in fault["what"]
    assert f"{start:,}" in command("verify", whole).output


def test_repair_says_what_it_would_lose_and_loses_what_was_named(whole: Path) -> None:
    start, end = damaged(whole)
    refused = command("repair", whole)
    assert refused.exit_code == 1
    assert f"--write-off {start}-{end}" in refused.stderr
    assert "message 1 of queue 0 of T" in refused.stderr
    assert command("repair", whole, "--write-off", "x").exit_code == 2
    done = command("repair", whole, "--write-off", f"{start}-{end}", "--output", "json")
    assert done.exit_code == 0
    [loss] = json.loads(done.stdout)["losses"]
    assert (loss["topic"], loss["first_queue_offset"], loss["message_count"]) == ("T", 1, 1)
    assert command("verify", whole).exit_code == 0
    assert "damaged at" in command("repair", whole).output, "what was lost before is told again"


def test_repair_makes_queues_and_index_anew(whole: Path) -> None:
    shutil.rmtree(whole / "consumequeue")
    assert command("verify", whole).exit_code == 3
    said = command("repair", whole).output
    assert "rebuilt 1 queues and the key index" in said
    assert "No message is missing before the log's end" in said
    assert command("verify", whole).exit_code == 0


def test_a_copy_that_is_called_anew_is_not_said_to_have_everything(whole: Path) -> None:
    """What came behind its end in the original nobody knows."""
    said = command("repair", whole, "--restored").output
    assert "a copy of" in said
    assert "No message was lost" not in said
    assert "No message is missing before the log's end" in said


def test_a_place_of_the_log_is_told(whole: Path) -> None:
    start, end = damaged(whole)
    good = json.loads(run(whole, "--at", 0, "--output", "json").stdout)
    assert (good["kind"], good["goes_on"], good["record"]["topic"]) == ("record", start, "T")
    bad = json.loads(run(whole, "--at", start, "--output", "json").stdout)
    assert (bad["kind"], bad["goes_on"], bad["record"]) == ("bad", end, None)
    assert "BODYCRC" in run(whole, "--at", start).output


def test_the_files_of_the_log_are_listed(whole: Path) -> None:
    [file] = json.loads(run(whole, "--files", "--output", "json").stdout)
    assert (file["start"], file["size_bytes"]) == (0, 64 * 1024)
    assert file["first_store_time_ms"] > 0
