"""What a client tells of itself stays within its limits, whatever the client does."""

from __future__ import annotations

import asyncio

from cometmq.client.group.rebalance import ByConfig
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ProducerOptions, PushConsumerOptions
from cometmq.client.remote import description
from cometmq.client.remote.description import CallState, Describer, QueueState, options_text
from cometmq.client.remote.rates import Rates
from cometmq.client.selectors import at_random
from cometmq.model import Filter, Position, QueueRef
from cometmq.v1 import broker_pb2 as pb

LONG = "t" * 127


class Hook:
    def wants(self, message: object) -> bool:
        return True


def test_options_are_told_and_objects_of_the_application_by_their_kind() -> None:
    told = options_text(PushConsumerOptions(concurrency=7, filter_hooks=(Hook(),), namespace="n"))
    assert told["concurrency"] == "7"
    assert told["consume_mode"] == "PULL"
    assert told["filter_hooks"] == "Hook"
    assert told["namespace"] == "n"
    assert options_text(ProducerOptions(selector=at_random))["selector"] == "at_random"
    allocation = ByConfig([QueueRef("T", 0, "g")])
    assert options_text(PushConsumerOptions(allocation=allocation))["allocation"]


async def test_the_largest_client_fits_into_an_answer() -> None:
    rates = Rates()
    rates.mark(0.0)
    for n in range(2_000):
        rates.of(f"{LONG[:120]}{n}").done += 1
    queues = [
        QueueState(QueueRef(LONG, n, LONG), Position(9, 2**62), Position(9, 2**62), 2**31, 2**62)
        for n in range(16_384)
    ]
    calls = [
        CallState(QueueRef(LONG, n, LONG), 2**62, 1, float(n), is_late=True, stack="ö" * 16_384)
        for n in range(description.CALLS_MAX)
    ]
    subscriptions = {
        f"{LONG[:120]}{n}": Filter(frozenset(f"{tag:0256}" for tag in range(256)))
        for n in range(1_000)
    }
    told = Describer(pb.CLIENT_ROLE_PUSH, PushConsumerOptions(), Namespace("n" * 64)).describe(
        rates, subscriptions=subscriptions, queues=queues, calls=calls, call_count=10_000
    )
    assert told.ByteSize() < 1 << 20
    assert told.queue_count == 16_384
    assert len(told.queues) == description.QUEUES_MAX
    assert told.call_count == 10_000
    assert [call.queue.queue_id for call in told.calls] == list(range(description.CALLS_MAX))
    assert told.calls[0].stack
    assert not told.calls[-1].stack
    assert 0 < len(told.subscriptions) < 1_000


async def test_times_are_told_by_the_clients_wall_clock() -> None:
    now_s = asyncio.get_running_loop().time()
    queue = QueueState(QueueRef("T", 0, "g"), None, None, 0, 0, pulled_s=now_s - 5)
    never = QueueState(QueueRef("T", 1, "g"), None, None, 0, 0)
    call = CallState(QueueRef("T", 0, "g"), 7, 1, 2.0, is_late=False)
    told = Describer(pb.CLIENT_ROLE_PUSH, PushConsumerOptions(), Namespace()).describe(
        Rates(), queues=[never, queue], calls=[call]
    )
    assert 5_000 <= told.time_ms - told.queues[0].last_pull_ms < 60_000
    assert told.queues[1].last_pull_ms == 0
    assert told.calls[0].age_ms == 2_000
    assert not told.queues[0].HasField("committed")
    assert not told.queues[0].HasField("lock_number")
