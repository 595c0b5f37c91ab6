"""Transactions on the wire: protobuf → arguments, results → protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def ends(protos: Sequence[broker_pb2.TransactionEnd]) -> list[End]:
    """Raises LimitExceeded, InvalidRequest (a resolution that is none)."""
    if len(protos) > ENDS_MAX:
        raise LimitExceeded(f"{len(protos)} halves, {ENDS_MAX} are allowed")
    return [_end(proto) for proto in protos]


def _end(proto: broker_pb2.TransactionEnd) -> End:
    try:
        resolution = Resolution(proto.resolution)
    except ValueError:
        raise InvalidRequest(f"resolution: {proto.resolution} is none") from None
    half = proto.half
    return End(HalfName(half.half_offset, half.log_offset, half.transaction_id), resolution)


def half_ref(name: HalfName) -> broker_pb2.HalfRef:
    return broker_pb2.HalfRef(
        half_offset=name.half_offset,
        log_offset=name.log_offset,
        transaction_id=name.transaction_id,
    )


def results(
    answers: Iterable[EndedHalf | CometError], broker_group: str, reader: Reader
) -> broker_pb2.EndTransactionsResponse:
    generations: dict[QueueKey, int] = {}
    return broker_pb2.EndTransactionsResponse(
        results=[_result(answer, broker_group, reader, generations) for answer in answers]
    )


def _result(
    answer: EndedHalf | CometError,
    broker_group: str,
    reader: Reader,
    generations: dict[QueueKey, int],
) -> broker_pb2.TransactionResult:
    if isinstance(answer, CometError):
        return broker_pb2.TransactionResult(error=to_proto(answer))
    if not answer.is_committed:
        return broker_pb2.TransactionResult()
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
