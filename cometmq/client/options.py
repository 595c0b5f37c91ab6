"""All options of the clients: typed, defaulted, checked when the object is made. Units stand in the
names.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from cometmq.client.messages import ConsumeFrom
from cometmq.errors import ConfigInvalid
from cometmq.model import Message, QueueRef
from cometmq.rpc.retry import BackoffPolicy

Options = TypeVar("Options")
QueueSelector = Callable[[Message, Sequence[QueueRef]], QueueRef]

_MIB = 1024 * 1024


def _option(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"min": low, "max": high})


def _check(options: Any) -> None:
    """Raises ConfigInvalid for the first option that is not of its kind or outside its range."""
    for option in fields(options):
        value = getattr(options, option.name)
        if "min" in option.metadata:
            low, high = option.metadata.values()
            if type(value) is not int or not low <= value <= high:
                raise ConfigInvalid(
                    f"{option.name} must be a whole number from {low} to {high}, not {value!r}."
                )
        elif not _KINDS[option.name](value):
            raise ConfigInvalid(f"{option.name} cannot be {value!r}.")


# Options that are no numbers, and what they may be. consume_from="FIRST" would read as LAST.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "batch_checksum": lambda value: isinstance(value, bool),
    "selector": lambda value: value is None or callable(value),
    "consume_from": lambda value: isinstance(value, ConsumeFrom),
    "client_id": lambda value: isinstance(value, str) and value.isprintable() and value != "",
}


def options_of(kind: type[Options], options: object) -> Options:
    """The options of a client, the defaults for None; ConfigInvalid: they are of another one."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise ConfigInvalid(f"The options must be a {kind.__name__}, not {options!r}.")
    return options


def new_client_id() -> str:
    """``host@pid@six random digits``: unique within a group, and tells a person where the client
    runs.
    """
    return f"{socket.gethostname()[:200]}@{os.getpid()}@{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options of :class:`cometmq.client.Producer`."""

    delivery_timeout_ms: int = _option(30_000, 1, 86_400_000)  # from send() to SendTimeout
    # How long send() waits for a topic's first route.
    route_timeout_ms: int = _option(3_000, 1, 86_400_000)
    request_timeout_ms: int = _option(3_000, 1, 600_000)  # opening a stream
    # Oldest batch unanswered: the stream is given up.
    answer_timeout_ms: int = _option(10_000, 1, 86_400_000)
    batch_bytes_max: int = _option(256 * 1024, 1024, 4 * _MIB)  # a batch is closed at this size ...
    # ... or this many messages, or at the end of the loop's turn.
    batch_count_max: int = _option(1024, 1, 1024)
    in_flight_max: int = _option(8, 1, 1024)  # batches sent and unanswered, a broker group
    # Encoded and unanswered; then send() waits.
    buffer_bytes_max: int = _option(8 * _MIB, 1024, 64 * 1024 * _MIB)
    retry_backoff_ms: int = _option(100, 1, 600_000)  # the first wait; doubles, with full jitter
    retry_backoff_max_ms: int = _option(3_000, 1, 600_000)
    batch_checksum: bool = True  # a CRC-32 over each batch, beside the one over each body
    # Chooses a queue for messages without one; None = they take turns.
    selector: QueueSelector | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """What push and pull consumers share."""

    consume_from: ConsumeFrom = ConsumeFrom.FIRST  # only where the group has never committed
    request_timeout_ms: int = _option(3_000, 1, 600_000)  # each call to a broker
    pull_count_max: int = _option(1024, 1, 4096)  # messages asked for in one pull
    pull_bytes_max: int = _option(_MIB, 1024, 4 * _MIB)  # record bytes asked for in one pull
    # Wait after the first pull that found nothing; doubles.
    poll_backoff_ms: int = _option(100, 1, 600_000)
    poll_backoff_max_ms: int = _option(1_000, 1, 600_000)
    # Wait after a refused call; doubles, with full jitter.
    retry_backoff_ms: int = _option(100, 1, 600_000)
    retry_backoff_max_ms: int = _option(3_000, 1, 600_000)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class PushConsumerOptions(ConsumerOptions):
    """Options of :class:`cometmq.client.PushConsumer`."""

    client_id: str = field(default_factory=new_client_id)  # unique within the group
    concurrency: int = _option(20, 1, 10_000)  # listener calls at a time
    # Messages given to the listener at once, at most; one queue's.
    batch_count: int = _option(1, 1, 4096)
    hold_ms: int = _option(15_000, 1, 60_000)  # how long a pullhold holds a pull that found nothing
    commit_interval_ms: int = _option(5_000, 1, 3_600_000)
    # Unfinished messages a queue; then its pulls wait.
    queue_count_max: int = _option(1_000, 1, 1_000_000)
    queue_bytes_max: int = _option(100 * _MIB, 1024, 16 * 1024 * _MIB)  # the same in record bytes
    # Offsets between lowest unfinished and next message.
    queue_span_max: int = _option(2_000, 1, 10_000_000)
    # Wait after LATER or an exception; doubles.
    redeliver_backoff_ms: int = _option(1_000, 1, 3_600_000)
    redeliver_backoff_max_ms: int = _option(30_000, 1, 3_600_000)
    rebalance_delay_ms: int = _option(200, 0, 60_000)  # changes within this time make one rebalance
    # The safety check without any change.
    rebalance_interval_ms: int = _option(20_000, 1, 3_600_000)
    # Revoke and close: wait for running listener calls.
    drain_timeout_ms: int = _option(10_000, 0, 3_600_000)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class PullConsumerOptions(ConsumerOptions):
    """Options of :class:`cometmq.client.PullConsumer`."""


def backoff_policy(options: ProducerOptions | ConsumerOptions) -> BackoffPolicy:
    """How calls that failed are tried again."""
    first_s = options.retry_backoff_ms / 1000
    return BackoffPolicy(first_s, max(first_s, options.retry_backoff_max_ms / 1000))
