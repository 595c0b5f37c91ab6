"""The real command against a real cluster: processes, files, gRPC. One cluster for all tests. Each
way of a command to end is played as a process, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cometmq.admin.commandline import DEFAULT_DIRECTORY
from cometmq.client import Message, Producer
from cometmq.errors import TopicNotFound
from tests.support.cluster.command import command_json, run_command

TIMEOUT_S = 50

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Shell:
    """Runs commands as a user does who stands in ``directory``."""

    directory: Path

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=self.directory,
            env=environment,
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def cometmq(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return self.run("-m", "cometmq.admin", *arguments, stdin=stdin)

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """The JSON that a command answers, which has to succeed and to keep silent otherwise. Those
        that start no processes run in this one.
        """
        if arguments[0] != "local":
            return command_json(self.directory / DEFAULT_DIRECTORY, *arguments, stdin=stdin)
        return self.json_of_a_process(*arguments)

    def json_of_a_process(self, *arguments: str, stdin: bytes = b"") -> Any:
        done = self.cometmq(*arguments, "--output", "json", stdin=stdin)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
        return json.loads(done.stdout)

    def error(self, *arguments: str) -> Any:
        """The error that a command is refused with."""
        result = run_command(self.directory / DEFAULT_DIRECTORY, *arguments, "--output", "json")
        assert (result.exit_code, result.stdout) == (1, ""), result
        return json.loads(result.stderr)["error"]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A user in a folder with a local cluster: one name server, two brokers, topic T."""
    user = Shell(tmp_path_factory.mktemp("e2e"))
    try:
        up = user.cometmq("local", "up", "--brokers", "2")
        assert up.returncode == 0, up.stderr.decode()
        user.json_of_a_process("topic", "create", "T", "--queues", "2")
        yield user
    finally:
        user.cometmq("local", "down")


def test_what_is_up(shell: Shell) -> None:
    view = shell.json("local", "status")
    assert [(p["name"], p["alive"]) for p in view["processes"]] == [
        ("namesrv-1", True),
        ("g1", True),
        ("g2", True),
    ]
    members = shell.json("cluster", "members")
    assert [(m["broker_group"], m["role"], m["reachable"]) for m in members] == [
        ("g1", "writer", True),
        ("g2", "writer", True),
    ]


def test_up_again_changes_nothing(shell: Shell) -> None:
    before = shell.json("local", "status")
    assert shell.json("local", "up", "--brokers", "2") == before


def test_a_topic_from_birth_to_death(shell: Shell) -> None:
    created = shell.json("topic", "create", "Brief", "--queues", "3", "--flush", "sync")
    assert [(t["broker_group"], t["created"]) for t in created] == [("g1", True), ("g2", True)]
    assert {t["flush_mode"] for t in created} == {"sync"}
    again = shell.json("topic", "create", "Brief", "--queues", "4")
    assert {(t["created"], t["read_queue_count"]) for t in again} == {(False, 4)}
    assert "Brief" in {t["topic"] for t in shell.json("topic", "list")}
    assert len(shell.json("topic", "route", "Brief")) == 2
    assert len(shell.json("topic", "status", "Brief")) == 8
    deleted = shell.json("topic", "delete", "Brief", "--yes")
    assert [t["broker_group"] for t in deleted] == ["g1", "g2"]
    assert "Brief" not in {t["topic"] for t in shell.json("topic", "list")}
    assert shell.error("topic", "status", "Brief")["name"] == "TOPIC_NOT_FOUND"


