"""Clients that ask and do not read: every service stays small, serves the others, and says little.

The client is our own, on bare sockets (``tests/support/faults/hostile_http2.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

from cometmq.rpc.descriptors import raise_limit
from cometmq.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    hold_pb2,
    hold_pb2_grpc,
    member_pb2,
    namesrv_pb2,
    namesrv_pb2_grpc,
)
from tests.support.cluster.broker import ANY_DISK
from tests.support.cluster.processes import Processes, Service
from tests.support.faults.hostile_http2 import HostileConnection, hostile_connections, rss_mib
from tests.support.waiting import wait_until

MIB = 1024 * 1024
TOPICS = 5_000
DEADLINE_S = 60.0
# Without limits 400 answers of 4 MB, each held twice, would be 3 GiB. On a busy machine gRPC gives
# the buffers of a name server's many small answers back late: 265 MiB have been seen.
CONNECTIONS, CALLS, GROWTH_MIB_MAX = 20, 20, 400.0
# An attack of the size that was promised, and what may be left of it, with a margin.
MANY, MANY_CALLS, RSS_MIB_MAX, LEFT_MIB_MAX = 1_000, 100, 300.0, 80.0

FAT = broker_pb2.PullRequest(
    queue=common_pb2.QueueRef(topic="fat", queue_id=0),
    position=common_pb2.Position(offset=0),
    max_count=100,
    max_bytes=4 * MIB,
)
SMALL = broker_pb2.PullRequest(
    queue=common_pb2.QueueRef(topic="small", queue_id=0), position=common_pb2.Position(offset=0)
)
HOLD = hold_pb2.HoldRequest(broker_group="g1", pull=FAT, hold_ms=1_000)
WATCH = namesrv_pb2.WatchRoutesRequest(add=[f"topic-{n:06d}-of-many" for n in range(500)])


class Cluster:
    """One process of each service, with something large to ask for at each."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        impatient = {"unread_s_max": 2}
        self.namesrv = processes.service(
            "namesrv",
            "namesrv",
            **impatient,
            kv_config_path=self.path("kv.json"),
            member_silence_max_s=3_600,
        )
        self.broker = processes.service(
            "broker",
            "broker",
            **impatient,
            **ANY_DISK,
            internal_port=0,
            broker_group="g1",
            store_path=self.path("store"),
            mapped_file_size_commit_log=32 * MIB,
            max_hash_slot_num=64,
            max_index_num=256,
            auto_create_topic_enable="true",
            default_topic_queue_nums=1,
            flush_disk_type="SYNC_FLUSH",
            namesrv=self.namesrv.address,
            register_namesrv_period=1_000,
        )
        self.pullhold = processes.service(
            "pullhold", "pullhold", **impatient, namesrv=self.namesrv.address
        )
        self._channels = [_channel(s.address) for s in (self.namesrv, self.broker, self.pullhold)]
        self.names = namesrv_pb2_grpc.NameServiceStub(self._channels[0])
        self.messages = broker_pb2_grpc.BrokerServiceStub(self._channels[1])
        self.holds = hold_pb2_grpc.HoldServiceStub(self._channels[2])
        self._fill()

    def path(self, name: str) -> Path:
        return self.processes.directory / name

    def _fill(self) -> None:
        for _ in range(2):
            self.send("fat", os.urandom(3_900_000))
        self.send("small", b"x")
        member = namesrv_pb2.Member(
            cluster="DefaultCluster",
            broker_group="others",
            role=common_pb2.MEMBER_ROLE_WRITER,
            address="127.0.0.1:1",
            internal_address="127.0.0.1:2",
            epoch=1,
        )
        self.names.RegisterMember(
            namesrv_pb2.RegisterMemberRequest(
                member=member,
                data_version=namesrv_pb2.DataVersion(epoch=1, counter=1),
                topics=[
                    common_pb2.TopicConfig(
                        name=name,
                        read_queue_count=8,
                        write_queue_count=8,
                        permission=6,
                        flush_mode=common_pb2.FLUSH_MODE_ASYNC,
                        replication_mode=common_pb2.REPLICATION_MODE_ASYNC,
                    )
                    for name in (f"topic-{n:06d}-of-many" for n in range(TOPICS))
                ],
            ),
            timeout=DEADLINE_S,
        )

    def send(self, topic: str, body: bytes) -> None:
        message = broker_pb2.OutgoingMessage(topic=topic, queue_id=0, body=body)
        self.messages.Send(broker_pb2.SendRequest(messages=[message]), timeout=DEADLINE_S)

    def ask(self, service: Service) -> None:
        """What an ordinary client asks of a service; retried as the SDK does: a crowd that comes
        all at once is partly refused by gRPC itself.
        """
        end_s = monotonic() + DEADLINE_S
        while True:
            try:
                return self._ask(service)
            except grpc.RpcError:
                if monotonic() > end_s:
                    raise

    def _ask(self, service: Service) -> None:
        if service is self.namesrv:
            self.names.QueryRoute(namesrv_pb2.QueryRouteRequest(topic="small"), timeout=DEADLINE_S)
        elif service is self.broker:
            self.send("small", b"y")
            assert self.messages.Pull(SMALL, timeout=DEADLINE_S).count
        else:
            hold = hold_pb2.HoldRequest(broker_group="g1", pull=SMALL, hold_ms=30_000)
            assert self.holds.Hold(hold, timeout=DEADLINE_S).pull.count

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Processes(tmp_path_factory.mktemp("unread")) as processes:
        found = Cluster(processes)
        yield found
        found.close()


