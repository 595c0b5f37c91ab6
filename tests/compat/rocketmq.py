"""The store of Apache RocketMQ, driven through ``java/Driver.java``: what it writes and what it
reads.

Its jars come from Maven (``java/<version>/pom.xml``) and, with the compiled driver, lie under
``build/compat``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cometmq.client import ByConfig, ByMachineRoom, MachineRoomNearby, QueueRef, Strategy
from scripts.maven import class_path

SOURCES = Path(__file__).parent / "java"
BUILD = Path(__file__).resolve().parents[2] / "build" / "compat"
VERSIONS = ("v4", "v5")  # 4.9.8 and 5.5.1

RUN_S_MAX = 60
HOST = "127.0.0.1 10911"
JAVA = (
    *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
    # Without verification 5.x loads no jars that it does not use here.
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
    *("--add-opens", "java.base/java.nio=ALL-UNNAMED"),
    *("--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"),
    *("--add-exports", "java.base/jdk.internal.ref=ALL-UNNAMED"),
)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the driver's input."""

    name: str
    fields: dict[str, str]

    def __str__(self) -> str:
        text = "\t".join([self.name, *(f"{name}={value}" for name, value in self.fields.items())])
        assert "\n" not in text
        return text


def put(
    topic: str,
    queue_id: int,
    body: bytes,
    *,
    properties: dict[str, str] | None = None,
    born: str = HOST,
    store: str = HOST,
    **numbers: int,
) -> Command:
    """A message. ``numbers``: flag, sys, reconsume, prepared."""
    fields = {"topic": topic, "queue": str(queue_id), "body": body.hex()}
    fields |= {"born": born, "store": store}
    fields |= {name: str(number) for name, number in numbers.items()}
    return Command("put", fields | {f"p:{k}": v for k, v in (properties or {}).items()})


def batch(topic: str, queue_id: int, bodies: Sequence[bytes]) -> Command:
    """A batch as RocketMQ's client sends it; the messages' keys are ``key-<body in hex>``."""
    hexed = ",".join(body.hex() for body in bodies)
    return Command("batch", {"topic": topic, "queue": str(queue_id), "bodies": hexed})


def topic(
    name: str,
    queue_count: int = 4,
    permission: int = 6,
    *,
    is_ordered: bool = False,
    attributes: Mapping[str, str] | None = None,
) -> Command:
    """``attributes`` as its tools set them, ``+name``; 4.9 knows none."""
    count = str(queue_count)
    fields = {"name": name, "read": count, "write": count, "perm": str(permission)}
    fields |= {"order": "1"} if is_ordered else {}
    return Command("topic", fields | {f"p:{k}": v for k, v in (attributes or {}).items()})


def group(name: str, retries: int = 16) -> Command:
    return Command("group", {"name": name, "retries": str(retries)})


def offset(group_name: str, topic_name: str, queue_id: int, offset_number: int) -> Command:
    fields = {"group": group_name, "topic": topic_name}
    return Command("offset", fields | {"queue": str(queue_id), "offset": str(offset_number)})


HALT = Command("halt", {})


