"""All options of the clients: typed, defaulted, checked when the object is made. Units stand in the
names.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from cometmq.client.group.rebalance import Allocation, Strategy, is_strategy
from cometmq.client.hooks import ConsumeHook, FilterHook, SendHook, are_hooks
from cometmq.client.messages import ConsumeFrom, ConsumeMode, MessageModel, OrderBy
from cometmq.errors import ConfigInvalid
from cometmq.format.compression import Compression
from cometmq.format.trace import TRACE_TOPIC
from cometmq.model import BATCHES_KNOWN_MAX, SENDER_KNOWN_MS, TOPIC_NAME, Message, QueueRef
from cometmq.names import is_client_id, is_namespace
from cometmq.rpc.retry import BackoffPolicy

Options = TypeVar("Options")
QueueSelector = Callable[[Message, Sequence[QueueRef]], QueueRef]

_MIB = 1024 * 1024
CONCURRENCY_MAX = 10_000


def _about(help: str, rocketmq: str = "", limits: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"help": help, "rocketmq": rocketmq, "limits": limits}


def _option(default: int, low: int, high: int, help: str, rocketmq: str = "") -> Any:
    return field(default=default, metadata=_about(help, rocketmq, (low, high)))


def _check(options: Any) -> None:
    """Raises ConfigInvalid for the first option that is not of its kind or outside its range."""
    for option in fields(options):
        value = getattr(options, option.name)
        if limits := option.metadata["limits"]:
            low, high = limits
            if type(value) is not int or not low <= value <= high:
                raise ConfigInvalid(
                    f"{option.name} must be a whole number from {low} to {high}, not {value!r}."
                )
            continue
        is_good, wanted = _KINDS[option.name]
        if not is_good(value):
            raise ConfigInvalid(f"{option.name} must be {wanted}, not {value!r}.")


def _is_compression(value: object) -> bool:
    packages = {Compression.LZ4: "lz4", Compression.ZSTANDARD: "zstandard"}
    if not isinstance(value, Compression):
        return False
    return value not in packages or find_spec(packages[value]) is not None


# Options that are no numbers, and what they may be. consume_from="FIRST" would read as LAST.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "batch_checksum": (lambda value: isinstance(value, bool), "True or False"),
    "latency_fault_enable": (lambda value: isinstance(value, bool), "True or False"),
    "message_model": (
        lambda value: isinstance(value, MessageModel),
        "a member of MessageModel, as MessageModel.CLUSTERING",
    ),
    "consume_mode": (
        lambda value: isinstance(value, ConsumeMode),
        "a member of ConsumeMode, as ConsumeMode.POP",
    ),
    "offset_file": (lambda value: isinstance(value, str), "a path, as a str"),
    "broadcast_offsets_at_broker": (lambda value: isinstance(value, bool), "True or False"),
    "remote_questions_enable": (lambda value: isinstance(value, bool), "True or False"),
    "remote_verify_enable": (lambda value: isinstance(value, bool), "True or False"),
    "trace_enable": (lambda value: isinstance(value, bool), "True or False"),
    "trace_topic": (
        lambda value: isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None,
        "the name of a topic",
    ),
    "orderly": (lambda value: isinstance(value, bool), "True or False"),
    "order_by": (
        lambda value: value in tuple(OrderBy),
        'OrderBy.QUEUE ("queue") or OrderBy.MESSAGE_GROUP ("message_group")',
    ),
    "retry_in_place": (lambda value: isinstance(value, bool), "True or False"),
    "compression": (
        _is_compression,
        "a member of Compression, and its package installed: pip install 'cometmq[compression]'",
    ),
    "namespace": (
        lambda value: isinstance(value, str) and (value == "" or is_namespace(value)),
        "at most 64 letters, digits, '_' and '-', with a letter or digit, and not like the "
        "system's names",
    ),
    "hooks": (
        lambda value: are_hooks(value, "before_send", "after_send"),
        "a tuple of objects with before_send and after_send",
    ),
    "consume_hooks": (
        lambda value: are_hooks(value, "before_consume", "after_consume"),
        "a tuple of objects with before_consume and after_consume",
    ),
    "filter_hooks": (
        lambda value: are_hooks(value, "wants"),
        "a tuple of objects with a method wants",
    ),
    "selector": (lambda value: value is None or callable(value), "a function or None"),
    "consume_from": (
        lambda value: isinstance(value, ConsumeFrom),
        "a member of ConsumeFrom, as ConsumeFrom.LAST",
    ),
    "allocation": (
        is_strategy,
        "a member of Allocation, as Allocation.AVERAGE, or a ByConfig, a ByMachineRoom or the like",
    ),
    "client_id": (
        lambda value: isinstance(value, str) and is_client_id(value),
        "a text of 1 to 255 printable characters",
    ),
}


def options_of(kind: type[Options], options: object) -> Options:
    """The options of a client, the defaults for None; ConfigInvalid: they are of another one. A
    random client id that was drawn before the process was forked is drawn again: two processes
    with one id would be one member of their group.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise ConfigInvalid(
            f"The options must be a {kind.__name__}, not a {type(options).__name__}."
        )
    inherited: Any = options
    drawn = _DRAWN.fullmatch(inherited.client_id)
    if drawn is not None and int(drawn["pid"]) != os.getpid():
        return cast(Options, replace(inherited, client_id=new_client_id()))
    return options