@dataclass(frozen=True)
class Attack:
    """What is asked, of which port of which service."""

    service: str
    path: str
    message: Any
    internal: bool = False
    stream: bool = False

    def of(self, cluster: Cluster) -> tuple[Service, str]:
        service: Service = getattr(cluster, self.service)
        return service, service.internal_address if self.internal else service.address


ATTACKS = [
    Attack("broker", "/cometmq.v1.BrokerService/Pull", FAT),
    Attack(
        "broker",
        "/cometmq.v1.MemberService/PullStream",
        member_pb2.PullStreamRequest(pull=FAT),
        internal=True,
        stream=True,
    ),
    Attack("pullhold", "/cometmq.v1.HoldService/Hold", HOLD),
    Attack(
        "pullhold",
        "/cometmq.v1.HoldService/HoldStream",
        hold_pb2.HoldStreamRequest(hold_id=1, hold=HOLD),
        stream=True,
    ),
    Attack("namesrv", "/cometmq.v1.NameService/ListTopics", namesrv_pb2.ListTopicsRequest()),
    Attack("namesrv", "/cometmq.v1.NameService/WatchRoutes", WATCH, stream=True),
]


def _all_ask(connections: list[HostileConnection], attack: Attack, calls: int) -> None:
    message = attack.message.SerializeToString()
    for connection in connections:
        connection.ask(attack.path, message, calls, half_close=not attack.stream)


def test_who_does_not_read_costs_little_and_is_closed(cluster: Cluster) -> None:
    services = (cluster.namesrv, cluster.broker, cluster.pullhold)
    before_mib = {service.name: rss_mib(service.pid) for service in services}
    peak_mib = dict(before_mib)
    with ExitStack() as stack:
        crowds = []
        for attack in ATTACKS:
            _, address = attack.of(cluster)
            crowds.append(stack.enter_context(hostile_connections(address, CONNECTIONS)))
            _all_ask(crowds[-1], attack, CALLS)

        def some_of_each_are_closed() -> bool:
            for service in services:
                cluster.ask(service)
                peak_mib[service.name] = max(peak_mib[service.name], rss_mib(service.pid))
            return all(any(one.closed() for one in crowd) for crowd in crowds)

        wait_until("those that hold answers are closed", some_of_each_are_closed, 2 * DEADLINE_S)
    for service in services:
        assert peak_mib[service.name] - before_mib[service.name] < GROWTH_MIB_MAX
        log = cluster.processes.log(service.name).read_text()
        # One line in a minute: there is one address.
        times = [_time_s(line) for line in log.splitlines() if "they do not read" in line]
        assert times
        assert all(later - earlier > 59 for earlier, later in pairwise(times)), log
        assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=[a.path.rpartition("/")[2] for a in ATTACKS])
def test_a_thousand_of_them(cluster: Cluster, attack: Attack) -> None:
    raise_limit()  # of descriptors: the connections are this process's
    service, address = attack.of(cluster)
    cluster.ask(service)
    before_mib = peak_mib = rss_mib(service.pid)
    with hostile_connections(address, MANY) as connections:
        _all_ask(connections, attack, MANY_CALLS)
        for _ in range(100):
            cluster.ask(service)
            peak_mib = max(peak_mib, rss_mib(service.pid))
        wait_until(
            "some are closed", lambda: any(one.closed() for one in connections), 3 * DEADLINE_S
        )
    assert peak_mib <= RSS_MIB_MAX
    wait_until(
        "the memory is given back",
        lambda: rss_mib(service.pid) <= before_mib + LEFT_MIB_MAX,
        DEADLINE_S,
    )
    assert "Traceback" not in cluster.processes.log(service.name).read_text()


def _time_s(line: str) -> float:
    return datetime.fromisoformat(line.split()[0]).timestamp()
