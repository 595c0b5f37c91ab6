"""Real brokers for tests: the App in the test's own loop, or a process that can be killed.

``async with running_broker(tmp_path) as broker:`` gives stubs, raw send streams and helpers that
read a queue to its end. Files are small, ports are free ones, nothing listens but on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self
from unittest import mock

import grpc

from cometmq.clock import SystemClock
from cometmq.errors import CometError, StoreFailed
from cometmq.format import properties, record
from cometmq.format.record import Record
from cometmq.member.config import MemberConfig
from cometmq.member.listen import new_ports
from cometmq.member.state.opening import Opened, open_writer
from cometmq.rpc.interceptors import error_from, from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import broker_pb2_grpc
from cometmq.v1 import common_pb2 as common
from services.broker import app as broker_app
from services.namesrv.app import App as NamesrvApp
from services.namesrv.config import NamesrvConfig
from services.namesrv.listen import new_server
from tests.support.waiting import DEADLINE_S, PROCESSES_S, until

SMALL_FILES = {
    "mapped_file_size_commit_log": 256 * 1024,
    "mapped_file_size_consume_queue": 400,
    "mapped_file_size_timer_log": 64 * 1024,
    "max_hash_slot_num": 64,
    "max_index_num": 256,
}
# The machine's own disk may be nearly full: that is no matter of most tests.
ANY_DISK = {
    "disk_max_used_space_ratio": 99.0,
    "disk_space_clean_forcibly_ratio": 99.0,
    "disk_space_warning_level_ratio": 99.0,
}
# The defaults, for tests that want to see log files go.
RATIOS = {
    "disk_max_used_space_ratio": 75.0,
    "disk_space_clean_forcibly_ratio": 85.0,
    "disk_space_warning_level_ratio": 90.0,
}
ASYNC, SYNC = common.FLUSH_MODE_ASYNC, common.FLUSH_MODE_SYNC
HOST = record.host_bytes("127.0.0.1", 1)  # what a producer writes: only its length matters

STREAM = "01" + "AB" * 12  # of the ids of a producer
Run = tuple[str, int, Sequence[bytes]]  # topic, queue, bodies


async def refusal(call: Awaitable[object]) -> CometError:
    """The catalogue's error that the call is refused with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    raise AssertionError("the call was answered")


def encoded(topic: str, queue_id: int, body: bytes, **fields: Any) -> bytes:
    """A record as a producer sends it; ``fields`` as of ``record.encode``, and ``tag``."""
    tag = fields.pop("tag", "")
    pairs = properties.encode({"TAGS": tag}) if tag else b""
    return record.encode(
        topic.encode(),
        queue_id,
        body,
        fields.pop("properties", pairs),
        born_time_ms=fields.pop("born_time_ms", 1_700_000_000_000),
        born_host=HOST,
        store_host=HOST,
        **fields,
    )


def batch(*runs: Run) -> tuple[bytes, list[pb.Segment]]:
    """The records and segments of a batch with these runs."""
    records = b"".join(encoded(topic, queue, b) for topic, queue, bodies in runs for b in bodies)
    return records, [pb.Segment(topic=t, queue_id=q, count=len(b)) for t, q, b in runs]


def numbered(first: int, *bodies: bytes) -> tuple[bytes, list[pb.Segment]]:
    """A batch for queue 0 of T with the ids that follow each other from counter ``first`` on."""
    data = b"".join(
        encoded("T", 0, body, properties=f"UNIQ_KEY\x01{STREAM}{first + n:08X}\x02".encode())
        for n, body in enumerate(bodies)
    )
    return data, [pb.Segment(topic="T", queue_id=0, count=len(bodies))]


class StreamEnded(Exception):
    """The broker has ended a stream that was to answer."""


