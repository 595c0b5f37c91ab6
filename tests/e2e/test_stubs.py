"""The bare stubs of examples/ against real processes: users who have gRPC and the contract only.

Each language has a topic of its own with one queue, in which two awkward messages lie already.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from cometmq.errors import TopicNameInvalid, TopicNotFound
from cometmq.format import record, taghash
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient
from tests.support.cluster.processes import Processes, Service

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "examples"
LANGUAGES = {"python": "Python", "node": "JavaScript"}  # stub → what its messages say
TAG, SAME_HASH = "greeting", "hSeeting"
BIG = b"x" * (4 * 1024 * 1024)  # with its frame above what gRPC takes unless told otherwise
SENT = [b"one", b"two", b"three", b"while you were waiting"]
RUN_S_MAX = 50
INSTALL_S_MAX = 100
T = TypeVar("T")

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Cluster:
    """Two name servers know the broker, one of them the pullhold."""

    namesrv: Service
    namesrv_without_pullhold: Service
    broker: Service
    pullhold: Service

    def ask(self, question: Callable[[BrokerClient], Awaitable[T]]) -> T:
        async def answer() -> T:
            client = BrokerClient(self.broker.address, self.broker.internal_address)
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(answer())

    def holds_answered(self) -> int:
        """Holds that the pullhold has answered without an error."""
        with urllib.request.urlopen(f"http://{self.pullhold.metrics_address}/metrics") as answer:
            text: str = answer.read().decode()
        name = "cometmq_hold_duration_seconds_count"
        counts = re.findall(rf'^{name}{{[^}}]*outcome="\w*found"[^}}]*}} (\S+)$', text, re.M)
        assert len(counts) == 2, "found and not_found"
        return int(sum(map(float, counts)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("stubs")
    with Processes(folder) as processes:
        first, second = (
            processes.service(name, "namesrv", kv_config_path=folder / f"{name}.kv")
            for name in ("namesrv-1", "namesrv-2")
        )
        broker = processes.service(
            "g1",
            "broker",
            broker_group="g1",
            namesrv=f"{first.address};{second.address}",
            internal_port=0,
            store_path=folder / "store",
            mapped_file_size_commit_log=32 * 1024 * 1024,
            max_hash_slot_num=1_000,
            max_index_num=4_000,
        )
        pullhold = processes.service("pullhold", "pullhold", namesrv=first.address)
        yield Cluster(first, second, broker, pullhold)


# --- running a stub -----------------------------------------------------------------------------


def installed_node() -> str:
    """The program, with the packages of examples/package-lock.json in examples/node_modules."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing")
    lock, stamp = EXAMPLES / "package-lock.json", EXAMPLES / "node_modules" / ".installed"
    if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
        cache = PROJECT / ".tools" / "npm"
        options = ["--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        done = subprocess.run(
            ["npm", "ci", "--prefix", EXAMPLES, "--cache", cache, *options],
            capture_output=True,
            timeout=INSTALL_S_MAX,
            check=False,
        )
        if done.returncode:
            # In CI what cannot be had is a failure; elsewhere it may be a missing network.
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"npm cannot install examples/package-lock.json {done.stderr.decode()[-500:]}")
        stamp.write_bytes(lock.read_bytes())
    return "node"


def command(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-P", str(EXAMPLES / "stub_python.py")]
    return [installed_node(), str(EXAMPLES / "stub_node.mjs")]


@dataclass(frozen=True)
class Ended:
    """What a stub has answered."""

    code: int
    lines: list[str]
    errors: str

    def found(self, pattern: str) -> list[str]:
        """The group of the pattern in all lines that it matches as a whole."""
        matches = (re.fullmatch(pattern, line) for line in self.lines)
        return [match[1] for match in matches if match]


@dataclass(frozen=True)
class Stub:
    """A user in one language, after the first run."""

    language: str
    command: list[str]
    topic: str
    group: str
    first: Ended
    holds: int  # that were answered meanwhile

    def run(self, namesrv: str, topic: str) -> Ended:
        return run(self.command, namesrv, topic, self.group)


def run(words: list[str], namesrv: str, topic: str, group: str) -> Ended:
    options = ["--namesrv", namesrv, "--topic", topic, "--group", group]
    done = subprocess.run(
        [*words, *options], capture_output=True, timeout=RUN_S_MAX, check=False, text=True
    )
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr)


