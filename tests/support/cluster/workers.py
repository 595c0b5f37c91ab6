"""Programs that use clients in several processes, threads and event loops: the rows of the tables
of docs/how-to/workers.md. ``python -m tests.support.cluster.workers ROW NAMESRV STYLE`` plays one,
with clients of ``cometmq.client.sync`` (STYLE ``sync``) or of asyncio, and prints what came out.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any

from cometmq import client
from cometmq.client import (
    Message,
    ProducerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    sync,
)
from cometmq.errors import CometError
from cometmq.rpc.channels import open_channel

TOPIC = "T"
SILENT_TOPIC = "S"  # its broker answers no sends
WORKS = "works"
DEADLINE_S = 30


class Sender:
    """A producer of one style, called by plain functions."""

    def __init__(self, namesrv: str, style: str) -> None:
        self.style = style
        self.producer: Any = (sync if style == "sync" else client).Producer(namesrv)
        # By process: a loop shares with children what it waits for, and is not freed there either.
        self._runners: dict[int, asyncio.Runner] = {}

    def open(self) -> Sender:
        self._call(self.producer.start())
        return self

    def send(self) -> None:
        self._call(self.producer.send_and_wait(Message(TOPIC, str(os.getpid()).encode())))

    def close(self) -> None:
        self._call(self.producer.close())
        if os.getpid() in self._runners:
            self._runners[os.getpid()].close()

    def _call(self, answer: Any) -> Any:
        if self.style == "sync":
            return answer
        if os.getpid() not in self._runners:
            self._runners[os.getpid()] = asyncio.Runner()
        return self._runners[os.getpid()].run(answer)


def open_and_send(namesrv: str, style: str) -> str:
    """What a process gets that makes a client of its own."""
    return outcome(lambda: use(Sender(namesrv, style)))


def use(sender: Sender) -> None:
    sender.open()
    sender.send()
    sender.close()


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except CometError as error:
        return error.name()
    return WORKS


def child(work: Callable[[], str], end: Callable[[int], object] = os._exit) -> str:
    """What ``work`` returns in a forked process; how that ended, if that was no good end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_S)
        os.write(writing, work().encode())
        end(0)
    os.close(writing)
    answer = os.read(reading, 1000).decode()
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    return answer if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"


# --- processes ------------------------------------------------------------------------------------


def parent_had_none(namesrv: str, style: str) -> str:
    return child(lambda: open_and_send(namesrv, style))


def parent_has_closed(namesrv: str, style: str) -> str:
    first = Sender(namesrv, style)
    use(first)  # and is kept
    found = {child(lambda: open_and_send(namesrv, style)) for _ in range(3)}
    return found.pop() if len(found) == 1 else str(found)


def parent_has_open(namesrv: str, style: str) -> str:
    return with_open(namesrv, style, lambda _: child(lambda: open_and_send(namesrv, style)))


def with_open(namesrv: str, style: str, work: Callable[[Sender], str]) -> str:
    """What ``work`` gets while this process has a client open, which goes on afterwards."""
    sender = Sender(namesrv, style).open()
    sender.send()
    found = work(sender)
    sender.send()
    sender.close()
    return found


def parents_client(namesrv: str, style: str) -> str:
    return with_open(namesrv, style, lambda sender: child(lambda: outcome(sender.send)))


def parents_receipt(namesrv: str, _: str) -> str:
    with sync.Producer(namesrv, options=ProducerOptions(delivery_timeout_ms=2_000)) as producer:
        future = producer.send(Message(SILENT_TOPIC, b"x"))
        found = child(lambda: outcome(future.result))
        assert outcome(future.result) == "SEND_TIMEOUT"
        return found


def made_by_parent(namesrv: str, style: str) -> str:
    sender = Sender(namesrv, style)
    return child(lambda: outcome(lambda: use(sender)))


def leaves_parents_block(namesrv: str, style: str) -> str:
    """The child goes out through the block, as its parent will, and ends as a program does."""
    pid = 0

    async def asyncio_block() -> None:
        nonlocal pid
        async with client.Producer(namesrv) as producer:
            await producer.send_and_wait(Message(TOPIC, b"before"))
            pid = os.fork()
            if pid == 0:
                sys.exit(7)
            _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
            await producer.send_and_wait(Message(TOPIC, b"after"))
            assert os.waitstatus_to_exitcode(status) == 7, status

    if style == "asyncio":
        asyncio.run(asyncio_block())
        return WORKS
    with sync.Producer(namesrv) as producer:
        producer.send_and_wait(Message(TOPIC, b"before"))
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        _, status = os.waitpid(pid, 0)
        producer.send_and_wait(Message(TOPIC, b"after"))
        assert os.waitstatus_to_exitcode(status) == 7, status
    return WORKS


