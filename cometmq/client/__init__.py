"""The SDK: send and receive messages with asyncio. docs/client.md, docs/reference/client.md.

Everything that applications use is here, and without asyncio in ``cometmq.client.sync``; all other
modules of the package are private. A name is imported when it is used first: a program that only
produces does not load the consumers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cometmq.rpc.forks import leave_forks_alone

if TYPE_CHECKING:
    from cometmq.client.arrow import to_arrow
    from cometmq.client.consuming.queue_listener import QueueListener
    from cometmq.client.group.rebalance import (
        Allocation,
        ByConfig,
        ByMachineRoom,
        MachineRoomNearby,
        Strategy,
    )
    from cometmq.client.hooks import (
        ConsumeContext,
        ConsumeHook,
        FilterHook,
        SendContext,
        SendHook,
    )
    from cometmq.client.messages import (
        ConsumeFrom,
        ConsumeMode,
        ConsumeResult,
        Later,
        MessageModel,
        OrderBy,
        PullBatch,
        PullOutcome,
        SendReceipt,
    )
    from cometmq.client.options import (
        ProducerOptions,
        PullConsumerOptions,
        PushConsumerOptions,
        SimpleConsumerOptions,
    )
    from cometmq.client.producer import Producer
    from cometmq.client.pull import PullConsumer
    from cometmq.client.push import PushConsumer
    from cometmq.client.reading.offsets import Bounds
    from cometmq.client.reading.positions import OffsetStore
    from cometmq.client.received import ReceivedMessage
    from cometmq.client.selectors import at_random, by_hash
    from cometmq.client.sending.send_many import SendReceipts
    from cometmq.client.simple import SimpleConsumer
    from cometmq.client.tracing.otel import ConsumeSpans, SendSpans
    from cometmq.client.transactions.checks import TransactionState
    from cometmq.client.transactions.producer import (
        Transaction,
        TransactionListener,
        TransactionProducer,
        TransactionResult,
    )
    from cometmq.client.transactions.receipts import CommitReceipt
    from cometmq.format.compression import Compression
    from cometmq.model import Message, Position, QueueRef, SendStatus
    from cometmq.rpc.polling import poll_in_one_thread

leave_forks_alone()

_MODULES = {
    "Allocation": "cometmq.client.group.rebalance",
    "Bounds": "cometmq.client.reading.offsets",
    "ByConfig": "cometmq.client.group.rebalance",
    "ByMachineRoom": "cometmq.client.group.rebalance",
    "CommitReceipt": "cometmq.client.transactions.receipts",
    "Compression": "cometmq.format.compression",
    "ConsumeContext": "cometmq.client.hooks",
    "ConsumeFrom": "cometmq.client.messages",
    "ConsumeHook": "cometmq.client.hooks",
    "ConsumeMode": "cometmq.client.messages",
    "ConsumeResult": "cometmq.client.messages",
    "ConsumeSpans": "cometmq.client.tracing.otel",
    "FilterHook": "cometmq.client.hooks",
    "Later": "cometmq.client.messages",
    "MachineRoomNearby": "cometmq.client.group.rebalance",
    "Message": "cometmq.model",
    "MessageModel": "cometmq.client.messages",
    "OffsetStore": "cometmq.client.reading.positions",
    "OrderBy": "cometmq.client.messages",
    "Position": "cometmq.model",
    "Producer": "cometmq.client.producer",
    "ProducerOptions": "cometmq.client.options",
    "PullBatch": "cometmq.client.messages",
    "PullConsumer": "cometmq.client.pull",
    "PullConsumerOptions": "cometmq.client.options",
    "PullOutcome": "cometmq.client.messages",
    "PushConsumer": "cometmq.client.push",
    "PushConsumerOptions": "cometmq.client.options",
    "QueueListener": "cometmq.client.consuming.queue_listener",
    "QueueRef": "cometmq.model",
    "ReceivedMessage": "cometmq.client.received",
    "SendContext": "cometmq.client.hooks",
    "SendHook": "cometmq.client.hooks",
    "SendReceipt": "cometmq.client.messages",
    "SendReceipts": "cometmq.client.sending.send_many",
    "SendSpans": "cometmq.client.tracing.otel",
    "SendStatus": "cometmq.model",
    "SimpleConsumer": "cometmq.client.simple",
    "SimpleConsumerOptions": "cometmq.client.options",
    "Strategy": "cometmq.client.group.rebalance",
    "Transaction": "cometmq.client.transactions.producer",
    "TransactionListener": "cometmq.client.transactions.producer",
    "TransactionProducer": "cometmq.client.transactions.producer",
    "TransactionResult": "cometmq.client.transactions.producer",
    "TransactionState": "cometmq.client.transactions.checks",
    "at_random": "cometmq.client.selectors",
    "by_hash": "cometmq.client.selectors",
    "poll_in_one_thread": "cometmq.rpc.polling",
    "to_arrow": "cometmq.client.arrow",
}

__all__ = [
    "Allocation",
    "Bounds",
    "ByConfig",
    "ByMachineRoom",
    "CommitReceipt",
    "Compression",
    "ConsumeContext",
    "ConsumeFrom",
    "ConsumeHook",
    "ConsumeMode",
    "ConsumeResult",
    "ConsumeSpans",
    "FilterHook",
    "Later",
    "MachineRoomNearby",
    "Message",
    "MessageModel",
    "OffsetStore",
    "OrderBy",
    "Position",
    "Producer",
    "ProducerOptions",
    "PullBatch",
    "PullConsumer",
    "PullConsumerOptions",
    "PullOutcome",
    "PushConsumer",
    "PushConsumerOptions",
    "QueueListener",
    "QueueRef",
    "ReceivedMessage",
    "SendContext",
    "SendHook",
    "SendReceipt",
    "SendReceipts",
    "SendSpans",
    "SendStatus",
    "SimpleConsumer",
    "SimpleConsumerOptions",
    "Strategy",
    "Transaction",
    "TransactionListener",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
    "at_random",
    "by_hash",
    "poll_in_one_thread",
    "to_arrow",
]


if not TYPE_CHECKING:  # else a type checker believes every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