class SendLane:
    """One raw send stream."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceAsyncStub) -> None:
        self.call = stub.SendStream()
        self._batch_id = 0

    async def opened(self) -> pb.SendStreamOpened:
        """The first message of the stream."""
        response = await self._read()
        assert response.WhichOneof("kind") == "opened", response
        return response.opened

    async def put(
        self, records: bytes, segments: Sequence[pb.Segment], checksum: int | None = None
    ) -> int:
        """Send a batch and do not wait; its id."""
        self._batch_id += 1
        request = pb.SendStreamRequest(
            batch_id=self._batch_id, records=records, segments=segments, records_crc32=checksum
        )
        await self.call.write(request)
        return self._batch_id

    async def result(self) -> pb.SendBatchResult:
        """The next answer."""
        response = await self._read()
        assert response.WhichOneof("kind") == "result", response
        return response.result

    async def send(self, *runs: Run) -> pb.SendBatchResult:
        """Send one batch with a checksum and take its answer, which must be a good one."""
        records, segments = batch(*runs)
        result = await self.exchange(records, segments, zlib.crc32(records))
        assert not result.HasField("error"), result.error
        return result

    async def exchange(
        self, records: bytes, segments: Sequence[pb.Segment], checksum: int | None = None
    ) -> pb.SendBatchResult:
        """Send one batch and take its answer, whatever it is."""
        batch_id = await self.put(records, segments, checksum)
        result = await self.result()
        assert result.batch_id == batch_id
        return result

    async def refused(
        self, records: bytes, segments: Sequence[pb.Segment], checksum: int | None = None
    ) -> CometError:
        """Send one batch and take the error that it is refused with."""
        result = await self.exchange(records, segments, checksum)
        assert result.HasField("error"), result
        assert not result.queue_offsets
        return from_proto(result.error)

    async def ended(self) -> grpc.StatusCode:
        """Read to the end of the stream, which must come without another answer; its status."""
        async with asyncio.timeout(DEADLINE_S):
            rest = await self.call.read()
            assert rest is grpc.aio.EOF, rest
            return await self.call.code()

    async def _read(self) -> pb.SendStreamResponse:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        if not isinstance(response, pb.SendStreamResponse):
            raise StreamEnded
        return response


def _channel(address: str) -> grpc.aio.Channel:
    # Not the SDK's options: on a busy machine a test has more patience with a connection.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ]
    return grpc.aio.insecure_channel(address, options=options)


class BrokerClient:
    """Stubs for one broker, and what tests do with them."""

    def __init__(self, address: str, internal_address: str) -> None:
        self.address = address
        self.internal_address = internal_address
        self._channels = [_channel(address), _channel(internal_address)]
        self.stub = broker_pb2_grpc.BrokerServiceStub(self._channels[0])
        self.admin = broker_pb2_grpc.BrokerAdminServiceStub(self._channels[1])

    @property
    def channel(self) -> grpc.aio.Channel:
        """To the client port, for requests that no stub would send."""
        return self._channels[0]

    @property
    def admin_channel(self) -> grpc.aio.Channel:
        """The same for the internal port."""
        return self._channels[1]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def put_topic(
        self, name: str, queues: int = 2, flush: common.FlushMode.ValueType = ASYNC
    ) -> pb.PutTopicResponse:
        config = common.TopicConfig(
            name=name, read_queue_count=queues, write_queue_count=queues, flush_mode=flush
        )
        return await self.admin.PutTopic(pb.PutTopicRequest(topic=config))

    async def drop_topic(self, name: str) -> None:
        await self.admin.DeleteTopic(pb.DeleteTopicRequest(topic=name))

    async def lane(self) -> SendLane:
        """An open send stream whose greeting was read."""
        lane = SendLane(self.stub)
        await lane.opened()
        return lane

    async def send(self, topic: str, queue_id: int, *bodies: bytes) -> pb.SendResponse:
        """Messages by the structured form."""
        messages = [pb.OutgoingMessage(topic=topic, queue_id=queue_id, body=b) for b in bodies]
        return await self.stub.Send(pb.SendRequest(messages=messages))

    async def pull(
        self, topic: str, queue_id: int, offset: int, generation: int = 0, **fields: Any
    ) -> pb.PullResponse:
        return await self.stub.Pull(
            pb.PullRequest(
                queue=common.QueueRef(topic=topic, queue_id=queue_id),
                position=common.Position(generation=generation, offset=offset),
                **fields,
            )
        )

    async def status(self, topic: str, queue_id: int) -> pb.QueueStatus:
        described = await self.admin.DescribeTopic(pb.DescribeTopicRequest(topic=topic))
        return described.queues[queue_id]

    async def read_queue(self, topic: str, queue_id: int, start: int = 0) -> list[Record]:
        """All messages of a queue, the appended ones included: waits until they are readable. Maybe
        with some that come meanwhile.
        """
        end = (await self.status(topic, queue_id)).appended_offset
        found: list[Record] = []
        async with asyncio.timeout(DEADLINE_S):
            while start + len(found) < end:
                answer = await self.pull(topic, queue_id, start + len(found), max_count=4096)
                assert answer.status in (pb.PULL_STATUS_FOUND, pb.PULL_STATUS_NOT_FOUND), answer
                records = record.decode_all(answer.records)
                assert len(records) == answer.count
                found += records
                if not records:
                    await asyncio.sleep(0.002)
        offsets = [r.queue_offset for r in found]
        assert offsets == list(range(start, max(end, start + len(found)))), offsets
        assert all((r.topic, r.queue_id) == (topic, queue_id) for r in found)
        return found

    async def bodies(self, topic: str, queue_id: int, start: int = 0) -> list[bytes]:
        return [found.body for found in await self.read_queue(topic, queue_id, start)]

    async def commit(self, group: str, *items: tuple[str, int, int, int]) -> list[pb.OffsetResult]:
        """Commit (topic, queue, generation, offset) many at once."""
        commits = [
            pb.OffsetCommit(
                queue=common.QueueRef(topic=topic, queue_id=queue_id),
                position=common.Position(generation=generation, offset=offset),
            )
            for topic, queue_id, generation, offset in items
        ]
        request = pb.CommitOffsetsRequest(group=group, commits=commits)
        return list((await self.stub.CommitOffsets(request)).results)

    async def committed(self, group: str, topic: str, queue_id: int) -> common.Position | None:
        queue = common.QueueRef(topic=topic, queue_id=queue_id)
        request = pb.QueryOffsetsRequest(group=group, queues=[queue])
        [result] = (await self.stub.QueryOffsets(request)).results
        assert not result.HasField("error"), result.error
        return result.position if result.HasField("position") else None


# --- in the test's own loop ---------------------------------------------------------------------


class LiveBroker(BrokerClient):
    """The App in this process."""

    def __init__(self, address: str, internal_address: str, opened: Opened) -> None:
        super().__init__(address, internal_address)
        self.address = address
        self.store = opened.store
        self.state = opened.state
        self.metrics_address = ""
        self.crashed = False

    def crash(self) -> None:
        """From here on nothing is written any more, as after kill -9; then leave the block."""
        self.crashed = True
        self.store.abandon()
        mock.patch.object(self.store, "abandon").start()  # the App's own end comes too late


def config_for(directory: Path, **options: Any) -> MemberConfig:
    """Small files in ``directory``, free ports, short intervals."""
    return MemberConfig(
        **{
            "store_path": directory / "store",
            "broker_group": "g1",
            "port": 0,
            "internal_port": 0,
            "metrics_port": 0,
            "drain_grace_s": 5.0,
            "flush_interval_commit_log": 5,
            "flush_commit_log_least_pages": 0,
            "flush_interval_consume_queue": 20,
            "offset_record_interval_s": 0.02,
            **SMALL_FILES,
            **ANY_DISK,
            **options,
        }
    )


class LaterClock(SystemClock):
    """The machine's clock, after the time that a test lets pass."""

    def __init__(self) -> None:
        self.later_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.later_ms

    def boottime_s(self) -> float:
        return super().boottime_s() + self.later_ms / 1000


