"""What becomes of the messages of a ``send_many``, beside what becomes of them one by one."""

from __future__ import annotations

import asyncio
import gc
import random
from asyncio import Future
from collections.abc import Iterator

import pytest

from cometmq.client.messages import SendReceipt, StoredRun
from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.sending.send_many import (
    CHUNK_BYTES,
    MessageRange,
    SendMany,
    SendReceipts,
    chunks,
)
from cometmq.errors import FlowControl, SendTimeout
from cometmq.model import Message, QueueRef


class Twins:
    """The same batches twice: with a future for each message, and with ranges of ``send_many``.
    They are split, stored and refused alike.
    """

    def __init__(self, source: random.Random) -> None:
        loop = asyncio.get_running_loop()
        self.source = source
        self.futures: list[Future[SendReceipt]] = []
        self.many = SendMany(loop)
        self.others: list[Future[SendReceipt]] = []  # single messages between those of send_many
        self.places: list[int] = []  # in `futures`, of the messages of send_many
        self.open: list[tuple[Batch, Batch]] = []
        for sequence in range(source.randint(1, 4)):
            one, many = Batch(sequence, 9.0), Batch(sequence, 9.0)
            for queue_id in range(source.randint(1, 4)):
                segment = Segment(QueueRef("T", queue_id, "g"), False, "ID", one.count)
                segment.count = source.randint(1, 9)
                for batch in (one, many):
                    batch.segments.append(segment.part(0, segment.count))
                    for _ in range(segment.count):
                        batch.starts.append(len(batch.buffer))
                        batch.buffer += b"x" * source.randint(1, 3)
            self._wait(one, many, loop)
            many.buffer, many.starts = one.buffer[:], one.starts[:]
            one.close()
            many.close()
            self.open.append((one, many))
        self.many.end()

    def _wait(self, one: Batch, many: Batch, loop: asyncio.AbstractEventLoop) -> None:
        one.waiters = [loop.create_future() for _ in range(one.count)]
        left = one.count
        while left:
            count = self.source.randint(1, left)
            first = len(self.futures) + one.count - left
            if self.source.random() < 0.2:
                self.others += [loop.create_future() for _ in range(count)]
                many.waiters += self.others[-count:]
            else:
                many.waiters.append(self.many.take(count))
                self.places += range(first, first + count)
            left -= count
        self.futures += [w for w in one.waiters if isinstance(w, Future)]

    def step(self) -> None:
        """Something happens to one of the batches."""
        one, many = self.open.pop(self.source.randrange(len(self.open)))
        match self.source.randrange(4):
            case 0 if one.count > 1:
                at = self.source.randrange(1, one.count)
                self.open += zip(one.split_at(at), many.split_at(at), strict=True)
            case 1:
                chosen = {n for n in range(len(one.segments)) if self.source.random() < 0.5}
                for singles, ranges in zip(one.split(chosen), many.split(chosen), strict=True):
                    self.open += zip(singles, ranges, strict=True)
            case 2:
                error = self.source.choice([SendTimeout("late"), FlowControl("full")])
                one.failed(error)
                many.failed(error)
            case _:
                runs = [StoredRun(s.queue, self.source.randrange(99), 1) for s in one.segments]
                first = 0
                for run, segment in zip(runs, one.segments, strict=True):
                    run.starts, run.first = one.starts, first
                    run.id_stream, run.first_counter = segment.id_stream, segment.first_counter
                    first += segment.count
                one.stored(runs)
                many.stored(runs)

    def is_awaited(self) -> bool:
        """Whether one of the open batches has a message of send_many."""
        return any(isinstance(w, MessageRange) for _, many in self.open for w in many.waiters)

    def outcomes(self, receipts: SendReceipts) -> Iterator[tuple[object, object]]:
        """What each message of send_many got, and its twin."""
        for place, twin in enumerate(self.places):
            if place in receipts.errors:
                yield receipts.errors[place], self.futures[twin].exception()
            else:
                yield facts(receipts[place]), facts(self.futures[twin].result())


def facts(receipt: SendReceipt) -> tuple[object, ...]:
    return receipt.message_id, receipt.unique_id, receipt.queue, receipt.queue_offset


async def test_ranges_share_the_fate_of_single_messages() -> None:
    for seed in range(300):
        twins = Twins(random.Random(seed))
        while twins.open:
            assert twins.many.decided.done() is not twins.is_awaited(), seed
            twins.step()
        receipts = await twins.many.decided
        assert len(receipts) == len(twins.places)
        for got, wanted in twins.outcomes(receipts):
            assert got == wanted, seed
        assert all(future.done() for future in twins.others)
        for future in (*twins.futures, *twins.others):
            future.exception()


def receipts_of(errors: dict[int, BaseException]) -> SendReceipts:
    run = StoredRun(QueueRef("T", 0, "g"), 100, 1)
    return SendReceipts(10, [(5, run, 5), (0, run, 0)], errors)


def test_receipts_are_a_sequence() -> None:
    receipts = receipts_of({})
    assert [receipt.queue_offset for receipt in receipts] == list(range(100, 110))
    assert receipts[-1].queue_offset == 109
    assert [receipt.queue_offset for receipt in receipts[2:8:3]] == [102, 105]
    with pytest.raises(IndexError):
        receipts[10]
    receipts.raise_first_error()


def test_an_error_is_that_of_its_message() -> None:
    late, full = SendTimeout("late"), FlowControl("full")
    receipts = receipts_of({7: full, 3: late})
    assert dict(receipts.errors) == {3: late, 7: full}
    assert receipts[2].queue_offset == 102
    with pytest.raises(FlowControl):
        receipts[7]
    with pytest.raises(SendTimeout):
        receipts.raise_first_error()


@pytest.mark.parametrize("is_seen", [True, False])
def test_errors_that_nobody_looks_at_are_logged(
    is_seen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    receipts = receipts_of({3: SendTimeout("late")})
    if is_seen:
        assert len(receipts.errors) == 1
    del receipts
    gc.collect()
    assert ("nobody looked" in caplog.text) is not is_seen


def test_an_iterator_is_taken_in_small_chunks() -> None:
    taken = 0

    def endless() -> Iterator[Message]:
        nonlocal taken
        while True:
            taken += 1
            yield Message("T", bytes(CHUNK_BYTES // 4))

    found = chunks(endless())
    for number in (1, 2):
        assert len(next(found)) == 4
        assert taken == number * 4


def test_what_an_iterator_gave_before_it_raised_comes_first() -> None:
    def broken() -> Iterator[Message]:
        yield Message("T", b"1")
        raise ZeroDivisionError

    found = chunks(broken())
    assert [message.body for message in next(found)] == [b"1"]
    with pytest.raises(ZeroDivisionError):
        next(found)
