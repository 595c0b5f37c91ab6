"""The SDK: send and receive messages with asyncio. docs/client.md, docs/reference/client.md.

Everything that applications use is here, and without asyncio in ``cometmq.client.sync``; all other
modules of the package are private.
"""

from __future__ import annotations

from cometmq.client.hooks import (
    ConsumeContext,
    ConsumeHook,
    FilterHook,
    SendContext,
    SendHook,
)
from cometmq.client.messages import (
    ConsumeFrom,
    ConsumeResult,
    Later,
    MessageModel,
    PullBatch,
    PullOutcome,
    ReceivedMessage,
    SendReceipt,
)
from cometmq.client.offsets import Bounds
from cometmq.client.options import (
    ProducerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
)
from cometmq.client.positions import OffsetStore
from cometmq.client.producer import Producer
from cometmq.client.pull import PullConsumer
from cometmq.client.push import PushConsumer
from cometmq.client.queue_listener import QueueListener
from cometmq.client.rebalance import (
    Allocation,
    ByConfig,
    ByMachineRoom,
    MachineRoomNearby,
    Strategy,
)
from cometmq.client.selectors import at_random, by_hash
from cometmq.format.compression import Compression
from cometmq.model import Message, Position, QueueRef, SendStatus

__all__ = [
    "Allocation",
    "Bounds",
    "ByConfig",
    "ByMachineRoom",
    "Compression",
    "ConsumeContext",
    "ConsumeFrom",
    "ConsumeHook",
    "ConsumeResult",
    "FilterHook",
    "Later",
    "MachineRoomNearby",
    "Message",
    "MessageModel",
    "OffsetStore",
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
    "SendStatus",
    "Strategy",
    "at_random",
    "by_hash",
]
