"""Tells one broker group what became of messages that a push consumer received (POP): done, failed,
or still in work.

One call at a time, so a handle is never used while it is being replaced. What comes while a call is
on its way travels with the next one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

from cometmq.client.messages import Later
from cometmq.client.names import of
from cometmq.client.pop.calls import Lease, PopCalls, ack_items
from cometmq.client.reading.offsets import BrokerCalls, send_back_item
from cometmq.errors import CometError, FlowControl, Retry
from cometmq.model import Position
from cometmq.rpc.tasks import wait_at_most
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

LOOK_S = 0.5  # between two looks at leases that have to be renewed
RENEW_AT = 0.5  # of the invisible time left
AGAIN_S = 0.2  # before a call is made again that nobody answered
GIVEN_BACK_MS = 10_000  # the shortest invisible time

_log = logger(__name__)

Offsets = defaultdict[Lease, set[int]]


class PopSettler:
    """``lost`` of a lease is called when its messages are delivered again."""

    def __init__(self, pop: PopCalls, calls: BrokerCalls, broker_group: str) -> None:
        self._pop = pop
        self._calls = calls
        self._broker_group = broker_group
        self._done: Offsets = defaultdict(set)
        self._failed: Offsets = defaultdict(set)
        # By lease, delay level, delay in ms.
        self._sent_back: defaultdict[tuple[Lease, int, int], set[int]] = defaultdict(set)
        self._leases: dict[Lease, None] = {}  # with messages in work
        self._wake = asyncio.Event()
        self._is_closing = False
        # Called when the broker group knows what is done, and whether (True) something failed; and
        # when the messages of a lease come again.
        self.on_told: Callable[[bool], None] = lambda _: None
        self.on_lost: Callable[[Lease], None] = lambda _: None

    def add(self, lease: Lease) -> None:
        """Its messages are in work."""
        self._leases[lease] = None

    def done(self, lease: Lease, offsets: Iterable[int]) -> None:
        """The listener is done with these messages."""
        self._done[lease].update(offsets)
        self._wake.set()

    def failed(self, lease: Lease, offsets: Iterable[int], later: Later) -> None:
        """The listener could not do these: they come again as the group's policy says, or after the
        listener's delay, or are dead letters.
        """
        if later.delay_level or later.delay_ms:
            self._sent_back[lease, later.delay_level, later.delay_ms].update(offsets)
        else:
            self._failed[lease].update(offsets)
        self._wake.set()

    async def run(self) -> None:
        """Until it is closed."""
        while not self._is_closing:
            await wait_at_most(self._wake, LOOK_S)
            if not await self.settle() and not self._is_closing:
                await self._calls.wait(AGAIN_S)

    def close(self) -> None:
        """:meth:`run` ends after the call that it makes."""
        self._is_closing = True
        self._wake.set()

    async def settle(self) -> bool:
        """Tell all that there is; False: nobody answered, some of it is left."""
        self._wake.clear()
        if not await self._end_changes():
            return False
        await self._send_back()
        has_done, has_failed = bool(self._done), bool(self._failed)
        is_told = await self._acknowledge()
        await self._fail()
        if has_done or has_failed:
            self.on_told(has_failed)
        await self._renew()
        return is_told

    async def give_back(self) -> None:
        """Gives back messages that were not begun: they come again soon, to another member."""
        leases = [lease for lease in self._leases if not lease.is_lost]
        items = [_all_of(lease, GIVEN_BACK_MS) for lease in leases]
        answers = await self._pop.change(self._broker_group, items)
        for lease, answer in zip(leases, answers, strict=True):
            if isinstance(answer, CometError):
                self._tell("messages are not given back: they come again later", lease, answer)
        self._leases.clear()

    def _ended(self, lease: Lease, offsets: set[int]) -> None:
        lease.open_count -= len(offsets)
        if lease.open_count <= 0:
            self._leases.pop(lease, None)

    async def _acknowledge(self) -> bool:
        done, self._done = self._done, defaultdict(set)
        pairs = [(lease, item) for lease, some in done.items() for item in ack_items(lease, some)]
        if not pairs:
            return True
        answers = await self._pop.acknowledge(self._broker_group, [item for _, item in pairs])
        now_s = asyncio.get_running_loop().time()
        for (lease, item), error in zip(pairs, answers, strict=True):
            offsets = set(range(item.first_offset, item.first_offset + item.count))
            if error is not None and error.retry is not Retry.NEVER and now_s < lease.until_s:
                self._done[lease] |= offsets
                continue
            if error is not None:
                self._tell("messages are not acknowledged: they come again", lease, error)
            self._ended(lease, offsets)
        return not self._done

    async def _fail(self) -> None:
        failed, self._failed = self._failed, defaultdict(set)
        items = []
        for lease, offsets in failed.items():
            items += [
                broker_pb2.ChangeInvisibleTimeItem(messages=item, failed=True)
                for item in ack_items(lease, offsets)
            ]
            self._ended(lease, offsets)
        for answer in await self._pop.change(self._broker_group, items):
            if isinstance(answer, CometError):
                # They come again all the same, when their time is over.
                _log.info("a failure is not told", extra=fields(error=answer))

    async def _send_back(self) -> None:
        """To the retry topic after a level, or among the dead letters; then they are done here."""
        sent_back, self._sent_back = self._sent_back, defaultdict(set)
        for (lease, level, delay_ms), offsets in sent_back.items():
            places = sorted(offsets)
            items = [
                send_back_item(lease.queue, Position(0, one), level, delay_ms) for one in places
            ]
            answers = await self._calls.send_back(self._broker_group, items)
            for offset, error in zip(places, answers, strict=True):
                if error is None:
                    self._done[lease].add(offset)
                else:
                    self._tell("message not taken back: it comes again", lease, error)
                    self._ended(lease, {offset})

    async def _end_changes(self) -> bool:
        """Ask for the new handles again whose answer did not come: the old ones may be good for
        nothing. False: nobody answers.
        """
        leases = [one for one in self._leases if one.changing_s is not None and not one.is_lost]
        await self._renew_all(leases)
        return all(one.changing_s is None or one.is_lost for one in leases)

    async def _renew(self) -> None:
        now_s = asyncio.get_running_loop().time()
        await self._renew_all(
            [
                lease
                for lease in self._leases
                if not lease.is_lost and lease.until_s - now_s < lease.invisible_s * RENEW_AT
            ]
        )

    async def _renew_all(self, leases: list[Lease]) -> None:
        now_s = asyncio.get_running_loop().time()
        for lease in leases:
            lease.changing_s = lease.changing_s or now_s
        items = [_all_of(lease, round(lease.invisible_s * 1000)) for lease in leases]
        for lease, answer in zip(
            leases, await self._pop.change(self._broker_group, items), strict=True
        ):
            if not isinstance(answer, CometError):
                # The broker began to count when it was asked for the first time, or later.
                assert lease.changing_s is not None
                lease.handle, lease.until_s = answer.handle, lease.changing_s + lease.invisible_s
                lease.changing_s = None
                continue
            if isinstance(answer, FlowControl):  # the handle is as it was
                lease.changing_s = None
            if answer.retry is Retry.NEVER or lease.until_s < now_s:
                lease.is_lost = True
                self._leases.pop(lease, None)
                self._tell("the time for messages is over: they come again", lease, answer)
                self.on_lost(lease)

    def _tell(self, what: str, lease: Lease, error: CometError) -> None:
        _log.warning(what, extra=fields(**of(lease.queue), error=error))


def _all_of(lease: Lease, invisible_ms: int) -> broker_pb2.ChangeInvisibleTimeItem:
    messages = broker_pb2.AckItem(handle=lease.handle)
    return broker_pb2.ChangeInvisibleTimeItem(messages=messages, invisible_ms=invisible_ms)