async def prepare(client: BrokerClient, topic: str) -> None:
    await client.put_topic(topic, queues=1)
    for body, tag in ((BIG, TAG), (b"slips through", SAME_HASH)):
        message = pb.OutgoingMessage(topic=topic, body=body, tag=tag)
        await client.stub.Send(pb.SendRequest(messages=[message]))


@pytest.fixture(scope="module", params=LANGUAGES)
def stub(cluster: Cluster, request: pytest.FixtureRequest) -> Stub:
    language: str = request.param
    words, topic, group = command(language), f"Hello-{language}", f"readers-{language}"
    cluster.ask(lambda client: prepare(client, topic))
    before = cluster.holds_answered()
    first = run(words, cluster.namesrv.address, topic, group)
    return Stub(language, words, topic, group, first, cluster.holds_answered() - before)


# --- what it did --------------------------------------------------------------------------------


def test_it_ends_well(stub: Stub) -> None:
    assert (stub.first.code, stub.first.errors) == (0, ""), "\n".join(stub.first.lines)


def test_what_it_sent_is_stored_field_by_field(stub: Stub, cluster: Cluster) -> None:
    async def stored(client: BrokerClient) -> list[record.Record]:
        answer = await client.pull(stub.topic, 0, 2, max_count=len(SENT))
        return record.decode_all(answer.records)

    found = cluster.ask(stored)
    assert [message.body for message in found] == SENT
    assert {message.tag for message in found} == {TAG}
    assert {message.properties["language"] for message in found} == {LANGUAGES[stub.language]}
    assert [message.keys for message in found] == [(f"key-{number}",) for number in (0, 1, 2, 0)]
    ids = stub.first.found(r"sent: (g1/\d+) to queue 0 @ [2-5]")
    assert ids == [f"g1/{message.log_offset}" for message in found]


def test_it_read_all_that_carries_its_tag(stub: Stub) -> None:
    """The large one too, and not the one whose tag has the same hash."""
    read = stub.first.found(r"read: (.*)")
    assert read == [f"0: {'x' * 40}", "2: one", "3: two", "4: three"]


def test_it_read_what_an_expression_is_true_for(stub: Stub) -> None:
    """Neither the first two, which have no property of the stub's, nor the one with key-1."""
    assert stub.first.found(r"matched: (.*)") == ["[2, 4, 5]"]


def test_the_broker_filters_by_hash(cluster: Cluster, stub: Stub) -> None:
    """Why a stub has to compare tags: docs/protocol.md says so."""
    assert taghash.java_hash(SAME_HASH) == taghash.java_hash(TAG)
    answer = cluster.ask(
        lambda client: client.pull(
            stub.topic,
            0,
            1,
            max_count=1,
            filter=common.Filter(tags=[TAG]),
            form=pb.MESSAGE_FORM_MESSAGES,
        )
    )
    assert [message.tag for message in answer.messages] == [SAME_HASH]


def test_it_was_held_until_the_second_task_sent(stub: Stub) -> None:
    held = stub.first.found(rf"hold: {stub.topic} queue 0 @ (\d+) has nothing yet")
    assert [at for at in held if at < "6"][-1] == "5"
    assert stub.holds == len(stub.first.found(r"hold: (.*) has nothing yet"))
    last = stub.first.found(r"sent: (g1/\d+) to .*")[-1]
    assert stub.first.found(r"held: woken by (.*)") == [f"{last}: {SENT[-1].decode()}"]


def test_it_committed_behind_the_last_message(stub: Stub, cluster: Cluster) -> None:
    said = stub.first.found(rf"committed: {stub.group} at generation (\d+, offset \d+)")
    kept = cluster.ask(lambda client: client.committed(stub.group, stub.topic, 0))
    assert kept is not None
    assert said == [f"{kept.generation}, offset 6"]


def test_it_received_and_acknowledged(stub: Stub, cluster: Cluster) -> None:
    assert stub.first.found(r"received: (.*)") == [
        "['one', 'two'], attempt 1, once more: True",
        "the old handle gets HANDLE_INVALID, all is done before 4",
    ]
    kept = cluster.ask(lambda client: client.committed(f"{stub.group}-pop", stub.topic, 0))
    assert kept is not None


def test_it_sent_for_later_and_took_one_back(stub: Stub, cluster: Cluster) -> None:
    assert stub.first.found(r"delayed: (.*)") == ["in a second, waited: True, other recalled: True"]
    bodies = cluster.ask(lambda client: client.bodies(stub.topic, 0))
    assert bodies.count(b"in a second") >= 1
    assert b"never" not in bodies