def check_session(options: GroupOptions) -> None:
    """ConfigInvalid for a session of a random name: it does not come back."""
    if options.session_ms:
        check_named(options, "session_ms")


def check_named(options: GroupOptions, option: str) -> None:
    """ConfigInvalid for a random name, which this option makes no sense with."""
    if options.client_id.startswith(_process_name()):
        raise ConfigInvalid(f"{option}: a client_id that is the same after a restart is needed.")


_DRAWN = re.compile(r".*@(?P<pid>[0-9]+)@[0-9a-f]{6}")


def _process_name() -> str:
    return f"{socket.gethostname()[:200]}@{os.getpid()}@"


def new_client_id() -> str:
    """``host@pid@six random digits``: unique within a group, and shows where the client
    runs.
    """
    return f"{_process_name()}{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of all clients: what they tell of themselves and of messages."""

    remote_questions_enable: bool = field(
        default=True,
        metadata=_about(
            "Answers what operators ask: what the client does, its options, where listener calls "
            "are.",
        ),
    )
    loop_stall_ms: int = _option(
        5_000,
        0,
        600_000,
        "An event loop that has not turned for so long is logged with the stack of its thread; 0 = "
        "it is not watched.",
    )
    trace_enable: bool = field(
        default=False,
        metadata=_about("Writes trace records of messages.", "enableMsgTrace, enableTrace"),
    )
    trace_sampling: int = _option(
        1,
        0,
        1_000_000_000,
        "With trace_enable: traces one message of so many, by its id; 0 = only those with the "
        "property TRACE_ON = true.",
    )
    trace_topic: str = field(
        default=TRACE_TOPIC,
        metadata=_about("With trace_enable: the topic of the records.", "customizedTraceTopic"),
    )
    trace_buffer_max: int = _option(
        100_000,
        1,
        1_000_000,
        "With trace_enable: records that wait to be sent; more are dropped, counted and logged.",
    )