class RocketMq:
    """One version of it, with files of small sizes."""

    def __init__(self, version: str, log_file_bytes: int, queue_file_bytes: int) -> None:
        self.version = version
        self._sizes = (str(log_file_bytes), str(queue_file_bytes))
        self._classpath = build(version)

    def write(self, directory: Path, commands: Iterable[Command]) -> list[Line]:
        """Open, write, close in order, unless a command says otherwise; an answer per command."""
        return self._run("write", directory, commands)

    def read(self, directory: Path) -> Listing:
        """Open, list everything, close."""
        return Listing(self._run("read", directory, []))

    def config(self, directory: Path, commands: Iterable[Command] = ()) -> dict[str, str]:
        """What it understands of ``config/*.json``, by file, before it takes the commands and
        writes them.
        """
        tables = self._run("config", directory, commands)
        assert all(table["loaded"] == "true" for table in tables), tables
        return {table["file"]: table["understood"] for table in tables}

    def deliver(self, directory: Path, seconds: float) -> None:
        """Open, deliver delayed messages as they get due, close in order."""
        self._run("deliver", directory, [], str(round(seconds * 1000)))

    @contextmanager
    def writing(self, directory: Path) -> Iterator[subprocess.Popen[str]]:
        """A process that writes, to be killed; its streams are those of the driver."""
        with subprocess.Popen(
            self._command("write", directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def _command(self, word: str, directory: Path) -> list[str]:
        home = f"-Duser.home={BUILD}"
        return [*JAVA, home, "-cp", self._classpath, "Driver", word, str(directory), *self._sizes]

    def _run(
        self, word: str, directory: Path, commands: Iterable[Command], *more: str
    ) -> list[Line]:
        asked = list(commands)
        done = subprocess.run(
            [*self._command(word, directory), *more],
            input="".join(f"{command}\n" for command in asked),
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
        halts = HALT in asked
        assert done.returncode == (9 if halts else 0), f"{self.version} {word}: {done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]


class Listing:
    """What RocketMQ read of a folder."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        (end,) = of_kind(lines, "end")
        self.log = (end["min"], end["max"])
        self.bounds = {
            (line["topic"], line["queue"]): (line["min"], line["max"])
            for line in of_kind(lines, "queue")
        }
        self.messages = of_kind(lines, "message")
        self.queries = {
            (line["topic"], line["key"]): [int(at) for at in line["offsets"].split(",") if at]
            for line in of_kind(lines, "query")
        }


def of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


# --- building -------------------------------------------------------------------------------------


def build(version: str) -> str:
    """The class path of one version and its driver; fetched and compiled when something changed."""
    sources = [*sorted(SOURCES.glob("*.java")), SOURCES / version / "Engine.java"]
    return class_path(version, SOURCES / version / "pom.xml", sources, BUILD)


def filter_verdicts(cases: Iterable[tuple[str, dict[str, str]]]) -> list[str]:
    """What RocketMQ's SQL92 filter says of each expression and a message with these properties:
    true, false, null, error, or refused.
    """
    lines = [
        "\t".join(
            text.encode().hex()
            for text in (expression, *(t for pair in properties.items() for t in pair))
        )
        for expression, properties in cases
    ]
    return _check("filter", "FilterCheck", lines)


def allocations(
    cases: Iterable[tuple[Strategy, str, Sequence[str], Sequence[QueueRef]]],
) -> list[list[QueueRef]]:
    """The queues that RocketMQ's strategy gives a member, of these members and queues."""
    lines = [
        "\t".join(
            (
                _strategy_text(strategy),
                member,
                ",".join(members),
                _queues_text(queues),
            )
        )
        for strategy, member, members, queues in cases
    ]
    return [
        [
            QueueRef(topic, int(queue_id), broker_group)
            for topic, broker_group, queue_id in (one.split("/") for one in line.split(",") if one)
        ]
        for line in _check("allocation", "AllocationCheck", lines)
    ]


def _strategy_text(strategy: Strategy) -> str:
    match strategy:
        case ByConfig():
            return f"config:{_queues_text(strategy.queues)}"
        case ByMachineRoom():
            return f"machine_room:{','.join(strategy.rooms)}"
        case MachineRoomNearby():
            return f"nearby:{_strategy_text(strategy.strategy)}"
    return strategy.label


def _queues_text(queues: Iterable[QueueRef]) -> str:
    return ",".join(f"{one.topic}/{one.broker_group}/{one.queue_id}" for one in queues)


def _check(name: str, program: str, lines: Sequence[str]) -> list[str]:
    """What a Java program answers, a line for each line."""
    folder = SOURCES / name
    classpath = class_path(name, folder / "pom.xml", [folder / f"{program}.java"], BUILD)
    done = subprocess.run(
        [*JAVA, "-cp", classpath, program],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=True,
    )
    answers = done.stdout.splitlines()
    assert len(answers) == len(lines), done.stderr
    return answers