def test_it_ended_transactions_by_itself_and_when_it_was_asked(
    stub: Stub, cluster: Cluster
) -> None:
    assert stub.first.found(r"checked: (.*)") == ["the second: True, asked 1 times"]
    assert stub.first.found(r"transactions: (.*)") == ["committed, asked about"]
    request = pb.QueryHalvesRequest(producer_group=f"{stub.group}-payers")

    async def open_halves(client: BrokerClient) -> int:
        return len((await client.admin.QueryHalves(request)).halves)

    assert cluster.ask(open_halves) == 0


def test_it_read_in_order_under_a_lock(stub: Stub, cluster: Cluster) -> None:
    assert stub.first.found(r"locked: (.*)") == [
        "client-1 has the queue, client-2 gets QUEUE_LOCKED",
        "client-1 reads 2, commits 6",
        "client-2 has the queue, client-1 gets QUEUE_LOCKED",
    ]
    queue = common.QueueRef(topic=stub.topic, queue_id=0)

    async def lock(client: BrokerClient) -> pb.LockResult:
        request = pb.LockQueuesRequest(group=stub.group, client_id="other", queues=[queue])
        answer = await client.stub.LockQueues(request)
        await client.stub.UnlockQueues(
            pb.UnlockQueuesRequest(group=stub.group, client_id="other", queues=[queue])
        )
        return answer.results[0]

    assert not cluster.ask(lock).HasField("error"), "it has unlocked the queue"


def test_it_went_on_where_its_group_was_reset_to(stub: Stub, cluster: Cluster) -> None:
    assert stub.first.found(r"reset: (.*)") == [
        "a late commit gets OFFSET_RESET: go on at 4",
        "2 messages again, committed 6",
    ]


def test_it_sent_a_message_back_until_it_was_a_dead_letter(stub: Stub, cluster: Cluster) -> None:
    text = SENT[-1].decode()
    assert stub.first.found(r"again: (.*)") == [f"{text} of {stub.topic}, sent back 1 times"]
    assert stub.first.found(r"dead letter: (.*)") == [text]
    dead = cluster.ask(lambda client: client.bodies(f"%DLQ%{stub.group}", 0))
    assert dead[0] == SENT[-1]


def test_it_told_why_it_was_refused(stub: Stub) -> None:
    error = TopicNameInvalid("'../x' is not a topic name")
    assert stub.first.found(r"refused: (.*)") == [
        f"{error.status}, {error.code} {error.name()}, RETRY_{error.retry.name}",
        f"message 0: {error.message}. {error.advice}",
    ]


def test_it_goes_on_at_its_commit_and_polls_without_a_pullhold(
    stub: Stub, cluster: Cluster
) -> None:
    assert stub.first.code == 0
    again = stub.run(cluster.namesrv_without_pullhold.address, stub.topic)
    assert (again.code, again.errors) == (0, ""), "\n".join(again.lines)
    assert again.found(r"read: (.*)") == ["9: one", "10: two", "11: three"]
    assert not again.found(r"(hold: .*)")
    assert len(again.found(r"(held: .*)")) == 1
    assert len(again.found(r"reset: (.*)")) == 2, "after an earlier reset, too"


def test_a_topic_that_is_not_there(stub: Stub, cluster: Cluster) -> None:
    ended = stub.run(cluster.namesrv.address, "Nope")
    assert (ended.code, ended.lines) == (1, [])
    assert TopicNotFound.name() in ended.errors


def test_nobody_answers(stub: Stub) -> None:
    ended = stub.run("127.0.0.1:1", stub.topic)
    assert (ended.code, ended.lines) == (1, [])
    assert "UNAVAILABLE" in ended.errors


# --- what it is made of -------------------------------------------------------------------------


def test_python_needs_grpc_and_the_generated_stubs_only() -> None:
    names = set()
    for node in ast.walk(ast.parse((EXAMPLES / "stub_python.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    foreign = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"grpc", "cometmq.v1"}


def test_node_needs_two_packages_only() -> None:
    text = (EXAMPLES / "stub_node.mjs").read_text()
    modules = set(re.findall(r"\b(?:from|import) '([^']*)'", text))
    packages = {name for name in modules if not name.startswith("node:")}
    assert packages == {"@grpc/grpc-js", "@grpc/proto-loader"}
    asked = json.loads((EXAMPLES / "package.json").read_text())["dependencies"]
    assert asked.keys() == packages
    locked = json.loads((EXAMPLES / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in asked} == asked
    assert all("integrity" in entry for name, entry in locked.items() if name)
    assert not any("resolved" in entry for entry in locked.values()), "npm asks its own registry"
