"""Transactions on the wire: protobuf → arguments, results → protobuf."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from cometmq.errors import CometError, InvalidRequest, LimitExceeded
from cometmq.format import halves, ids
from cometmq.member.read.reader import Reader
from cometmq.member.rpc import convert
from cometmq.messaging.half_runs import EndedHalf, EndedRun
from cometmq.messaging.transactions import Resolution
from cometmq.model import QueueKey
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, common_pb2
from services.broker.transactions.checks import Check, Refused
from services.broker.transactions.ends import ENDS_MAX, Outcome
from services.broker.transactions.names import EndRun, HalfName

_RESOLUTIONS = {one.value: one for one in Resolution}
_COUNTER_MAX = 0xFFFF_FFFF


def runs(protos: Sequence[broker_pb2.TransactionEnd]) -> list[EndRun]:
    """Raises LimitExceeded, InvalidRequest (a resolution that is none, ids that do not count)."""
    count = sum([1 + len(proto.following_log_offsets) for proto in protos])
    if count > ENDS_MAX:
        raise LimitExceeded(f"{count} halves, {ENDS_MAX} are allowed")
    return list(map(_run, protos))


def _run(proto: broker_pb2.TransactionEnd) -> EndRun:
    resolution, half = _RESOLUTIONS.get(proto.resolution), proto.half
    if resolution is None:
        raise InvalidRequest(f"resolution: {proto.resolution} is none")
    log_offsets = array("q", (half.log_offset,))
    log_offsets.extend(proto.following_log_offsets)
    if len(log_offsets) > 1:
        split = halves.split_id(half.transaction_id)
        if split is None or split[1] + len(log_offsets) - 1 > _COUNTER_MAX:
            raise InvalidRequest(
                "following_log_offsets: the transaction ids do not count on so far"
            )
    first = HalfName(half.half_offset, half.log_offset, half.transaction_id)
    return EndRun(first, log_offsets, resolution)


def half_ref(name: HalfName) -> broker_pb2.HalfRef:
    return broker_pb2.HalfRef(
        half_offset=name.half_offset,
        log_offset=name.log_offset,
        transaction_id=name.transaction_id,
    )


def results(
    outcomes: Sequence[Sequence[Outcome]], broker_group: str, reader: Reader
) -> broker_pb2.EndTransactionsResponse:
    """``outcomes``: those of each end of the request."""
    results = _Results(broker_group, reader)
    for of_run in outcomes:
        singly: list[EndedHalf | CometError] = []
        for outcome in of_run:
            if isinstance(outcome, EndedRun):
                assert not singly, "those that ended together come first"
                results.add_run(outcome)
            else:
                singly.append(outcome)
        for some in _neighbours(singly):
            results.add(some)
    return broker_pb2.EndTransactionsResponse(results=results.found)


def _neighbours(
    answers: Sequence[EndedHalf | CometError],
) -> Iterator[Sequence[EndedHalf | CometError]]:
    """Halves with one result: neighbours in a queue, or rolled back."""
    first = 0
    for at in range(1, len(answers)):
        if not _are_neighbours(answers[at - 1], answers[at]):
            yield answers[first:at]
            first = at
    if answers:
        yield answers[first:]


def _are_neighbours(one: EndedHalf | CometError, other: EndedHalf | CometError) -> bool:
    if isinstance(one, CometError) or isinstance(other, CometError):
        return False
    if one.queue_offset < 0 or other.queue_offset < 0:
        return one.queue_offset == other.queue_offset
    return one[2:4] == other[2:4] and one.queue_offset + 1 == other.queue_offset


class _Results:
    """The results of a response."""

    def __init__(self, broker_group: str, reader: Reader) -> None:
        self.found: list[broker_pb2.TransactionResult] = []
        self._broker_group = broker_group
        self._reader = reader
        self._generations: dict[QueueKey, int] = {}

    def add(self, some: Sequence[EndedHalf | CometError]) -> None:
        """Halves that have one result."""
        answer, places = some[0], array("q")
        if isinstance(answer, CometError):
            self.found.append(broker_pb2.TransactionResult(error=to_proto(answer)))
            return
        places.extend([one.log_offset for one in some if not isinstance(one, CometError)])
        queue = answer.topic, answer.queue_id
        self._add(len(some), queue, answer.queue_offset, places)

    def add_run(self, ended: EndedRun) -> None:
        """Halves that ended together."""
        queue = ended.topic, ended.queue_id
        self._add(len(ended.offsets), queue, ended.queue_offset, ended.log_offsets)

    def _add(self, count: int, queue: QueueKey, offset: int, places: array[int]) -> None:
        count = count if count > 1 else 0
        if offset < 0:
            self.found.append(broker_pb2.TransactionResult(count=count))
            return
        result = broker_pb2.TransactionResult(
            queue=convert.queue_proto(*queue),
            position=common_pb2.Position(generation=self._generation(queue), offset=offset),
            message_id=ids.message_id(self._broker_group, places[0]),
            count=count,
            following_log_offsets=places[1:],
        )
        self.found.append(result)

    def _generation(self, queue: QueueKey) -> int:
        found = self._generations.get(queue)
        if found is None:
            try:
                found = self._reader.queue(*queue).generation
            except CometError:  # its topic was deleted since
                found = 0
            self._generations[queue] = found
        return found


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
