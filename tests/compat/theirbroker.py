"""A whole broker of RocketMQ 5.5.1, driven through ``java/broker/Broker.java``: it delivers timers,
asks about half messages, and gives messages to groups that receive (POP).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.maven import class_path
from tests.compat.rocketmq import BUILD, JAVA, SOURCES, Command
from tests.support.cluster.broker import SMALL_FILES
from tests.support.waiting import wait_until

ROLL_S = 6  # it stores timers once more that are due later than so


class TheirBroker:
    """A running one; each call is answered when the broker has done it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, name: str, /, **fields: object) -> dict[str, Any]:
        """One command. Fields named ``p_NAME`` are properties of a message."""
        texts = {key.replace("p_", "p:", 1): str(value) for key, value in fields.items()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{Command(name, texts)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{name} {texts}: RocketMQ's broker has failed"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, topic: str, body: str, **properties: object) -> dict[str, Any]:
        """To queue 0; the unique id is made of the body."""
        named = {f"p_{name}": value for name, value in properties.items()}
        return self.ask("send", topic=topic, body=body, p_UNIQ_KEY=unique_id(body), **named)

    def bodies(self, topic: str, queue: int = 0) -> list[str]:
        return [body for body, _ in self.messages(topic, queue)]

    def messages(self, topic: str, queue: int = 0) -> list[tuple[str, int]]:
        """(body, store time in ms) of all messages of a queue."""
        found = self.ask("messages", topic=topic, queue=queue)["messages"]
        return [(body, store_ms) for body, store_ms in found]

    def wait_for(self, topic: str, count: int, queue: int = 0, seconds: float = 40) -> None:
        """Until the queue has had so many messages."""
        self.ask("until", topic=topic, queue=queue, count=count, ms=round(seconds * 1000))

    def wait_for_body(self, topic: str, body: str, times: int) -> None:
        """Until queue 0 has a message so many times."""
        wait_until(f"{body} {times} times", lambda: self.bodies(topic).count(body) >= times)


def unique_id(body: str) -> str:
    return f"{body.encode().hex().upper():0>34}"[-34:]


def their_class_path() -> str:
    """Fetched and compiled when something changed. Raises JavaMissing."""
    home = SOURCES / "broker"
    return class_path("broker", home / "pom.xml", [home / "Broker.java"], BUILD)


@contextmanager
def their_broker(folder: Path, log: Path) -> Iterator[TheirBroker]:
    """Runs until the end of the block, and stops in order unless there was an error. What it prints
    goes to ``log``.
    """
    names = ("commit_log", "consume_queue", "timer_log")
    sizes = [str(SMALL_FILES[f"mapped_file_size_{name}"]) for name in names]
    command = [*JAVA, f"-Duser.home={BUILD}", "-cp", their_class_path()]
    command += ["Broker", str(folder), *sizes, str(ROLL_S)]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                yield TheirBroker(process)
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(60) == 0, log.read_text()[-4000:]
            finally:
                process.kill()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
