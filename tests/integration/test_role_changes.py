"""A process whose member changes its role again and again, while clients send and read."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from cometmq.errors import LeaseConflict
from cometmq.member import main
from cometmq.member.app import MemberApp
from cometmq.member.lease.stores import FileLease
from cometmq.member.role_change import FOLLOWER_MODULE, WRITER_MODULE, RoleChange
from cometmq.messaging.state import BrokerState
from cometmq.replication.lease import LeaseRecord
from cometmq.rpc.memory import resident_bytes
from cometmq.rpc.process import Main, StopSignal, release, run
from cometmq.rpc.server import RpcServer
from cometmq.store.base import BaseStore
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2
from tests.support.cluster.broker import ANY_DISK, SMALL_FILES
from tests.support.waiting import wait_until

OF_A_ROLE = (MemberApp, RpcServer, BaseStore, BrokerState, asyncio.TaskGroup)
GROUP, TOPIC = "g1", "T"
WARM_UP = 8  # roles, until caches are filled
CONNECTIONS_MAX = 12  # that clients may have more or less
MEMORY_BYTES_MAX = 24 * 1024 * 1024


class Left(NamedTuple):
    """What is there when a role begins, of those before it."""

    module: str
    tasks: int
    threads: list[str]
    store_files: list[str]
    objects: list[str]
    frozen: int  # objects that no collector looks at
    other_files: int  # and connections
    resident_bytes: int


class Roles:
    """Runs the roles of a member and counts what each has left."""

    def __init__(self, store: Path) -> None:
        self.left: list[Left] = []
        self._store = store
        self._tasks = 0
        release()  # what other tests have settled shows again
        self._of_other_tests = _objects_of_roles()

    def watched(self, part: partial[Any]) -> Main:
        async def role(stop: StopSignal) -> Main | None:
            self._count(*part.args)
            following = await part(stop)
            self._tasks = len(asyncio.all_tasks()) - 1
            assert following is None or isinstance(following, partial)
            return None if following is None else self.watched(following)

        return role

    def _count(self, module: str, before: RoleChange | None) -> None:
        known = [*self._of_other_tests, None if before is None else before.store]
        paths = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # of the listing itself
                paths.append(os.readlink(f"/proc/self/fd/{number}"))
        self.left.append(
            Left(
                module,
                self._tasks,
                [one.name for one in threading.enumerate() if not one.daemon],
                [path for path in paths if path.startswith(f"{self._store}/")],
                [
                    type(one).__name__
                    for one in _objects_of_roles()
                    if not any(one is other for other in known)
                ],
                gc.get_freeze_count(),
                sum(not path.startswith(f"{self._store}/") for path in paths),
                resident_bytes(),
            )
        )


def _objects_of_roles() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, OF_A_ROLE)]


class Outside:
    """Another member that takes the lease and gives it back, and clients, in threads."""

    def __init__(self, announced: Path, lease: FileLease) -> None:
        self.sent = 0
        self._announced = announced
        self._addresses: dict[str, str] = {}
        self._lease = lease
        self._ended = threading.Event()

    def run(self, changes: int) -> None:
        """Let the role change so often, then stop the process."""
        clients = [threading.Thread(target=self._repeat, args=(call,)) for call in self._calls()]
        for client in clients:
            client.daemon = True
        try:
            self._until_ready()
            for client in clients:
                client.start()
            for _ in range(changes // 2):
                self._change(self._to_another)
                self._change(self._back)
        finally:
            self._ended.set()
            for client in clients:
                client.join()
            os.kill(os.getpid(), signal.SIGTERM)

    def _change(self, turn: Callable[[LeaseRecord], LeaseRecord]) -> None:
        sent = self.sent

        async def write() -> None:
            while True:
                reading = await self._lease.read()
                assert reading.record is not None
                with suppress(LeaseConflict):  # it was renewed
                    await self._lease.write(turn(reading.record), reading.version)
                    return

        asyncio.run(write())
        self._until_ready()
        if turn == self._back:
            wait_until("a send", lambda: self.sent > sent)

    def _to_another(self, ours: LeaseRecord) -> LeaseRecord:
        self._ours = ours
        other = replace(ours, holder_id=9, holder_store_id="9" * 32, in_sync=(), electable=())
        return replace(other, holder_address="")

    def _back(self, _: LeaseRecord) -> LeaseRecord:
        return self._ours

    def _until_ready(self) -> None:
        wait_until("a role", self._announced.exists)
        self._addresses = json.loads(self._announced.read_text())
        self._announced.unlink()

    def _repeat(self, call: Callable[[], None]) -> None:
        while not self._ended.wait(0.001):
            with suppress(grpc.RpcError, OSError):
                call()

    def _calls(self) -> list[Callable[[], None]]:
        return [self._send, self._pull, self._scrape]

    def _send(self) -> None:
        with grpc.insecure_channel(self._addresses["internal_address"]) as channel:
            topic = common_pb2.TopicConfig(name=TOPIC, read_queue_count=1, write_queue_count=1)
            admin = broker_pb2_grpc.BrokerAdminServiceStub(channel)
            admin.PutTopic(broker_pb2.PutTopicRequest(topic=topic), timeout=5)
        message = broker_pb2.OutgoingMessage(topic=TOPIC, queue_id=0, body=b"x" * 1000)
        with grpc.insecure_channel(self._addresses["address"]) as channel:
            stub = broker_pb2_grpc.BrokerServiceStub(channel)
            while not self._ended.is_set():
                stub.Send(broker_pb2.SendRequest(messages=[message]), timeout=5)
                self.sent += 1

    def _pull(self) -> None:
        with grpc.insecure_channel(self._addresses["address"]) as channel:
            stub = broker_pb2_grpc.BrokerServiceStub(channel)
            queue = common_pb2.QueueRef(topic=TOPIC, queue_id=0)
            stub.Pull(broker_pb2.PullRequest(queue=queue, max_count=32), timeout=5)

    def _scrape(self) -> None:
        urllib.request.urlopen(f"http://{self._addresses['metrics_address']}/", timeout=5).close()


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Left]]:
    """Plays so many changes of role of one process; what was left before each role."""
    announced, lease = tmp_path / "announced.json", tmp_path / "lease.json"
    options: dict[str, object] = {
        "listen_host": "127.0.0.1",
        "store_path": tmp_path / "store",
        "broker_group": GROUP,
        "lease": lease.as_uri(),
        "lease_renew_s": 0.1,
        "lease_poll_s": 0.05,
        "announce_file": announced,
        "port": 0,
        "internal_port": 0,
        "metrics_port": 0,
        **SMALL_FILES,
        **ANY_DISK,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["haslave", *flags])
    monkeypatch.setattr(main, "delay_s", lambda *_: 0.0)  # nobody waits for a to and fro

    def play(changes: int) -> list[Left]:
        found = Roles(tmp_path / "store")
        outside = Outside(announced, FileLease(lease, GROUP))
        errors: list[BaseException] = []

        def drive() -> None:
            try:
                outside.run(changes)
            except BaseException as error:
                errors.append(error)

        driver = threading.Thread(target=drive, daemon=True)
        driver.start()
        assert run(found.watched(partial(main.live, FOLLOWER_MODULE, None))) == 0
        driver.join()
        assert not errors, errors
        return found.left

    return play


@pytest.mark.parametrize("changes", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_of_a_role_lives_in_the_next(
    roles: Callable[[int], list[Left]], changes: int
) -> None:
    left = roles(changes)
    assert [one.module for one in left[:3]] == [FOLLOWER_MODULE, WRITER_MODULE, FOLLOWER_MODULE]
    assert len(left) > changes
    main_thread = threading.main_thread().name
    for one in left[1:]:
        assert (one.tasks, one.threads) == (0, [main_thread]), one
        assert (one.objects, one.frozen) == ([], 0), one
        assert bool(one.store_files) == (one.module == WRITER_MODULE), "a writer's store is open"
    known = left[min(WARM_UP, changes // 2)]
    assert abs(left[-1].other_files - known.other_files) <= CONNECTIONS_MAX, left
    if changes > WARM_UP:
        assert left[-1].resident_bytes - known.resident_bytes < MEMORY_BYTES_MAX, left