def frees_parents_client(namesrv: str, style: str) -> str:
    """The child frees all that it can, then what is left: it ends as a program does."""
    import grpc  # not before the clients, which see to it how gRPC takes forks

    held: dict[str, Any] = {}

    def free() -> str:
        held.clear()
        gc.collect()
        return WORKS

    def with_sender(sender: Sender) -> str:
        held["producer"], sender.producer = sender.producer, None
        found = child(free, end=sys.exit)
        sender.producer = held["producer"]
        return found

    async def ask() -> None:
        channel = held.setdefault("channel", open_channel(namesrv))
        with suppress(grpc.RpcError):  # nobody serves it, but somebody answers
            await channel.unary_unary("/cometmq.v1.NameService/Nothing")(b"", timeout=DEADLINE_S)
        assert channel.get_state() is grpc.ChannelConnectivity.READY

    found = with_open(namesrv, style, with_sender)
    held.clear()
    with asyncio.Runner() as runner:  # a channel between two calls: nothing but its owner holds it
        runner.run(ask())
        alone = child(free, end=sys.exit)
        runner.run(ask())
        runner.run(held["channel"].close())
    return found if found == alone else alone


def goes_on(namesrv: str, style: str) -> str:
    def work(sender: Sender) -> str:
        found: list[str] = []
        for _ in range(5):
            thread = threading.Thread(target=lambda: found.append(child(lambda: WORKS)))
            thread.start()
            thread.join()
            sender.send()
        return found[0] if len(set(found)) == 1 else str(found)

    return with_open(namesrv, style, work)


def preloaded_server(namesrv: str, style: str) -> str:
    """The master has made options, and sent a message; workers read as members of one group."""
    use(Sender(namesrv, style))
    options = PushConsumerOptions(rebalance_delay_ms=1, retry_in_place=True)

    def work() -> str:
        came = threading.Event()
        consumer = sync.PushConsumer(namesrv, "G", lambda _: came.set(), options=options)
        with consumer:
            consumer.subscribe(TOPIC)
            use(Sender(namesrv, style))
            assert came.wait(DEADLINE_S)
        return consumer._client._options.client_id

    ids = {child(work), child(work)}
    assert len([one for one in ids if "@" in one]) == 2, ids
    return WORKS


def started(how: str) -> Callable[[str, str], str]:
    def play(namesrv: str, style: str) -> str:
        context = multiprocessing.get_context(how)

        def work(_: Sender) -> str:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                return pool.submit(open_and_send, namesrv, style).result(DEADLINE_S)

        return with_open(namesrv, style, work)

    return play


def gives_client(namesrv: str, style: str) -> str:
    def work(sender: Sender) -> str:
        contexts: list[BaseContext] = [
            multiprocessing.get_context(how) for how in ("spawn", "forkserver")
        ]
        found = {
            outcome(context.Process(target=print, args=(sender.producer,)).start)  # type: ignore[attr-defined]
            for context in contexts
        }
        return found.pop() if len(found) == 1 else str(found)

    return with_open(namesrv, style, work)


def body_of(message: ReceivedMessage) -> bytes:
    assert message.queue.topic == TOPIC
    assert message.message_id
    return message.body


def gives_message(namesrv: str, style: str) -> str:
    use(Sender(namesrv, style))
    with sync.PullConsumer(namesrv, "P") as consumer:
        consumer.assign([QueueRef(TOPIC, n, "g1") for n in range(4)])
        [message, *_] = consumer.poll()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(body_of, message).result(DEADLINE_S) == message.body
    return WORKS


# --- threads and event loops ----------------------------------------------------------------------


def in_other_loop(namesrv: str, _: str) -> str:
    first, second = asyncio.Runner(), asyncio.Runner()

    async def send() -> None:
        await producer.send_and_wait(Message(TOPIC, b"x"))

    producer = client.Producer(namesrv)
    first.run(producer.start())
    first.run(send())
    found = outcome(lambda: second.run(send()))
    assert found == outcome(lambda: second.run(producer.close()))
    first.run(send())
    first.run(producer.close())
    first.close()
    second.close()
    return found


