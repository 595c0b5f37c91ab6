"""To which queue the messages of a topic go that do not name one: by their key, else to the one
that the open batch is for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import accumulate

from cometmq.client.selectors import choose_by_hash
from cometmq.client.sending.batch import Batch, Waiter
from cometmq.client.sending.batcher import Slot
from cometmq.client.sending.broker_sender import QueueWriter
from cometmq.client.sending.send_many import SendMany
from cometmq.errors import QueueNotFound
from cometmq.format.halves import HalfForm
from cometmq.model import Message, QueueRef

KEYS_MAX = 4096  # sharding keys of a topic whose queues are known


def has_key(message: Message) -> bool:
    """Whether it is a message whose queue its sharding key names."""
    return message.__class__ is Message and message.queue is None and bool(message.sharding_key)


class StickyPartitioner:
    """A topic's queues, and the one that messages go to now: it changes with each batch, so that a
    batch holds few, long runs. Without load each message is a batch of its own, and queues simply
    take turns.
    """

    __slots__ = (
        "_keyed",
        "batch",
        "now",
        "pinned",
        "queue_writers",
        "queues",
        "selectable",
        "turn",
        "version",
    )

    def __init__(self) -> None:
        self.queue_writers: list[QueueWriter] = []
        # For messages that name a queue, in RocketMQ's order: the same queues, and those of broker
        # groups that have no writer now.
        self.pinned: dict[QueueRef, QueueWriter] = {}
        self.queues: tuple[QueueRef, ...] = ()  # those of `pinned`
        self.version = 0  # another number: the queues may be others
        self._keyed: dict[str, QueueWriter] = {}  # by sharding key, of keys that were met before
        # What selectors choose from, in RocketMQ's order: those of `queue_writers`, but of an
        # ordered topic all of `queues`.
        self.selectable: tuple[QueueRef, ...] = ()
        self.turn = random.randrange(1 << 16)  # producers do not all begin alike
        self.now: QueueWriter | None = None
        self.batch: Batch | None = None  # that `now` was chosen for

    def use(
        self,
        queue_writers: list[QueueWriter],
        pinned: Iterable[QueueWriter],
        *,
        is_ordered: bool = False,
    ) -> None:
        """Other queues from now on. ``is_ordered``: selectors get those of groups without a writer
        too.
        """
        self.queue_writers = queue_writers
        self.pinned = {writer.queue: writer for writer in pinned}
        self.queues = tuple(self.pinned)
        self._keyed.clear()
        live = {writer.queue for writer in queue_writers}
        self.selectable = self.queues if is_ordered else tuple(q for q in self.queues if q in live)
        self.now = self.batch = None
        self.version += 1

    def choose(self) -> QueueWriter | None:
        """The next queue: of a broker that answers in time, else of one that is connected, else of
        one that was once; None when there is none.
        """
        turn, best, best_rank = self.turn, None, 3
        for number in range(turn + 1, turn + 1 + len(self.queue_writers)):
            writer = self.queue_writers[number % len(self.queue_writers)]
            if writer.ready() and (rank := writer.sender.rank()) < best_rank:
                self.turn, self.now, best, best_rank = number, writer, writer, rank
                if rank == 0:
                    break
        return best

    def keyed(self, sharding_key: object) -> QueueWriter | None:
        """The queue of a key, also of a group without a writer: its messages wait, else their order
        would be lost. None for what is no text, and for a topic without queues.
        """
        if sharding_key.__class__ is not str or not self.queue_writers:
            return None
        assert isinstance(sharding_key, str)
        writer = self._keyed.get(sharding_key)
        if writer is None:
            writer = self.pinned[choose_by_hash(sharding_key, self.queues)]
            if len(self._keyed) >= KEYS_MAX:
                self._keyed.clear()
            self._keyed[sharding_key] = writer
        return writer

    def put(self, message: Message, waiter: Waiter) -> bool:
        """Sends by the rule; False when no queue can be encoded for. When a batch was closed, the
        next message without a key goes to the next queue."""
        if message.sharding_key:
            writer = self.keyed(message.sharding_key)
            if writer is None or not writer.ready():
                return False
            writer.sender.batcher.put(message, writer, waiter)
            return True
        writer = self.sticky()
        if writer is None:
            return False
        self.put_by(writer, writer, message, waiter)
        return True

    def put_to(self, queue: QueueRef, message: Message, waiter: Waiter) -> bool:
        """Sends to the queue that the message names; False when there is something to look at, or
        to wait for.
        """
        if queue.__class__ is not QueueRef or not queue.is_of(message.topic):
            return False
        writer = self.pinned.get(queue)
        if writer is None or not self.queue_writers or not writer.ready():
            return False
        writer.sender.batcher.put(message, writer, waiter)
        return True

    def sticky(self) -> QueueWriter | None:
        """The queue of the messages before, as long as their batch is open; else the next one."""
        writer = self.now
        if writer is None or self.batch is None or writer.sender.batcher.open is not self.batch:
            writer = self.choose()
        return writer

    def put_by(self, writer: QueueWriter, slot: Slot, message: Message, waiter: Waiter) -> None:
        """Sends to a queue that was chosen; ``slot``: it, or its messages of another kind."""
        batcher = writer.sender.batcher
        before = batcher.open
        batcher.put(message, slot, waiter)
        after = batcher.open
        self.batch = after if before is None or before is after else None

    def begin_run(self) -> None:
        """Behind a message without a key that :meth:`put` has put into the open batch: the next
        ones may go the same way without it.
        """
        assert self.now is not None
        self.now.sender.batcher.begin_run()

    def group(self, messages: list[Message], at: int, many: SendMany) -> list[int]:
        """Brings messages that follow each other from ``at`` on and have sharding keys into the
        order of their queues: those of one queue come together, in the order that they had. Where
        the messages of each queue end.
        """
        topic = messages[at].topic
        places: dict[QueueWriter, list[int]] = {}
        for place in range(at, len(messages)):
            message = messages[place]
            if not has_key(message) or message.topic != topic:
                break
            writer = self.keyed(message.sharding_key)
            if writer is None:
                break
            places.setdefault(writer, []).append(place)
        order = [place for group in places.values() for place in group]
        if len(places) > 1:
            messages[at : at + len(order)] = [messages[place] for place in order]
            many.reorder([place - at for place in order])
        return list(accumulate(map(len, places.values()), initial=at))[1:]

    def extend_keyed(self, messages: list[Message], at: int, many: SendMany, *, end: int) -> int:
        """As :meth:`extend`, of messages up to ``end``, all of one queue by their keys."""
        writer = self.keyed(messages[at].sharding_key)
        if writer is None or not writer.ready():
            return 0
        return writer.sender.batcher.extend(messages, at, writer, many, count=end - at)

    def extend(
        self,
        messages: list[Message],
        at: int,
        many: SendMany,
        half: tuple[HalfForm, str] | None = None,
    ) -> int:
        """Sends messages from ``at`` on to the queue of the ones before, as long as they go the
        same way without another look; how many. The next one is for :meth:`put`. ``half``: in this
        form, if the queue is of this broker group.
        """
        if has_key(messages[at]):
            return 0
        writer = self.now
        if writer is None or self.batch is None or writer.sender.batcher.open is not self.batch:
            return 0
        slot: Slot = writer
        if half is not None:
            form, broker_group = half
            if writer.queue.broker_group != broker_group:
                return 0
            slot = writer.of_half(form)
        batcher = writer.sender.batcher
        count = batcher.extend(messages, at, slot, many, count=len(messages) - at)
        if batcher.open is not self.batch:  # it was closed
            self.batch = None
        return count

    def named(self, queue: QueueRef) -> QueueWriter:
        """The queue that an application chose; without a broker group the first of its number.
        QueueNotFound.
        """
        for known, writer in self.pinned.items():
            same_group = queue.broker_group in ("", known.broker_group)
            if same_group and (queue.topic, queue.queue_id) == (known.topic, known.queue_id):
                return writer
        raise QueueNotFound(f"{queue} is not among the topic's writable queues.")
