"""Transactions on the wire: protobuf → arguments, results → protobuf."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from cometmq.errors import CometError, InvalidRequest, LimitExceeded
from cometmq.format import ids
from cometmq.member.read.reader import Reader
from cometmq.member.rpc import convert
from cometmq.messaging.transactions import EndedHalf, Resolution
from cometmq.model import QueueKey
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, common_pb2
from services.broker.transactions.checks import Check, Refused
from services.broker.transactions.ends import ENDS_MAX, End, HalfName

_RESOLUTIONS = {one.value: one for one in Resolution}
_NUMBERED = re.compile(r"(.*)([0-9A-F]{8})")  # a transaction id that others count on from


def ends(protos: Sequence[broker_pb2.TransactionEnd]) -> list[End]:
    """One for each half. Raises LimitExceeded, InvalidRequest (a resolution that is none, ids that
    do not count).
    """
    count = sum(counts_of(protos))
    if count > ENDS_MAX:
        raise LimitExceeded(f"{count} halves, {ENDS_MAX} are allowed")
    found: list[End] = []
    for proto in protos:
        resolution, half = _RESOLUTIONS.get(proto.resolution), proto.half
        if resolution is None:
            raise InvalidRequest(f"resolution: {proto.resolution} is none")
        first = HalfName(half.half_offset, half.log_offset, half.transaction_id)
        found.append(End(first, resolution))
        if proto.following_log_offsets:
            names = _following(first, proto.following_log_offsets)
            # A thousand of them: no call of Python for each.
            found += map(tuple.__new__, repeat(End), zip(names, repeat(resolution)))
    return found


def counts_of(protos: Sequence[broker_pb2.TransactionEnd]) -> list[int]:
    """How many halves each is for."""
    return [1 + len(proto.following_log_offsets) for proto in protos]


def _following(first: HalfName, log_offsets: Sequence[int]) -> Iterator[HalfName]:
    numbered = _NUMBERED.fullmatch(first.transaction_id)
    counter = int(numbered[2], 16) if numbered else 0
    if not numbered or counter + len(log_offsets) > 0xFFFF_FFFF:
        raise InvalidRequest("following_log_offsets: the transaction ids do not count on so far")
    stream, offset = numbered[1], first.half_offset + 1
    numbers = range(counter + 1, counter + 1 + len(log_offsets))
    names = [f"{stream}{number:08X}" for number in numbers]
    columns = zip(itertools.count(offset), log_offsets, names)
    return map(tuple.__new__, repeat(HalfName), columns)


def half_ref(name: HalfName) -> broker_pb2.HalfRef:
    return broker_pb2.HalfRef(
        half_offset=name.half_offset,
        log_offset=name.log_offset,
        transaction_id=name.transaction_id,
    )


def results(
    answers: Sequence[EndedHalf | CometError],
    counts: Sequence[int],
    broker_group: str,
    reader: Reader,
) -> broker_pb2.EndTransactionsResponse:
    """``counts``: of the answers, for how many halves each end was."""
    generations: dict[QueueKey, int] = {}
    found: list[broker_pb2.TransactionResult] = []
    at = 0
    for count in counts:
        for run in _runs(answers[at : at + count]):
            found.append(_result(run, broker_group, reader, generations))
        at += count
    return broker_pb2.EndTransactionsResponse(results=found)


def _runs(
    answers: Sequence[EndedHalf | CometError],
) -> Iterator[Sequence[EndedHalf | CometError]]:
    """Halves with one result: neighbours in a queue, or rolled back."""
    first = 0
    for at in range(1, len(answers)):
        if not _are_neighbours(answers[at - 1], answers[at]):
            yield answers[first:at]
            first = at
    yield answers[first:]


def _are_neighbours(one: EndedHalf | CometError, other: EndedHalf | CometError) -> bool:
    if isinstance(one, CometError) or isinstance(other, CometError):
        return False
    if one.queue_offset < 0 or other.queue_offset < 0:
        return one.queue_offset == other.queue_offset
    return one[2:4] == other[2:4] and one.queue_offset + 1 == other.queue_offset


def _result(
    run: Sequence[EndedHalf | CometError],
    broker_group: str,
    reader: Reader,
    generations: dict[QueueKey, int],
) -> broker_pb2.TransactionResult:
    answer, count = run[0], len(run) if len(run) > 1 else 0
    if isinstance(answer, CometError):
        return broker_pb2.TransactionResult(error=to_proto(answer))
    if not answer.is_committed:
        return broker_pb2.TransactionResult(count=count)
    key = answer.topic, answer.queue_id
    generation = generations.get(key)
    if generation is None:
        try:
            generation = reader.queue(*key).generation
        except CometError:  # its topic was deleted since
            generation = 0
        generations[key] = generation
    return broker_pb2.TransactionResult(
        queue=convert.queue_proto(answer.topic, answer.queue_id),
        position=common_pb2.Position(generation=generation, offset=answer.queue_offset),
        message_id=ids.message_id(broker_group, answer.log_offset),
        count=count,
        following_log_offsets=[
            one.log_offset for one in run[1:] if not isinstance(one, CometError)
        ],
    )


def outgoing(
    checks: Iterable[Check], refused: Iterable[Refused]
) -> broker_pb2.CheckTransactionsResponse:
    return broker_pb2.CheckTransactionsResponse(
        checks=[
            broker_pb2.TransactionCheck(
                half=half_ref(one.half), record=one.record, check_count=one.check_count
            )
            for one in checks
        ],
        refused=[
            broker_pb2.RefusedAnswer(half=half_ref(one.half), error=to_proto(one.error))
            for one in refused
        ],
    )
