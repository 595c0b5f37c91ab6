"""Messages → records, as one broker wants them. The hot path of a producer: no object is made that
is not sent.
"""

from __future__ import annotations

from array import array
from zlib import crc32

from cometmq.client.namespaces import Namespace
from cometmq.client.sending.stored_form import StoredForm
from cometmq.clock import Clock
from cometmq.errors import (
    BodyTooLarge,
    CometError,
    PropertiesInvalid,
    PropertiesTooLarge,
    PropertyReserved,
)
from cometmq.format.compression import SYS_FLAG_COMPRESSION
from cometmq.format.ids import UNIQUE_ID_COUNTER_MAX, UniqueIds
from cometmq.format.properties import (
    FIELD_NAMES,
    KEY_SEPARATOR,
    KEYS,
    RESERVED,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    is_reserved,
)
from cometmq.format.properties import encode as encode_properties
from cometmq.format.record import BODY_CRC_MASK, MAGIC_V1, Record, encode, layout_of_hosts
from cometmq.format.timers import DIGITS_AT, TimerForm, with_time
from cometmq.format.trace import TRACE_ON
from cometmq.model import PROPERTIES_BYTES_MAX, Message, QueueRef, check_keys
from cometmq.native import accelerator
from cometmq.native.interface import Accelerator, OpenRun, SendEach
from cometmq.v1 import broker_pb2

TAG_BYTES_MAX = 256
TAG_CACHE_MAX = 1024
RUN_COUNT_MAX = 1024  # messages that are encoded in one go
RUN_BODY_BYTES_MAX = 32 * 1024 - 1  # of a message that is encoded with others in one go

_UNIQUE_ID_DIGITS = 34
_COUNTER_BYTES = 9  # eight digits and the separator behind them
_ID_PROPERTY = f"{UNIQ_KEY}\x01".encode()
_ID_PROPERTY_BYTES = len(_ID_PROPERTY) + _UNIQUE_ID_DIGITS + 1
_OWN_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX - _ID_PROPERTY_BYTES
# Names that no property of an application has, each behind its length in one byte.
_NOT_OWN_NAMES = b"".join(
    bytes((len(name),)) + name.encode() for name in sorted(FIELD_NAMES | RESERVED)
)


def encode_tag(tag: str) -> bytes:
    """The TAGS property; empty for no tag. PropertiesInvalid for one that no filter can name."""
    if not tag:
        return b""
    if (
        not tag.isprintable()
        or "|" in tag
        or tag != tag.strip()
        or len(tag.encode()) > TAG_BYTES_MAX
    ):
        raise PropertiesInvalid(
            f"{tag!r} is no tag: at most {TAG_BYTES_MAX} printable bytes, no '|', no outer blanks."
        ).advising("Choose a short word as the tag; what is longer is a property or a key.")
    return encode_properties({TAGS: tag})


def encode_application_properties(message: Message) -> bytes:
    """All properties that the application set, tag and keys included."""
    tag = encode_tag(message.tag)
    pairs = dict(message.properties)
    for name in pairs:
        if name in FIELD_NAMES or is_reserved(name):
            raise PropertyReserved(f"Property name {name!r} is reserved.")
    if message.keys:
        check_keys(message.keys)
        pairs[KEYS] = KEY_SEPARATOR.join(message.keys)
    if message.sharding_key:
        pairs[SHARDING_KEY] = message.sharding_key
    encoded = encode_properties(pairs) + tag
    if len(encoded) > _OWN_PROPERTIES_BYTES_MAX:
        raise PropertiesTooLarge(
            f"The properties have {len(encoded)} bytes; {_OWN_PROPERTIES_BYTES_MAX} are allowed."
        )
    return encoded


