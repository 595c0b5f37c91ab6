"""The main job of `make run` on a few small files: real processes, real exit status."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.independent.index import Shape
from tests.support.independent.reader import Store

PROJECT = Path(__file__).resolve().parents[2]
LINES = 16_000
RATE = 2_000  # messages a second of a producer
EXTRA = all(importlib.util.find_spec(name) for name in ("pyspark", "pyarrow"))
TOPIC = "stdlib_lines"
INDEX_SHAPE = Shape(slots=100_000, entries=400_000)  # of `cometmq local up`
FILES = {
    "empty.py": b"",
    "no end.txt": "ein\nzwäi".encode(),
    "pkg/dos.bat": b"one\r\n\r\ntwo\r\n",
    "pkg/many.py": b"".join(b"line %d\n" % n for n in range(LINES)),
    "pkg/more.py": b"".join(b"%d, another line\n" % n for n in range(LINES)),
}
# What the report shows of each single message: patterns.
CASES = {
    "dead letter": [
        "it was listed, sent again, and done",
        *(f"consumed  .*by order_workers, failed, .*try {n}" for n in (1, 2, 3)),
        r"dead letter  +by order_workers, g1/\d+",
    ],
    "delayed": [r"delivered \d+ ms after that time", r"delivered  +ok, g1/\d+"],
    "recalled": ["recalled in time", "recalled  +by DEFAULT_PRODUCER, ok"],
    "transaction": [
        "its producer is killed",
        "transaction checked +by cashiers, commit",
        "consumed  +by bookkeepers, ok",
    ],
    "received": [
        "the new writer took the acknowledgement; the group's lag is 0",
        "consumed  +by job_workers, ok",
    ],
    "request": ["the reply has come"],
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, data in {**FILES, "pkg/image.gif": b"GIF89a\xff\xfe"}.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "lib"


def roundtrip(library: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    module = ["-m", "examples.roundtrip", "--root", str(library), "--folder", str(folder)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
    return subprocess.run(
        [sys.executable, *module, *more],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def stored_in(cluster: Path) -> Counter[tuple[str, int, bytes]]:
    """(file, line, body) of every message, by a reader that knows only ``docs/format``. Members
    g1-0, g1-1 … of a group hold the same log: one of them is read.
    """
    found: Counter[tuple[str, int, bytes]] = Counter()
    for folder in cluster.glob("g*-0/store"):
        with Store(folder, INDEX_SHAPE) as store:
            for topic, queue_id in store.queues():
                for message in store.messages(topic, queue_id) if topic == TOPIC else ():
                    name = message.properties["file"]
                    assert message.tag == Path(name).suffix.removeprefix(".")
                    found[name, int(message.properties["line"]), message.body] += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)  # of a machine that does other things too
def test_every_line_comes_back_and_lies_in_the_stores(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lag = [] if EXTRA else ["--no-lag"]
    result = roundtrip(library, folder, "--rate", str(RATE), *lag)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every line came back, byte for byte" in result.stdout
    assert "g1: member 0 handed over to member 1" in result.stdout
    assert "g1: member 1, the writer, was killed; member 0 took over" in result.stdout
    assert "g1: the killed member is back, a follower" in result.stdout
    assert result.stdout.count("bytes in 2 members") == 2
    assert ("queues, counted twice" in result.stdout) == EXTRA
    assert not (folder / "cluster" / "local.json").exists()  # nothing is left running
    stored = stored_in(folder / "cluster")
    assert stored.keys() == {
        (name.replace(" ", "%20"), number, line)
        for name, data in FILES.items()
        for number, line in enumerate(data.splitlines(keepends=True) or [b""])
    }
    (twice,) = re.findall(r"([\d,]+) stored twice", result.stdout)
    assert stored.total() - len(stored) == int(twice.replace(",", ""))
    for case, shown in CASES.items():
        (block,) = re.findall(rf"^✓ {case}: message \w+\n(?:    .*\n)+", result.stdout, re.M)
        assert "--- the writer of g1 is killed ---" in block
        for text in shown:
            assert re.search(text, block), f"{text} is not in:\n{block}"
    assert "messages were sent again, and were stored already" in result.stdout


def test_a_folder_with_other_things_is_left_alone(library: Path) -> None:
    result = roundtrip(library, library)
    assert result.returncode == 1
    assert "holds something else" in result.stdout
    assert (library / "empty.py").exists()
