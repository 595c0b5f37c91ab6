"""The description that a client gives of itself, on the wire."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from cometmq.client.namespaces import Namespace
from cometmq.client.remote.rates import Rates
from cometmq.clock import SystemClock
from cometmq.model import Filter, Position, QueueRef
from cometmq.telemetry import version
from cometmq.v1 import broker_pb2, common_pb2

# Together they keep a description below 1 MiB, whatever the names.
QUEUES_MAX = 1_024
CALLS_MAX = 64
OPTIONS_MAX, OPTION_LENGTH_MAX = 128, 256
SUBSCRIPTIONS_BYTES_MAX = 128 * 1024
STACKS_BYTES_MAX = 256 * 1024

_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue that a client reads. ``lock_number`` None: it is not read in order. ``pulled_s``: by
    the event loop's clock; None: never.
    """

    queue: QueueRef
    committed: Position | None
    next: Position | None
    cached_count: int
    cached_bytes: int
    call_count: int = 0
    pulled_s: float | None = None
    lock_number: int | None = None
    is_locked: bool = False
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The messages that a client has received of a broker group (POP). ``received_s``: as
    ``pulled_s``.
    """

    broker_group: str
    held_count: int
    held_bytes: int
    call_count: int
    received_s: float | None


@dataclass(frozen=True, slots=True)
class SendingState:
    """How a producer sends to a broker group."""

    broker_group: str
    is_connected: bool
    in_flight_count: int  # batches
    waiting_count: int  # messages, those in flight included
    waiting_bytes: int
    stored_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class CallState:
    """A listener call that runs."""

    queue: QueueRef
    queue_offset: int
    count: int
    age_s: float
    is_late: bool
    stack: str = ""


class Describer:
    """Of one client: writes down what is handed in, within the limits."""

    def __init__(
        self, role: broker_pb2.ClientRole.ValueType, options: Any, namespace: Namespace
    ) -> None:
        self._role = role
        self._options = options
        self._namespace = namespace
        self._started_ms = _CLOCK.wall_ms()

    def describe(
        self,
        rates: Rates,
        *,
        subscriptions: Mapping[str, Filter] | None = None,
        queues: Sequence[QueueState] = (),
        leases: Iterable[LeaseState] = (),
        sending: Iterable[SendingState] = (),
        calls: Sequence[CallState] = (),
        call_count: int = 0,
        is_suspended: bool = False,
    ) -> broker_pb2.ClientDescription:
        """``calls``: at most CALLS_MAX, of ``call_count`` that run."""
        now_s, now_ms = asyncio.get_running_loop().time(), _CLOCK.wall_ms()
        wire = self._namespace.wire

        def wall_ms(at_s: float | None) -> int:
            return 0 if at_s is None else now_ms - round((now_s - at_s) * 1000)

        described = broker_pb2.ClientDescription(
            role=self._role,
            version=version(),
            language=f"python {platform.python_version()}",
            start_time_ms=self._started_ms,
            time_ms=now_ms,
            options=options_text(self._options),
            is_suspended=is_suspended,
            queue_count=len(queues),
            rates_window_ms=round(rates.window_s(now_s) * 1000),
            call_count=call_count,
        )
        described.subscriptions.extend(self._subscriptions(subscriptions or {}))
        for state in sorted(queues, key=_place)[:QUEUES_MAX]:
            described.queues.add(
                queue=self._queue(state.queue),
                broker_group=state.queue.broker_group,
                committed=_position(state.committed),
                next=_position(state.next),
                cached_count=state.cached_count,
                cached_bytes=state.cached_bytes,
                call_count=state.call_count,
                lock_number=state.lock_number,
                is_locked=state.is_locked,
                last_pull_ms=wall_ms(state.pulled_s),
                is_paused=state.is_paused,
            )
        for lease in leases:
            described.leases.add(
                broker_group=lease.broker_group,
                held_count=lease.held_count,
                held_bytes=lease.held_bytes,
                call_count=lease.call_count,
                last_receive_ms=wall_ms(lease.received_s),
            )
        for one in sending:
            described.sending.add(
                broker_group=one.broker_group,
                is_connected=one.is_connected,
                in_flight_count=one.in_flight_count,
                waiting_count=one.waiting_count,
                waiting_bytes=one.waiting_bytes,
                stored_count=one.stored_count,
                failed_count=one.failed_count,
            )
        for rate in rates.per_second(now_s):
            described.rates.add(
                topic=wire(rate.topic) if rate.topic else "",
                pulled=rate.pulled,
                done=rate.done,
                failed=rate.failed,
                process_ms=rate.process_ms,
            )
        self._add_calls(described, calls)
        return described

    def _subscriptions(
        self, subscriptions: Mapping[str, Filter]
    ) -> Iterator[broker_pb2.Subscription]:
        room = SUBSCRIPTIONS_BYTES_MAX
        for topic, wanted in sorted(subscriptions.items()):
            one = broker_pb2.Subscription(
                topic=self._namespace.wire(topic),
                filter=common_pb2.Filter(tags=sorted(wanted.tags), sql=wanted.sql),
            )
            room -= one.ByteSize()
            if room < 0:
                return
            yield one

    def _add_calls(
        self, described: broker_pb2.ClientDescription, calls: Sequence[CallState]
    ) -> None:
        room = STACKS_BYTES_MAX
        for call in calls:
            stack_bytes = len(call.stack.encode())
            stack = call.stack if stack_bytes <= room else ""
            room -= stack_bytes if stack else 0
            described.calls.add(
                queue=self._queue(call.queue),
                broker_group=call.queue.broker_group,
                queue_offset=call.queue_offset,
                count=call.count,
                age_ms=round(call.age_s * 1000),
                is_late=call.is_late,
                stack=stack,
            )

    def _queue(self, queue: QueueRef) -> common_pb2.QueueRef:
        return common_pb2.QueueRef(topic=self._namespace.wire(queue.topic), queue_id=queue.queue_id)


def _place(state: QueueState) -> tuple[str, str, int]:
    queue = state.queue
    return queue.topic, queue.broker_group, queue.queue_id


def _position(position: Position | None) -> common_pb2.Position | None:
    if position is None:
        return None
    return common_pb2.Position(generation=position.generation, offset=position.offset)


def options_text(options: Any) -> dict[str, str]:
    """Options by name. Of objects of the application only their kind is shown."""
    told = {}
    for option in fields(options)[:OPTIONS_MAX]:
        value = getattr(options, option.name)
        if isinstance(value, Enum):
            text = value.name
        elif isinstance(value, str | int | float) or value is None:
            text = str(value)
        elif isinstance(value, tuple):
            text = ", ".join(type(one).__name__ for one in value)
        else:
            name = getattr(value, "label", None) or getattr(value, "__name__", None)
            text = str(name or type(value).__name__)
        text = text.encode("utf-8", "replace").decode()  # a path may be no Unicode
        told[option.name] = text[:OPTION_LENGTH_MAX]
    return told