def test_a_topic_is_typed_ordered_and_shrunk(shell: Shell) -> None:
    """Over a proved connection: the local cluster has a secret, which name servers want too."""
    shell.json("topic", "create", "Kept", "--queues", "3", "--message-type", "fifo", "--ordered")
    refused = shell.error("message", "send", "Kept", "x")
    assert refused["name"] == "MESSAGE_TYPE_MISMATCH"
    queues = shell.json("topic", "order", "Kept")
    assert [(q["broker_group"], q["queue_count"]) for q in queues] == [("g1", 3), ("g2", 3)]
    updated = shell.json("topic", "update", "Kept", "--message-type", "mixed")
    settings = {(t["message_type"], t["is_ordered"], t["read_queue_count"]) for t in updated}
    assert settings == {("mixed", True, 3)}
    fixed = shell.json("topic", "order", "Kept", "--set", "g2:2;g1:3")
    assert [(q["broker_group"], q["queue_count"]) for q in fixed] == [("g2", 2), ("g1", 3)]

    shell.json("message", "send", "Kept", "x", "--queue", "g1/2")
    shell.json("group", "create", "Behind")
    shell.json("group", "reset-offset", "Behind", "Kept", "--to-first")
    waits = shell.cometmq(
        *("topic", "shrink", "Kept", "--queues", "1", "--timeout", "0", "--output", "json")
    )
    assert waits.returncode == 3
    waiting = {row["broker_group"]: row["waiting"] for row in json.loads(waits.stdout)}
    assert waiting == {"g1": {"Behind": 1}, "g2": {}}
    assert "Behind" in json.loads(waits.stderr)["warning"]
    shell.json("group", "skip", "Behind", "Kept")
    shrunk = shell.json("topic", "shrink", "Kept", "--queues", "1")
    assert {(t["read_queue_count"], t["write_queue_count"]) for t in shrunk} == {(1, 1)}
    ids = ("--client-id", "b", "--client-id", "a")
    rows = shell.json("topic", "allocate", "Kept", *ids)
    assert [(r["client_id"], r["broker_group"]) for r in rows] == [("a", "g1"), ("b", "g2")]


def test_a_message_there_and_back(shell: Shell) -> None:
    sent = shell.json(
        *("message", "send", "T", "first light", "--tag", "greeting"),
        *("--key", "k1", "--key", "k2", "--property", "colour=blue", "--queue", "g2/1"),
    )
    assert (sent["broker_group"], sent["queue_id"]) == ("g2", 1)
    consumed = shell.cometmq("message", "consume", "T", "--tag", "greeting", "--output", "json")
    [found] = [json.loads(line) for line in consumed.stdout.splitlines()]
    assert found["body_text"] == "first light"
    assert (found["tag"], found["keys"]) == ("greeting", ["k1", "k2"])
    assert found["properties"]["colour"] == "blue"
    assert shell.json("message", "get", sent["message_id"]) == found
    assert shell.json("message", "query", "--topic", "T", "--key", "k2") == [found]
    assert shell.json("message", "query", "--topic", "T", "--key", "k3") == []
    rows = shell.json("topic", "offset-by-time", "T", str(sent["store_time_ms"]))
    here = next(r for r in rows if (r["broker_group"], r["queue_id"]) == ("g2", 1))
    assert (here["offset"], here["store_time_ms"]) == (
        sent["queue_offset"],
        sent["store_time_ms"],
    )


def test_bytes_from_standard_input(shell: Shell) -> None:
    body = bytes(range(256)) * 300
    send = ("message", "send", "T", "--file", "-")
    sent = shell.json_of_a_process(*send, stdin=body)  # enough to be synced soon
    found = shell.json("message", "get", sent["message_id"])
    assert found["body_bytes"] == len(body)
    assert found["body_text"] is None


