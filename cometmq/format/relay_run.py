"""Many relayed records at once, without an object for each: how the broker delivers messages that
have waited for a delay level or for a time of their own, and those of committed transactions. The
bytes are those of :mod:`cometmq.format.relay`.

All of this exists twice: here, and in the C extension (:mod:`cometmq.native`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from cometmq.errors import BatchMalformed
from cometmq.format import delayed, halves, queueunit, record, timers
from cometmq.format.properties import STORED_FRAMING, tag_of
from cometmq.format.record import BODY_CRC_MASK, Record
from cometmq.format.relay import relay
from cometmq.model import PROPERTIES_BYTES_MAX, QueueKey
from cometmq.native import accelerator

TARGETS_MAX = 1024  # of one run


class RelayRun(NamedTuple):
    """Records to be appended: what they are made from, and for which queues."""

    sources: bytes  # stored records, which were verified
    places: array[int]  # uint32: where the source of each record begins, in the order of appending
    chosen: array[int]  # uint32: the index of its queue
    queues: tuple[QueueKey, ...]  # each once, and each gets a record
    transaction_flags: int = 0  # of SYSFLAG: that half messages are committed

    def sized(self) -> list[int]:
        """How many records each queue gets."""
        if len(self.queues) == 1:
            return [len(self.chosen)]
        counts = Counter(self.chosen)
        return [counts[index] for index in range(len(self.queues))]

    def encode(
        self,
        queue_offsets: Sequence[int],
        log_offset: int,
        store_time_ms: int,
        store_host: bytes,
        room: int = 0,
    ) -> tuple[bytearray, list[bytes]]:
        """The records as they are written at ``log_offset``, with so many zeros behind them for
        others; and the units of each queue, of which the first message gets the offset in
        ``queue_offsets``.
        """
        if accelerator is None:
            return _encode(self, queue_offsets, log_offset, store_time_ms, store_host, room)
        queues = tuple(
            (topic.encode(), queue_id, offset)
            for (topic, queue_id), offset in zip(self.queues, queue_offsets, strict=True)
        )
        return accelerator.relay(
            self.sources,
            self.places,
            self.chosen,
            queues,
            log_offset,
            store_time_ms,
            store_host,
            self.transaction_flags,
            room,
        )


def _encode(
    run: RelayRun,
    queue_offsets: Sequence[int],
    log_offset: int,
    store_time_ms: int,
    store_host: bytes,
    room: int,
) -> tuple[bytearray, list[bytes]]:
    pieces: list[bytes] = []
    units: list[list[bytes]] = [[] for _ in run.queues]
    for place, index in zip(run.places, run.chosen, strict=True):
        source, flags = record.decode(run.sources, place), run.transaction_flags
        made = relay(source, *run.queues[index], store_host, transaction_flags=flags)
        queue_offset = queue_offsets[index] + len(units[index])
        pieces.append(made.encode(queue_offset, log_offset, store_time_ms, store_host))
        code = made.tags_code(store_time_ms)
        units[index].append(queueunit.pack(log_offset, made.size_bytes, code))
        log_offset += made.size_bytes
    records = bytearray().join(pieces) + bytes(room)
    return records, [b"".join(of_queue) for of_queue in units]


def delivery_targets(sources: bytes, places: array[int]) -> tuple[list[bytes], array[int]]:
    """For which queues the first of these waiting messages are meant: different texts for
    :func:`cometmq.format.delayed.target_of_text`, and for each message the index of its own.

    Ends before the first message that is not certainly good and of our form: it needs a closer
    look.
    """
    if accelerator is None:
        return _delivery_targets(sources, places)
    texts, numbers = accelerator.delivery_targets(sources, places)
    chosen = array("I")
    chosen.frombytes(numbers)
    return texts, chosen


def _delivery_targets(sources: bytes, places: array[int]) -> tuple[list[bytes], array[int]]:
    numbers: dict[bytes, int] = {}
    chosen = array("I")
    for place in places:
        try:
            found = record.decode(sources, place)
        except BatchMalformed:
            break
        text = delayed.target_text(found.raw_properties)
        if text is None or timers.FOREIGN_NAME in found.raw_properties or not _is_good(found):
            break
        if text not in numbers and len(numbers) == TARGETS_MAX:
            break
        chosen.append(numbers.setdefault(text, len(numbers)))
    return list(numbers), chosen


class HalfTargets(NamedTuple):
    """What is known of the first of some half messages, without a look at each."""

    texts: list[bytes]  # different ones, for :func:`cometmq.format.halves.target_of_text`
    chosen: array[int]  # uint32: the index of each message's text
    ids: list[str]  # their unique ids
    store_times_ms: array[int]  # int64


def half_targets(sources: bytes, places: array[int]) -> HalfTargets:
    """As :func:`delivery_targets`, of half messages that have a unique id."""
    if accelerator is None:
        return _half_targets(sources, places)
    texts, numbers, ids, times = accelerator.half_targets(sources, places)
    targets = HalfTargets(texts, array("I"), ids, array("q"))
    targets.chosen.frombytes(numbers)
    targets.store_times_ms.frombytes(times)
    return targets


def _half_targets(sources: bytes, places: array[int]) -> HalfTargets:
    numbers: dict[bytes, int] = {}
    targets = HalfTargets([], array("I"), [], array("q"))
    for place in places:
        try:
            found = record.decode(sources, place)
        except BatchMalformed:
            break
        text, unique_id = halves.target_text(found.raw_properties)
        if not text or not unique_id or not _is_good(found):
            break
        if text not in numbers and len(numbers) == TARGETS_MAX:
            break
        targets.chosen.append(numbers.setdefault(text, len(numbers)))
        targets.ids.append(unique_id)
        targets.store_times_ms.append(found.store_time_ms)
    targets.texts.extend(numbers)
    return targets


class HalfRunPlaces(NamedTuple):
    """Half messages end to end that have one target, and ids that count on."""

    text: bytes  # for :func:`cometmq.format.halves.target_of_text`; empty without a message
    places: array[int]  # uint32: where each one begins


def half_run(sources: bytes, first_id: str) -> HalfRunPlaces:
    """Half messages end to end, the ids of which count on from ``first_id``. Ends before the first
    one that is not certainly good and of our form, has another id or another target.
    """
    if accelerator is None:
        return _half_run(sources, first_id)
    text, numbers = accelerator.half_run(sources, first_id.encode())
    return HalfRunPlaces(text, array("I", numbers))


def _half_run(sources: bytes, first_id: str) -> HalfRunPlaces:
    split = halves.split_id(first_id)
    text, places, at = b"", array("I"), 0
    while split is not None and at < len(sources):
        stream, counter = split
        targets = _half_targets(sources, array("I", [at]))
        expected = f"{stream}{counter + len(places):08X}"
        if targets.ids != [expected] or len(expected) != len(first_id):
            break
        if text not in (b"", targets.texts[0]):
            break
        text = targets.texts[0]
        places.append(at)
        at += record.decode(sources, at).size
    return HalfRunPlaces(text, places)


def _is_good(found: Record) -> bool:
    properties = found.raw_properties
    try:
        tag_of(properties).decode()
    except UnicodeDecodeError:
        return False
    return (
        len(properties) <= PROPERTIES_BYTES_MAX
        and STORED_FRAMING.fullmatch(properties) is not None
        and crc32(found.body) & BODY_CRC_MASK == found.body_crc
    )