def _is_of_run(message: Message, form: RecordForm, is_keyed: bool) -> bool:
    """Whether it goes where its neighbours go, in the same form."""
    return (
        message.__class__ is Message
        and message.topic.__class__ is str
        and message.topic == form.topic
        and message.body.__class__ is bytes
        and message.tag.__class__ is str
        and message.keys.__class__ is tuple
        and message.properties.__class__ is dict
        and message.flag.__class__ is message.delay_level.__class__ is int
        and message.delay_level == form.delay_level
        and message.deliver_at_ms.__class__ is message.delay_ms.__class__ is int
        and message.sharding_key.__class__ is str
        and bool(message.sharding_key) is is_keyed
        and message.wait_store is form.wait_store
        and message.queue is None
        and bool(message.deliver_at_ms) is (form.timer is TimerForm.AT)
        and bool(message.delay_ms) is (form.timer is TimerForm.AFTER)
    )


class RecordForm:
    """The bytes that all records of one topic share on one sender, or all delayed records of one
    queue and level. A record is head, body, middle and counter; the middle (topic, properties,
    unique id up to its counter) is the same for all messages with the same properties.

    ``prefix`` is what the properties begin with, in the stored form of delayed messages.
    ``digits_at``: where in a middle the digits stand of a message that names its time.
    """

    __slots__ = (
        "_id_start",
        "_topic",
        "delay_level",
        "digits_at",
        "middles",
        "native",
        "prefix",
        "timer",
        "topic",
        "wait_store",
    )

    def __init__(
        self,
        topic: str,
        wire: str,
        stream: str,
        prefix: bytes = b"",
        *,
        delay_level: int = 0,
        timer: TimerForm = TimerForm.NONE,
        wait_store: bool = True,
    ) -> None:
        self.topic = topic  # as messages have it
        self.delay_level = delay_level
        self.timer = timer
        self.wait_store = wait_store
        name = wire.encode()
        self._topic = bytes((len(name),)) + name
        self.digits_at = 1 + len(name) + 2 + DIGITS_AT
        self.prefix = prefix
        self.middles: dict[str, bytes] = {}  # by tag, of messages without keys and properties
        # The same as the extension wants it.
        own = _NOT_OWN_NAMES
        self.native = topic, self.middles, len(prefix), delay_level, wait_store, own, int(timer)
        self.use(stream)

    def use(self, stream: str) -> None:
        """A new incarnation: ids begin differently from here on."""
        self._id_start = _ID_PROPERTY + stream.encode()
        self.middles.clear()

    def middle(self, message: Message) -> bytes:
        """Everything between the body and the counter. Raises what is wrong with the message."""
        message.check()  # again: it may have been changed since it was made
        middle = self._middle_of_tag(message.tag)
        if message.keys or message.properties or message.sharding_key:
            return self._around(encode_application_properties(message))
        return middle

    def _middle_of_tag(self, tag: str) -> bytes:
        """That of messages with this tag and nothing else; the extension makes the others of it."""
        middle = self.middles.get(tag)
        if middle is None:
            middle = self._around(encode_tag(tag))
            if len(self.middles) < TAG_CACHE_MAX and tag.__class__ is str:
                self.middles[tag] = middle
        return middle

    def _around(self, properties: bytes) -> bytes:
        properties = self.prefix + properties
        size = len(properties) + _ID_PROPERTY_BYTES
        if size > PROPERTIES_BYTES_MAX:
            raise PropertiesTooLarge(
                f"The properties have {size} bytes with those of the delay; "
                f"{PROPERTIES_BYTES_MAX} are allowed."
            )
        return b"".join((self._topic, size.to_bytes(2, "big"), properties, self._id_start))