def every_call_in_another_loop(namesrv: str) -> dict[str, str]:
    """What calls of each asyncio client get there, by client and method."""
    found: dict[str, str] = {}

    async def listener(_: list[ReceivedMessage]) -> None: ...

    async def play() -> None:
        queue = QueueRef(TOPIC, 0, "g1")
        async with (
            client.Producer(namesrv) as producer,
            client.PushConsumer(namesrv, "G", listener) as push,
            client.PullConsumer(namesrv, "P") as pull,
            client.SimpleConsumer(namesrv, "S") as simple,
        ):
            await producer.send_and_wait(Message(TOPIC, b"x"))
            message = Message(TOPIC, b"y")
            calls: dict[str, Callable[[], Any]] = {
                "send": lambda: producer.send(message),
                "send to a queue": lambda: producer.send(Message(TOPIC, b"z", queue=queue)),
                "send_many": lambda: producer.send_many([message]),
                "send_batch": lambda: producer.send_batch([message]),
                "send_one_way": lambda: producer.send_one_way(message),
                "request": lambda: producer.request(message),
                "push.subscribe": lambda: push.subscribe(TOPIC),
                "push.suspend": push.suspend,
                "push.set_concurrency": lambda: push.set_concurrency(2),
                "pull.assign": lambda: pull.assign([queue]),
                "pull.poll": pull.poll,
                "pull.commit": pull.commit,
                "pull.pause": lambda: pull.pause([queue]),
                "simple.subscribe": lambda: simple.subscribe(TOPIC),
                "simple.receive": simple.receive,
                "close": push.close,
            }
            for name, call in calls.items():
                found[name] = await asyncio.to_thread(_elsewhere, call)

    asyncio.run(play())
    return found


def _elsewhere(call: Callable[[], Any]) -> str:
    async def run() -> None:
        answer = call()
        if asyncio.iscoroutine(answer):
            await answer

    return outcome(lambda: asyncio.run(run()))


def in_other_thread(namesrv: str, _: str) -> str:
    found = every_call_in_another_loop(namesrv)
    return next(iter(found.values())) if len(set(found.values())) == 1 else str(found)