def test_a_refusal_ends_the_process_with_1(shell: Shell) -> None:
    done = shell.cometmq("topic", "create", "../x", "--output", "json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["error"]["name"] == "TOPIC_NAME_INVALID"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("topic create ../x", "TOPIC_NAME_INVALID"),
        ("topic create Huge --queues 100000", "QUEUE_COUNT_INVALID"),
        ("topic delete NotThere --yes", "TOPIC_NOT_FOUND"),
        ("topic delete rmq_sys_cometmq_state --yes", "NO_PERMISSION"),
        ("topic route NotThere", "TOPIC_NOT_FOUND"),
        ("topic create T --broker-group g9", "GROUP_NOT_FOUND"),
        ("group progress NotThere", "GROUP_NOT_FOUND"),
        ("message send NotThere x", "TOPIC_NOT_FOUND"),
        ("message send T x --property DELAY=3", "PROPERTY_RESERVED"),
        ("message get nonsense", "MESSAGE_ID_INVALID"),
        ("message get g1/99999999", "MESSAGE_NOT_FOUND"),
        ("local up --brokers 5", "CLUSTER_RUNNING"),
    ],
)
def test_refusals_have_their_name(shell: Shell, arguments: str, name: str) -> None:
    error = shell.error(*arguments.split())
    assert error["name"] == name
    assert error["advice"]


def test_the_store_is_readable_beside_the_broker(shell: Shell) -> None:
    shell.json("message", "send", "T", "dumped", "--queue", "g1/0")
    store = str(shell.directory / DEFAULT_DIRECTORY / "g1/store")
    view = shell.json("store", "dump", store)
    assert view["in_use_or_crashed"]
    assert ("T", 0) in {(q["topic"], q["queue_id"]) for q in view["queues"]}
    records = shell.json("store", "dump", store, "--records", "--count", "1000")
    assert ("T", len(b"dumped")) in {(r["topic"], r["body_bytes"]) for r in records}


def test_a_missing_topic_has_one_advice(shell: Shell) -> None:
    told = shell.error("message", "send", "NotThere", "x")
    namesrv = shell.json("local", "status")["namesrv"]

    async def send() -> None:
        async with Producer(namesrv) as producer:
            await producer.send(Message("NotThere", b"x"))

    with pytest.raises(TopicNotFound) as refused:
        asyncio.run(send())
    assert (refused.value.message, refused.value.advice) == (told["message"], told["advice"])
    assert told["advice"] in str(refused.value)
    assert "cometmq topic create" in told["advice"]


def test_a_killed_broker_comes_back_with_its_messages(shell: Shell) -> None:
    sent = shell.json("message", "send", "T", "survivor", "--queue", "g1/1")
    [broker] = [p for p in shell.json("local", "status")["processes"] if p["name"] == "g1"]
    os.kill(broker["pid"], 9)
    view = shell.json("local", "up", "--brokers", "2")
    [again] = [p for p in view["processes"] if p["name"] == "g1"]
    assert again["alive"]
    assert (again["address"], again["pid"] == broker["pid"]) == (broker["address"], False)
    assert again["metrics_address"] == broker["metrics_address"]
    assert shell.json("message", "get", sent["message_id"])["body_text"] == "survivor"


def test_down_stops_everything_and_keeps_the_data(shell: Shell) -> None:
    sent = shell.json("message", "send", "T", "kept", "--queue", "g1/0")
    assert shell.json("local", "down")["stopped_count"] == 3
    assert shell.json("local", "status")["processes"] == []
    done = shell.cometmq("topic", "list")
    assert done.returncode == 2
    assert b"cometmq local up" in done.stderr
    refused = shell.error("local", "up", "--slaves", "1")
    assert refused["name"] == "SHAPE_CONFLICT"
    assert "--brokers 2 --slaves 0" in refused["message"]
    assert "--dir" in refused["advice"]
    assert shell.cometmq("local", "up").returncode == 0
    assert shell.json("message", "get", sent["message_id"])["body_text"] == "kept"


@pytest.mark.parametrize("arguments", ["--help", "topic list --help", "--version"])
def test_output_without_room_is_an_error_and_a_closed_pipe_is_none(arguments: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m cometmq.admin {arguments}"
    full = subprocess.run(
        f"{command} >/dev/full", shell=True, stderr=subprocess.PIPE, text=True, timeout=30
    )
    assert full.returncode == 1
    assert full.stderr == "error: the output is not complete: no space is left where it goes\n"
    closed = subprocess.run(
        f"{command} | true", shell=True, stderr=subprocess.PIPE, text=True, timeout=30
    )
    assert closed.stderr == ""