class RecordEncoder:
    """Encodes for one sender: host lengths and limits of the broker, unique ids of one
    incarnation.

    ``counter`` is the next unique id's. A record has ``fixed_bytes`` beside its body and its
    middle.
    """

    __slots__ = (
        "_born_host",
        "_clock",
        "_forms",
        "_forms_with_prefix",
        "_host_flags",
        "_namespace",
        "_pack_head",
        "_store_host",
        "body_bytes_max",
        "counter",
        "fixed_bytes",
        "stream",
    )

    def __init__(
        self,
        opened: broker_pb2.SendStreamOpened,
        clock: Clock,
        namespace: Namespace | None = None,
    ) -> None:
        self._namespace = namespace or Namespace()
        self._clock = clock
        self._forms: dict[str, RecordForm] = {}  # by topic
        # By queue and stored form.
        self._forms_with_prefix: dict[tuple[QueueRef, StoredForm], RecordForm] = {}
        self.stream = UniqueIds(clock).stream
        self.counter = 0
        self._born_host = b""
        self._store_host = b""
        self.body_bytes_max = 0
        self.take(opened)

    def take(self, opened: broker_pb2.SendStreamOpened) -> bool:
        """The form of a new stream. True when records encoded before do not fit it (other host
        lengths).
        """
        before = len(self._born_host), len(self._store_host)
        # The broker overwrites the hosts, only their lengths count: all records carry zeros.
        self._born_host = bytes(len(opened.born_host) + 4)
        self._store_host = bytes(len(opened.store_host) + 4)
        layout = layout_of_hosts(self._born_host, self._store_host)
        self._pack_head = layout.head.pack
        self._host_flags = layout.host_flags
        self.fixed_bytes = layout.head_bytes + _COUNTER_BYTES
        self.body_bytes_max = opened.body_max_bytes
        return before != (len(self._born_host), len(self._store_host))

    def begin_batch(self, count_max: int) -> None:
        """The ids of a batch are of one incarnation: a counter never wraps within it."""
        if self.counter + count_max > UNIQUE_ID_COUNTER_MAX:
            self.stream = UniqueIds(self._clock).stream
            self.counter = 0
            for form in (*self._forms.values(), *self._forms_with_prefix.values()):
                form.use(self.stream)

    def form(self, topic: str) -> RecordForm:
        """The topic's form; stays good for the sender's life."""
        form = self._forms.get(topic)
        if form is None:
            form = self._forms[topic] = RecordForm(topic, self._namespace.wire(topic), self.stream)
        return form

    def form_with_prefix(self, queue: QueueRef, stored: StoredForm) -> RecordForm:
        """As :meth:`form`, of messages for ``queue`` that wait, or whose acknowledgement does
        not.
        """
        key = (queue, stored)
        form = self._forms_with_prefix.get(key)
        if form is None:
            named = self._namespace.wire(queue.topic)
            wire, _ = stored.place(named, queue.queue_id)
            prefix = stored.prefix(named, queue.queue_id)
            form = self._forms_with_prefix[key] = RecordForm(
                queue.topic,
                wire,
                self.stream,
                prefix,
                delay_level=stored.delay_level,
                timer=stored.timer,
                wait_store=stored.wait_store,
            )
        return form

    def append_record(
        self,
        buffer: bytearray,
        queue_id: int,
        body: bytes,
        flag: int,
        sys_flag: int,
        middle: bytes,
        born_time_ms: int,
    ) -> None:
        """Appends the next record to the buffer; spends a unique id. ``body`` is as it is stored,
        ``sys_flag`` says how it is compressed.
        """
        counter = self.counter
        self.counter = counter + 1
        sys_flag |= self._host_flags
        if accelerator is not None:
            accelerator.encode(
                buffer, queue_id, flag, sys_flag, born_time_ms, body, middle, counter
            )
            return
        head = self._pack_head(
            self.fixed_bytes + len(body) + len(middle),
            MAGIC_V1,
            crc32(body) & BODY_CRC_MASK,
            queue_id,
            flag,
            0,  # queue offset
            0,  # log offset
            sys_flag,
            born_time_ms,
            self._born_host,
            0,  # store time
            self._store_host,
            0,  # reconsume times
            0,  # prepared transaction offset
            len(body),
        )
        buffer += b"".join((head, body, middle, b"%08X\x02" % counter))

    def extend(
        self,
        buffer: bytearray,
        messages: list[Message],
        at: int,
        count_max: int,
        form: RecordForm,
        queue_id: int,
        *,
        is_keyed: bool,
        bytes_max: int,
        body_bytes_max: int,
        born_time_ms: int,
    ) -> tuple[array[int], bool]:
        """Appends the records of messages from ``at`` on, at most so many, and as long as the
        buffer has at most ``bytes_max``. Stops before a message that is not of the form, has
        a queue of its own, a sharding key unless ``is_keyed``, a tag that was not met before, or a
        body that is not stored as it is; and before one with a fault. Where each record begins,
        and whether one has the property TRACE_ON.
        """
        body_bytes_max = min(body_bytes_max, RUN_BODY_BYTES_MAX)
        starts = array("I")
        if accelerator is not None:
            places, is_marked = accelerator.encode_run(
                buffer,
                messages,
                at,
                count_max,
                form.native,
                is_keyed,
                bytes_max,
                body_bytes_max,
                queue_id,
                self._host_flags,
                born_time_ms,
                self.counter,
            )
            starts.frombytes(places)
            self.counter += len(starts)
            return starts, is_marked
        for message in messages[at : at + count_max]:
            if not _is_of_run(message, form, is_keyed) or message.tag not in form.middles:
                break
            body = message.body
            if len(body) > body_bytes_max:
                break
            try:
                middle = form.middle(message)
            except CometError:  # the caller puts it alone, which raises it
                break
            if len(buffer) + self.fixed_bytes + len(body) + len(middle) > bytes_max:
                break
            if form.timer:
                time_ms = message.deliver_at_ms or message.delay_ms
                middle = with_time(middle, time_ms, form.digits_at)
            starts.append(len(buffer))
            self.append_record(buffer, queue_id, body, message.flag, 0, middle, born_time_ms)
        taken = messages[at : at + len(starts)]
        return starts, any(TRACE_ON in message.properties for message in taken)

    def open_run(
        self,
        accelerator: Accelerator,
        buffer: bytearray,
        each: SendEach,
        count_max: int,
        form: RecordForm,
        queue_id: int,
        *,
        bytes_max: int,
        body_bytes_max: int,
        born_time_ms: int,
    ) -> OpenRun:
        """As :meth:`extend`, for messages that come one by one. The caller adds what the run has
        taken to ``counter``.
        """
        return accelerator.OpenRun(
            buffer,
            each,
            min(count_max, RUN_COUNT_MAX),
            form.native,
            bytes_max,
            min(body_bytes_max, RUN_BODY_BYTES_MAX),
            queue_id,
            self._host_flags,
            born_time_ms,
            self.counter,
        )

    def again(
        self,
        record: Record,
        queue_id: int,
        *,
        prefix: tuple[bytes, bytes] = (b"", b""),
    ) -> bytes:
        """A record of ours, of this or another sender, for this sender's present stream, with its
        id. ``prefix``: what its properties begin with, and shall begin with.
        """
        properties = record.raw_properties
        assert properties[-_ID_PROPERTY_BYTES:].startswith(_ID_PROPERTY)
        assert properties.startswith(prefix[0])
        properties = prefix[1] + properties[len(prefix[0]) :]
        return encode(
            record.topic.encode(),
            queue_id,
            record.body,
            properties,
            born_time_ms=record.born_time_ms,
            born_host=self._born_host,
            store_host=self._store_host,
            flag=record.flag,
            sys_flag=record.sys_flag & SYS_FLAG_COMPRESSION,
        )

    def refuse(self, message: Message) -> None:
        """Raises what is wrong with body or flag."""
        message.check()
        size, limit = len(message.body), self.body_bytes_max
        if size > limit:
            raise BodyTooLarge(f"The body has {size} bytes; {limit} are allowed.")