class WrongClock(LaterClock):
    """The same, but for a time of day that is wrong."""

    def __init__(self, wrong_ms: int = 0) -> None:
        super().__init__()
        self.wrong_ms = wrong_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.wrong_ms


@asynccontextmanager
async def running_broker(directory: Path, **options: Any) -> AsyncIterator[LiveBroker]:
    """A broker over the store in ``directory``, ready; stopped in order at the end of the block.
    ``clock`` is not among its options but taken all the same.
    """
    clock = options.pop("clock", None)
    config = config_for(directory, **options)
    opened: list[Opened] = []

    def open_and_keep(*arguments: Any, **more: Any) -> Opened:
        opened.append(open_writer(*arguments, **more))
        return opened[0]

    ports = new_ports(config)
    live: LiveBroker | None = None
    try:
        await ports.start()
        with mock.patch.object(broker_app, "open_writer", open_and_keep):
            app = broker_app.App(config, ports, clock=clock)
            async with app:
                address = ports.clients.address, ports.internal.address
                live = LiveBroker(*address, opened[0])
                live.metrics_address = app.metrics_address
                yield live
    except* StoreFailed:
        if live is None or not live.crashed:
            raise
    finally:
        if live is not None:
            await live.close()
        await ports.stop(0)


@asynccontextmanager
async def running_namesrv(directory: Path, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """A name server; its address."""
    config = NamesrvConfig(
        port=port,
        metrics_port=0,
        kv_config_path=directory / "kvConfig.json",
        scan_interval_s=0.05,
        **options,
    )
    server = new_server(config)
    await server.start()
    async with NamesrvApp(config, server):
        yield server.address


# --- a process of its own -----------------------------------------------------------------------


class BrokerProcess:
    """``python -m services.broker`` over a store in ``directory``; can be killed and started again.

    Use as an async context manager: at its end the process is gone. ``client`` are stubs for the
    present life.
    """

    def __init__(
        self,
        directory: Path,
        *flags: str,
        store: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.store_path = store or directory / "store"
        self.wrapper = wrapper  # the command that runs the broker's, if any
        self._directory = directory
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._client: BrokerClient | None = None

    @property
    def client(self) -> BrokerClient:
        assert self._client is not None, "not started"
        return self._client

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(f"the broker said:\n{self.output()[-4000:]}")  # pytest shows it
        if self._process is not None:
            await self.kill()

    async def start(self) -> BrokerClient:
        """Start, wait until it is ready."""
        announce = self._directory / "announce.json"
        announce.unlink(missing_ok=True)
        process = self.spawn("--announce_file", str(announce))
        self._process = process
        await until(lambda: announce.exists() or process.poll() is not None, PROCESSES_S)
        assert process.poll() is None, self.output()
        said = json.loads(announce.read_text())
        assert said["pid"] == process.pid
        self._client = BrokerClient(said["address"], said["internal_address"])
        return self._client

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        """The bare process, with what it says in a file."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
        broker = [sys.executable, "-m", "services.broker", *self._default_flags(), *more]
        command = [*self.wrapper, *broker]
        with (self._directory / "broker.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _default_flags(self) -> list[str]:
        flags = {
            "store_path": self.store_path,
            "broker_group": "g1",
            "port": 0,
            "internal_port": 0,
            "metrics_port": 0,
            **SMALL_FILES,
            **ANY_DISK,
        }
        return [word for k, v in flags.items() for word in (f"--{k}", str(v))] + list(self._flags)

    def output(self) -> str:
        """All that the process has said in all its lives."""
        return (self._directory / "broker.log").read_text()

    async def kill(self) -> None:
        """SIGKILL, then wait until it is gone."""
        await self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and do not wait."""
        assert self._process is not None, "not started"
        self._process.terminate()

    async def ended(self) -> int:
        """Wait until it ends by itself; the exit status."""
        process = self._process
        assert process is not None, "not started"
        await until(lambda: process.poll() is not None, PROCESSES_S)
        return process.returncode

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        return await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        assert process is not None, "not started"
        with suppress(ProcessLookupError):
            process.send_signal(number)
        await until(lambda: process.poll() is not None, PROCESSES_S)
        if self._client is not None:
            await self._client.close()
            self._client = None
        return process.returncode

    async def restart(self) -> BrokerClient:
        """kill -9 and start again."""
        await self.kill()
        return await self.start()