def many_threads(namesrv: str, _: str) -> str:
    with sync.Producer(namesrv) as producer:
        sent: list[object] = []
        threads = [
            threading.Thread(
                target=lambda: sent.append(producer.send_and_wait(Message(TOPIC, b"x")))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return WORKS if len(sent) == 8 else str(sent)


def in_a_running_loop(namesrv: str, _: str) -> str:
    async def cell() -> str:
        return open_and_send(namesrv, "sync")

    return asyncio.run(cell())


def in_its_own_listener(namesrv: str, _: str) -> str:
    found: list[str] = []
    came = threading.Event()

    async def listener(_: list[ReceivedMessage]) -> None:
        found.append(outcome(lambda: consumer.assigned))
        came.set()

    options = PushConsumerOptions(rebalance_delay_ms=1, retry_in_place=True)
    consumer = sync.PushConsumer(namesrv, "G", listener, options=options)
    with consumer, sync.Producer(namesrv) as producer:
        consumer.subscribe(TOPIC)
        producer.send_and_wait(Message(TOPIC, b"x"))
        assert came.wait(DEADLINE_S)
    return found[0]


class SendingHandler(logging.Handler):
    """Sends each line, also those of the client itself."""

    def __init__(self, producer: sync.Producer) -> None:
        super().__init__()
        self._producer = producer
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        try:
            self._producer.send_and_wait(Message(TOPIC, self.format(record).encode()))
        except CometError:
            self.handleError(record)


def sending_handler(namesrv: str, _: str) -> str:
    """Lines of the application, of the client's own thread, and of threads that log together."""
    with sync.Producer(namesrv) as producer:
        handler = SendingHandler(producer)
        logging.root.addHandler(handler)
        logging.root.setLevel(logging.DEBUG)
        own = logging.getLogger("cometmq.client.producer")
        inner = logging.getLogger("asyncio")

        async def log_inside() -> None:
            own.warning("a line of the client's thread")
            inner.warning("another one")

        def log() -> None:
            for n in range(20):
                logging.getLogger("shop").warning("line %d", n)
                producer._wait(log_inside())

        threads = [threading.Thread(target=log, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "dead lock"
        logging.root.removeHandler(handler)
    assert 4 * 20 <= handler.count <= 4 * 20 * 4, handler.count
    return WORKS


def cancels_itself(namesrv: str, _: str) -> str:
    tried: list[bytes] = []
    done = threading.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        tried.extend(message.body for message in messages)
        task = asyncio.current_task()
        assert task is not None
        if len(tried) <= 4:
            task.cancel()
            await asyncio.sleep(0)
        done.set()

    options = PushConsumerOptions(
        rebalance_delay_ms=1, retry_in_place=True, redeliver_backoff_ms=1, concurrency=2
    )
    with sync.PushConsumer(namesrv, "G", listener, options=options) as consumer:
        consumer.subscribe(TOPIC)
        use(Sender(namesrv, "sync"))
        assert done.wait(DEADLINE_S)
    assert len(set(tried)) == 1
    return WORKS


# --- notebooks ------------------------------------------------------------------------------------


def cells(namesrv: str, *parts: Callable[[dict[str, Any]], Coroutine[Any, Any, None]]) -> str:
    """A kernel: one event loop that runs on, and names that live from cell to cell."""
    names: dict[str, Any] = {"namesrv": namesrv}

    async def kernel() -> None:
        for part in parts:
            await asyncio.create_task(part(names))

    asyncio.run(kernel())
    return WORKS


def sync_cells(namesrv: str, _: str) -> str:
    async def first(names: dict[str, Any]) -> None:
        names["producer"] = sync.Producer(names["namesrv"]).start()
        names["consumer"] = sync.PullConsumer(
            names["namesrv"], "P", options=PullConsumerOptions()
        ).start()

    async def second(names: dict[str, Any]) -> None:
        receipt = names["producer"].send_and_wait(Message(TOPIC, b"one"))
        names["consumer"].assign([receipt.queue])

    async def third(names: dict[str, Any]) -> None:
        assert names["consumer"].poll()[-1].body == b"one"
        for name in ("producer", "consumer", "producer"):  # closing twice is no error
            names[name].close()

    return cells(namesrv, first, second, third)


def asyncio_cells(namesrv: str, _: str) -> str:
    async def first(names: dict[str, Any]) -> None:
        names["producer"] = await client.Producer(names["namesrv"]).start()
        names["consumer"] = await client.PullConsumer(names["namesrv"], "P").start()

    async def second(names: dict[str, Any]) -> None:
        receipt = await names["producer"].send_and_wait(Message(TOPIC, b"one"))
        await names["consumer"].assign([receipt.queue])

    async def third(names: dict[str, Any]) -> None:
        assert (await names["consumer"].poll())[-1].body == b"one"
        for name in ("producer", "consumer", "producer"):
            await names[name].close()

    return cells(namesrv, first, second, third)


ROWS: dict[str, Callable[[str, str], str]] = {
    "opens a client, whose parent never had one": parent_had_none,
    "opens a client, whose parent has closed all of its own": parent_has_closed,
    "opens a client, whose parent has one open": parent_has_open,
    "calls the open client of its parent": parents_client,
    "waits for the receipt of a message that its parent has sent": parents_receipt,
    "opens a client that its parent has made": made_by_parent,
    "leaves the block of its parent's client, by an exception or `sys.exit`": leaves_parents_block,
    "frees its parent's client": frees_parents_client,
    "goes on with its client after forks, also out of threads": goes_on,
    "is a worker of a server that loads the application first (gunicorn `--preload`, Celery), and "
    "opens a client": preloaded_server,
    **{
        f"is started by `multiprocessing` with `{how}`, and opens a client, whose parent has one "
        "open": started(how)
        for how in ("spawn", "forkserver", "fork")
    },
    "gives a client to a process of `multiprocessing`": gives_client,
    "gives a received message to a process of `multiprocessing`": gives_message,
    "calls an asyncio client in another event loop": in_other_loop,
    "calls an asyncio client out of another thread": in_other_thread,
    "calls a client of `cometmq.client.sync` out of many threads": many_threads,
    "calls a client of `cometmq.client.sync` while an event loop runs in its thread": (
        in_a_running_loop
    ),
    "calls a client of `cometmq.client.sync` in its own async listener": in_its_own_listener,
    "sends its log lines as messages, with a `logging.Handler`": sending_handler,
    "cancels its own task in a listener": cancels_itself,
    "uses a client of `cometmq.client.sync` over several cells": sync_cells,
    "uses an asyncio client over several cells": asyncio_cells,
}


if __name__ == "__main__":
    row, namesrv, style = sys.argv[1:]
    print("outcome:", ROWS[row](namesrv, style))