@dataclass(frozen=True, slots=True)
class ProducerOptions(TraceOptions):
    """Options of :class:`cometmq.client.Producer`."""

    client_id: str = field(
        default_factory=new_client_id,
        metadata=_about("Whose send quotas count; default host@pid@random.", "clientId"),
    )
    delivery_timeout_ms: int = _option(
        30_000,
        1,
        SENDER_KNOWN_MS,
        "Time from send() to SEND_TIMEOUT, all retries included. A broker knows a sender for "
        "15 minutes.",
        "sendMsgTimeout, retryTimesWhenSendFailed",
    )
    route_timeout_ms: int = _option(
        3_000, 1, 86_400_000, "How long send() waits for the first route of a topic."
    )
    request_timeout_ms: int = _option(
        3_000, 1, 600_000, "Opening a stream to a broker; at most a third of delivery_timeout_ms."
    )
    answer_timeout_ms: int = _option(
        10_000,
        1,
        86_400_000,
        "How long a batch may be unanswered; then a new stream sends it again. At most a third of "
        "delivery_timeout_ms.",
    )
    batch_bytes_max: int = _option(
        256 * 1024,
        1024,
        4 * _MIB,
        "Size at which a batch is closed; one larger message travels alone.",
    )
    batch_count_max: int = _option(1024, 1, 1024, "Messages at which a batch is closed.")
    in_flight_max: int = _option(
        8,
        1,
        BATCHES_KNOWN_MAX,
        "Unanswered batches of a broker group. A broker knows the last 64 of a sender.",
    )
    buffer_bytes_max: int = _option(
        8 * _MIB,
        1024,
        64 * 1024 * _MIB,
        "Bytes encoded and undecided, of all broker groups; above it send() waits.",
        "backPressureForAsyncSendSize",
    )
    buffer_count_max: int = _option(
        65_536,
        1,
        100_000_000,
        "The same in messages, which count when their batch is closed.",
        "backPressureForAsyncSendNum",
    )
    retry_backoff_ms: int = _option(
        100, 1, 600_000, "First wait before a retry; doubles, with full jitter."
    )
    retry_backoff_max_ms: int = _option(3_000, 1, 600_000, "Longest wait before a retry.")
    batch_checksum: bool = field(
        default=True, metadata=_about("Adds a CRC-32 over each batch to the one over each body.")
    )
    compress_above_bytes: int = _option(
        4096,
        0,
        64 * _MIB,
        "Larger bodies are compressed, unless that makes them larger.",
        "compressMsgBodyOverHowmuch",
    )
    compression: Compression = field(
        default=Compression.ZLIB,
        metadata=_about(
            "How: ZLIB (level 5), or LZ4 and ZSTANDARD with the packages of cometmq[compression].",
            "compressType",
        ),
    )
    latency_fault_enable: bool = field(
        default=False,
        metadata=_about(
            "Avoids a broker group that took 0.55 s or longer to answer, for 30 s to 10 min.",
            "sendLatencyFaultEnable",
        ),
    )
    selector: QueueSelector | None = field(
        default=None,
        metadata=_about(
            "Chooses the queue of messages without one. None: the producer takes turns.",
            "MessageQueueSelector",
        ),
    )
    namespace: str = field(
        default="",
        metadata=_about(
            "Of the topics and groups: on the wire they are namespace%name. Empty = none.",
            "namespace",
        ),
    )
    hooks: tuple[SendHook, ...] = field(
        default=(),
        metadata=_about("Are called around the send of each message.", "SendMessageHook"),
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class ConsumerOptions(TraceOptions):
    """Options that push and pull consumers share."""

    consume_from: ConsumeFrom = field(
        default=ConsumeFrom.FIRST,
        metadata=_about(
            "Where a group begins in a queue in which it has never committed.", "consumeFromWhere"
        ),
    )
    consume_from_time_ms: int = _option(
        0,
        0,
        2**63 - 1,
        "With TIMESTAMP: the store time of the first message wanted, in ms since 1970 UTC.",
        "consumeTimestamp",
    )
    request_timeout_ms: int = _option(
        3_000, 1, 600_000, "Each call to a broker, the first route included."
    )
    pull_count_max: int = _option(4096, 1, 4096, "Messages asked for in one pull.", "pullBatchSize")
    pull_bytes_max: int = _option(
        2 * _MIB,
        1024,
        4 * _MIB,
        "Record bytes asked for in one pull; the first message comes whatever its size.",
    )
    namespace: str = field(
        default="",
        metadata=_about(
            "Of the topics and groups: on the wire they are namespace%name. Empty = none.",
            "namespace",
        ),
    )
    filter_hooks: tuple[FilterHook, ...] = field(
        default=(),
        metadata=_about(
            "Say of each message whether the consumer wants it; others are passed by.",
            "FilterMessageHook",
        ),
    )
    poll_backoff_ms: int = _option(
        100, 1, 600_000, "Wait after the first empty pull where no pull-hold answers; doubles."
    )
    poll_backoff_max_ms: int = _option(1_000, 1, 600_000, "Longest wait after an empty pull.")
    retry_backoff_ms: int = _option(
        100, 1, 600_000, "First wait after a refused call; doubles, with full jitter."
    )
    retry_backoff_max_ms: int = _option(3_000, 1, 600_000, "Longest wait after a refused call.")

    def __post_init__(self) -> None:
        _check(self)


INVISIBLE_MS_MIN, INVISIBLE_MS_MAX = 10_000, 12 * 3_600_000


@dataclass(frozen=True, slots=True)
class SimpleConsumerOptions(ConsumerOptions):
    """Options of :class:`cometmq.client.SimpleConsumer`."""

    client_id: str = field(
        default_factory=new_client_id,
        metadata=_about(
            "Unique within the group; whose read quota counts; default host@pid@random.", "clientId"
        ),
    )
    invisible_ms: int = _option(
        30_000,
        INVISIBLE_MS_MIN,
        INVISIBLE_MS_MAX,
        "How long nobody else gets a received message, where receive() does not say.",
        "invisibleDuration",
    )
    hold_ms: int = _option(
        15_000,
        1,
        60_000,
        "How long receive() waits for messages, where it does not say; the longest time that a "
        "pull-hold keeps it.",
        "awaitDuration",
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class GroupOptions(ConsumerOptions):
    """Options of consumers that are members of their group."""

    client_id: str = field(
        default_factory=new_client_id,
        metadata=_about("Unique within the group; default host@pid@random.", "clientId"),
    )
    allocation: Strategy = field(
        default=Allocation.AVERAGE,
        metadata=_about(
            "How members divide the queues; all use AVERAGE where they differ.",
            "allocateMessageQueueStrategy",
        ),
    )
    hold_ms: int = _option(
        15_000,
        1,
        60_000,
        "Longest time that a pull-hold keeps a pull; it answers after 50 to 100 % of it.",
        "brokerSuspendMaxTimeMillis",
    )
    pull_bytes_in_flight_max: int = _option(
        8 * _MIB,
        1024,
        1024 * _MIB,
        "Record bytes asked of one broker group that have not come yet; more pulls wait.",
    )
    memory_bytes_max: int = _option(
        256 * _MIB,
        1024,
        1024 * 1024 * _MIB,
        "Record bytes of all queues that wait, are in work or were asked for; above it nothing is "
        "pulled. A queue holds no more than what is free.",
        "pullThresholdSizeForTopic",
    )
    session_ms: int = _option(
        0,
        0,
        1_800_000,
        "With a client_id of its own: how long nobody else gets its queues after it has gone.",
    )
    rebalance_delay_ms: int = _option(
        200, 0, 60_000, "Changes of the group within this time cause one rebalance."
    )
    rebalance_interval_ms: int = _option(
        20_000,
        1,
        3_600_000,
        "Time between rebalances without any change.",
        "rocketmq.client.rebalance.waitInterval",
    )
    handover_timeout_ms: int = _option(
        10_000,
        0,
        3_600_000,
        "How long a queue waits for the member that had it to finish and commit.",
    )
    drain_timeout_ms: int = _option(
        10_000,
        0,
        3_600_000,
        "How long what is in work may take when a queue is revoked or the consumer closes.",
        "awaitTerminationMillisWhenShutdown",
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class PushConsumerOptions(GroupOptions):
    """Options of :class:`cometmq.client.PushConsumer`."""

    remote_verify_enable: bool = field(
        default=True,
        metadata=_about(
            "With remote_questions_enable: lets operators have the listener consume a stored "
            "message (cometmq message verify).",
        ),
    )
    concurrency: int = _option(
        20, 1, CONCURRENCY_MAX, "Listener calls at a time.", "consumeThreadMin, consumeThreadMax"
    )
    consume_hooks: tuple[ConsumeHook, ...] = field(
        default=(),
        metadata=_about("Are called around each listener call.", "ConsumeMessageHook"),
    )
    batch_count: int = _option(
        1,
        1,
        4096,
        "Messages of one queue in a listener call, at most.",
        "consumeMessageBatchMaxSize",
    )
    message_model: MessageModel = field(
        default=MessageModel.CLUSTERING,
        metadata=_about(
            "CLUSTERING: each message goes to one member of the group; BROADCASTING: to all.",
            "messageModel",
        ),
    )
    consume_mode: ConsumeMode = field(
        default=ConsumeMode.PULL,
        metadata=_about(
            "The group's mode. POP: receives from all queues, acknowledges each message, asks for "
            "more time while listener calls run.",
            "setConsumeMode",
        ),
    )
    pop_count_max: int = _option(
        32, 1, 1_024, "With POP: messages asked for in one call.", "popBatchNums"
    )
    pop_invisible_ms: int = _option(
        60_000,
        INVISIBLE_MS_MIN,
        INVISIBLE_MS_MAX,
        "With POP: how long messages are kept from others after this process has died; renewed at "
        "half of it.",
        "popInvisibleTime",
    )
    offset_file: str = field(
        default="",
        metadata=_about(
            "With BROADCASTING: where this consumer keeps how far it is; empty = in memory only.",
            "rocketmq.client.localOffsetStoreDir",
        ),
    )
    broadcast_offsets_at_broker: bool = field(
        default=False,
        metadata=_about(
            "With BROADCASTING: the brokers keep how far this client_id is, instead of a file.",
            "enableBroadcastOffsetStore",
        ),
    )
    commit_interval_ms: int = _option(
        5_000,
        1,
        3_600_000,
        "Time between commits.",
        "autoCommitIntervalMillis, persistConsumerOffsetInterval",
    )
    pull_interval_ms: int = _option(
        0, 0, 65_535, "Wait between two pulls of a queue that has messages.", "pullInterval"
    )
    queue_count_max: int = _option(
        1_000,
        1,
        1_000_000,
        "Unfinished messages of a queue; above it the queue is not pulled.",
        "pullThresholdForQueue",
    )
    queue_bytes_max: int = _option(
        100 * _MIB,
        1024,
        16 * 1024 * _MIB,
        "Record bytes of the unfinished messages of a queue; above it the queue is not pulled.",
        "pullThresholdSizeForQueue",
    )
    queue_span_max: int = _option(
        2_000,
        1,
        10_000_000,
        "Offsets from the lowest unfinished message to the next pull.",
        "consumeConcurrentlyMaxSpan",
    )
    consume_timeout_ms: int = _option(
        900_000,
        1,
        86_400_000,
        "A listener call that takes longer: its messages are sent back, its result is forgotten.",
        "consumeTimeout",
    )
    retry_times_max: int = _option(
        -1,
        -1,
        1_000_000,
        "How often a failed message comes again, then it is a dead letter; -1 = the group's, 16; "
        "with orderly without end.",
        "maxReconsumeTimes",
    )
    orderly: bool = field(
        default=False,
        metadata=_about(
            "One listener call at a time for a queue, in its order, and one member that has its "
            "lock; what failed is delivered again before what follows it.",
            "MessageListenerOrderly",
        ),
    )
    order_by: OrderBy = field(
        default=OrderBy.QUEUE,
        metadata=_about(
            "With orderly: MESSAGE_GROUP keeps only messages of the same sharding_key in order; "
            "others of the queue are consumed meanwhile.",
            "enableFifoConsumeAccelerator",
        ),
    )
    suspend_queue_ms: int = _option(
        1_000,
        10,
        3_600_000,
        "With orderly: how long a queue, or a message group, waits after a call that failed.",
        "suspendCurrentQueueTimeMillis",
    )
    retry_in_place: bool = field(
        default=False,
        metadata=_about(
            "What failed is delivered again here, in its place, without end, and not sent back."
        ),
    )
    redeliver_backoff_ms: int = _option(
        5_000,
        1,
        3_600_000,
        "Wait before a message is delivered again here, which no broker takes back; doubles.",
    )
    redeliver_backoff_max_ms: int = _option(
        30_000, 1, 3_600_000, "Longest wait before it is delivered again here."
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class PullConsumerOptions(GroupOptions):
    """Options of :class:`cometmq.client.PullConsumer`."""

    commit_interval_ms: int = _option(
        0,
        0,
        3_600_000,
        "Time between commits of what earlier polls handed out; 0 = only commit() commits.",
        "autoCommit, autoCommitIntervalMillis",
    )


def backoff_policy(options: ProducerOptions | ConsumerOptions) -> BackoffPolicy:
    """How calls that failed are tried again."""
    first_s = options.retry_backoff_ms / 1000
    return BackoffPolicy(first_s, max(first_s, options.retry_backoff_max_ms / 1000))
