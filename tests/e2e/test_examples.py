"""The small programs of examples/, each as its first lines say to run it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cometmq.admin import ops
from cometmq.admin.connection import Connection
from cometmq.client import Message
from cometmq.client.sync import Producer
from cometmq.v1 import common_pb2
from tests.support.cluster.processes import Processes
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN_HERE = {"__init__", "stub_python"}  # test_stubs.py
RUN_S_MAX = 60
DUMPED = "Dumped"
CREATED = re.compile(r"cometmq topic create (\w+)")

# What each prints; lines in any order.
PRINTED = {
    "send_many": [
        r"stored 10000, as safe as the topic asks 10000, failed 0",
        r"[\d,]+ messages a second",
        r"not sent: 1004",
    ],
    "blocking": [r"12 images in \d\.\d s by 4 threads"],
    "idempotent": [r"4 messages, 2 payments, balance 750 cents"],
    "retries": [
        r"invoice without an address: try 1",
        r"invoice 7: try 1",
        r"invoice 7: try 2",
    ],
    "reminders": [
        r"order-1 is cancelled after 1\d{3} ms",
        r"order-2 is paid after 1\d{3} ms",
    ],
    "recall": [
        r"order-2 is paid in time",
        r"order-1 is cancelled: nobody paid",
        r"order-3 is cancelled: nobody paid",
    ],
    "request_reply": [r"apple: 30 cents", r"pear: 45 cents", r"plum: 20 cents", r"REQUEST_TIMEOUT"],
    "transactions": [
        r"pears is shipped",
        r"plums is shipped",
        r"apples is shipped",
        r"3 of 3 orders are shipped, each once",
    ],
    "jobs": [rf"job {number} is done" for number in range(6)],
    "message_groups": [r"20 of 20 accounts in order, last: account-7"],
    "by_key": [r"8 of 8 orders in order, 8 failed once"],
    "without_asyncio": [
        r"stored 10 jobs",
        r"refused: TOPIC_NOT_FOUND",
        r"did 10 jobs",
        r"saw 10 jobs",
    ],
    "filters": [
        r"refused: .*",
        r"Sellers: sell 40 in eu",
        r"LargeInEurope: buy 90 in eu",
    ],
}

ONE_LOOP_AFTER_THE_OTHER = """
import asyncio
from cometmq.client import Message, Producer

async def send():
    async with Producer() as producer:
        await producer.send_and_wait(Message("Images", b"one"))
        print("sent")

for _ in range(6):
    asyncio.run(send())
"""

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Example:
    """Runs the programs against a cluster, in a folder of their own."""

    namesrv: str
    folder: Path

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        return self._start(f"examples.{name}", *words)

    def run(self, name: str, *words: str) -> list[str]:
        return ended(self.start(name, *words))

    def cometmq(self, *words: str) -> list[str]:
        return ended(self._start("cometmq.admin", *words))

    def send(self, messages: Iterable[Message]) -> None:
        with Producer(self.namesrv) as producer:
            for message in messages:
                producer.send_and_wait(message)

    def committed(self, group: str) -> int:
        """Messages that the group is done with, in a topic that only it has read."""
        lines = self.cometmq("group", "progress", group, "--output", "json")
        queues = json.loads("".join(lines))["queues"]
        return sum(queue["committed_offset"] or 0 for queue in queues)

    def _start(self, module: str, *words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"COMETMQ_NAMESRV": self.namesrv, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> list[str]:
    """The lines that it printed; it has to end well."""
    try:
        printed, errors = process.communicate(timeout=RUN_S_MAX)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return printed.splitlines()


def topics() -> set[str]:
    """Those that the programs tell their reader to create."""
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    return {name for text in texts for name in CREATED.findall(text)}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    folder = tmp_path_factory.mktemp("examples")
    with Processes(folder) as processes:
        namesrv = processes.service("namesrv", "namesrv", kv_config_path=folder / "namesrv.kv")
        processes.service(
            "g1",
            "broker",
            broker_group="g1",
            namesrv=namesrv.address,
            trace_topic_enable="true",
            internal_port=0,
            store_path=folder / "store",
            mapped_file_size_commit_log=32 * 1024 * 1024,
            max_hash_slot_num=1_000,
            max_index_num=4_000,
        )
        processes.service("pullhold", "pullhold", namesrv=namesrv.address)
        asyncio.run(create(namesrv.address, [*topics(), DUMPED]))
        yield Example(namesrv.address, folder)


async def create(namesrv: str, names: Sequence[str]) -> None:
    async with Connection(namesrv) as connection:
        writers = await connection.writers()
        for name in names:
            wanted = common_pb2.TopicConfig(name=name, read_queue_count=4, write_queue_count=4)
            await ops.put_topic(connection, writers, wanted)


def test_no_two_examples_share_a_topic() -> None:
    """One would see what the other sends."""
    paths = [p for p in (ROOT / "examples").glob("*.py") if p.stem not in NOT_RUN_HERE]
    named = [name for p in paths for name in set(CREATED.findall(p.read_text()))]
    assert sorted(named) == sorted(set(named))


def test_every_example_is_run_by_a_test() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")} - NOT_RUN_HERE
    assert names == PRINTED.keys() | {"service", "exactly_once", "dump", "traced"}


@pytest.mark.parametrize("name", PRINTED)
def test_it_prints_what_it_promises(example: Example, name: str) -> None:
    lines = example.run(name)
    wanted = PRINTED[name]
    assert len(lines) == len(wanted), lines
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)


def test_a_program_runs_one_event_loop_after_the_other(example: Example) -> None:
    """What gRPC hears late of the calls of one loop would make the next one log errors."""
    program = example.folder / "loops.py"
    program.write_text(ONE_LOOP_AFTER_THE_OTHER)
    done = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"COMETMQ_NAMESRV": example.namesrv, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("sent\n" * 6, "")


def test_the_count_is_exact_after_a_second_run(example: Example) -> None:
    runs = [example.run("exactly_once", "clicks.db") for _ in range(2)]
    assert runs == [["1000 clicks"], ["2000 clicks"]]


def test_the_service_ends_with_its_work_committed(example: Example) -> None:
    services = [example.start("service") for _ in range(2)]
    try:
        for service in services:
            assert service.stdout is not None
            assert service.stdout.readline() == "ready\n"
        orders = [f"order-{number}" for number in range(10)]
        example.send(Message("Orders", order.encode()) for order in orders)
        wait_until("all is committed", lambda: example.committed("OrderService") == len(orders))
    finally:
        for service in services:
            service.send_signal(signal.SIGTERM)
    printed = [ended(service) for service in services]
    assert [lines.pop() for lines in printed] == ["committed", "committed"]
    done = [line.split()[1] for lines in printed for line in lines]
    assert sorted(done) == sorted(orders)


def test_a_message_is_traced_from_its_send_to_the_end_of_its_call(example: Example) -> None:
    *spans, command = example.run("traced")
    assert {line.partition(": ")[2] for line in spans} == {"send Parcels", "process Parcels"}
    assert len({line.partition(": ")[0] for line in spans}) == 1, "one trace"
    _, *words = command.split()
    events = json.loads("".join(example.cometmq(*words, "--output", "json")))
    told = [(one["event"], one["source"], one["result"]) for one in events if one["time_ms"]]
    assert sorted(told) == [
        ("consumed", "trace", "ok"),
        ("produced", "trace", "ok"),
        ("stored", "store", "ok"),
    ]


def test_the_dump_has_every_message_once(example: Example) -> None:
    sent = [f"line {number}" for number in range(5)]
    example.send(Message(DUMPED, line.encode(), tag="a", keys=("k",)) for line in sent)
    rows = [json.loads(line) for line in example.run("dump", DUMPED)]
    assert sorted(base64.b64decode(row["body_base64"]).decode() for row in rows) == sent
    assert {(row["tag"], *row["keys"]) for row in rows} == {("a", "k")}
