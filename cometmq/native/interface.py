"""What the C extension offers: the contract between its files and their callers.

Rules for every function over bytes. Bytes in, bytes and numbers out; every length is compared with
the buffer before it is followed, so any input is safe. A function takes what is certainly good, and
*stops* at the first record that is not: it never judges. Its caller then looks at that record in
plain Python, which names the fault, or takes it and calls again. So the fast loop may know less
than the rules (rare forms, text that is not UTF-8), but never more. Work on 32 KiB and more is done
without the GIL.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

Buffer: TypeAlias = bytes | bytearray | memoryview
Groups = list[tuple[str, int, int, bytes]]
"""(topic, queue id, offset of the first message, units): messages that follow each other in a
queue, though not always in the log. Groups are in the order of their first messages."""

RunForm = tuple[str, dict[str, bytes], int, int, bool, bytes, int]
"""What messages that are encoded together share: topic; what stands between body and counter, by
tag, without other properties of the application; bytes of the properties that stand before those;
delay level; wait_store; names that properties may not have, each behind its length in one byte; how
each message names a time of its own, by ``cometmq.format.timers.TimerForm``."""

T = TypeVar("T", bound=tuple[object, ...])


class SharedOffsets(Protocol):
    """How far a log is appended, wanted and flushed, for threads that do not wait for each other.

    ``sync`` runs in one thread; another one may call everything else but ``flush_to`` meanwhile.
    """

    def append_to(self, position: int, time_ms: int, /) -> None:
        """All up to ``position`` has been written; its last record was stored at ``time_ms``."""

    def demand(self, position: int, /) -> None:
        """Somebody waits until the log is on the disk up to ``position``."""

    def flush_to(self, position: int, time_ms: int, /) -> None:
        """The log is on the disk up to ``position``."""

    def flushed(self) -> tuple[int, int]:
        """Up to where it is on the disk, and a time that is not later than the last record's."""

    def sync(self, fd: int, stop: int, write_fd: int, /) -> int:
        """Sync the file behind ``fd`` again and again without the GIL, while somebody waits for
        what is in it: it holds the log from what is flushed up to ``stop``. Then it stays for 20
        milliseconds more, for who comes next.

        Each sync covers what was appended before it began; ``write_fd``, a pipe that does not
        block, gets the nanoseconds that it took (int64, the machine's order). Returns how often it
        was done; OSError at the first that fails.
        """


class SendEach(Protocol):
    """The futures of messages that are sent one by one. As
    :class:`cometmq.client.sending.send_many.SendMany`, but each message has a future; a place
    counts from 0. The futures behave as those of asyncio.

    Errors that nobody has looked at when it and its futures are gone are told to the loop's
    exception handler, once.
    """

    count: int  # of the messages taken so far

    def __init__(self, loop: Any, /) -> None:
        """It has no messages yet."""

    @property
    def decided(self) -> Any:
        """A future of asyncio: None, when no message is taken any more and each is decided."""

    def take(self) -> Any:
        """The next message; its future."""

    def end(self) -> None:
        """There are no more messages."""

    def stored(self, first: int, count: int, run: Any, index: int, /) -> None:
        """Messages that were taken are stored; the first one at ``index`` of the StoredRun."""

    def failed(self, first: int, count: int, error: BaseException, /) -> None:
        """Messages that were taken are not stored, as far as is known."""


class OpenRun(Protocol):
    """Encodes messages into a batch, one by one, at most ``count_max``. Nobody else may write to
    the buffer meanwhile.
    """

    count: int  # of the messages taken so far
    is_marked: int  # 1: one of them has the property TRACE_ON; else 0

    def __init__(
        self,
        buffer: bytearray,
        each: SendEach,
        count_max: int,
        form: RunForm,
        bytes_max: int,
        body_bytes_max: int,
        queue_id: int,
        host_flags: int,
        born_time_ms: int,
        counter: int,
        /,
    ) -> None:
        """The arguments are those of :meth:`Accelerator.encode_run`; messages have no sharding
        key.
        """

    def put(self, message: object, /) -> Any:
        """Appends the record of the message; its future, one of ``each``. None, and nothing done,
        for a message that :meth:`Accelerator.encode_run` stops at, when the batch would have no
        room behind it for another one of its size, and after :meth:`end`.
        """

    def end(self) -> bytes:
        """No more messages are taken. The place of each record, uint32 of this machine."""

    def times(self) -> bytes:
        """The times that the messages name, int64 of this machine; empty when they name none."""


SentForm = tuple[bytes, bytes, int, bytes, bytes, int, bytes, int, bytes]
"""What trace records of messages of one queue have in common: see
:class:`cometmq.client.tracing.pack.SentForm`."""
CallForm = tuple[bytes, bytes, bytes]
"""What trace records of one listener call have in common: see
:class:`cometmq.client.tracing.pack.CallForm`."""


class TracePack(Protocol):
    """Trace records for one message, and its keys: each word once, as long as there is room. What
    there is no room for beside the others is not taken, and the pack is full.

    It takes ``room`` records more, also in later messages; others are ``dropped``, and count there.
    """

    count: int  # of the records in it
    room: int
    dropped: int
    is_full: bool  # the last call stopped because of that

    def __init__(self, body_bytes_max: int, keys_bytes_max: int, room: int, /) -> None:
        """ValueError for more than 16,384 bytes of keys."""

    def put(self, text: bytes, words: bytes, /) -> bool:
        """Takes a record; there are blanks between the words. False: the pack is full."""

    def put_sent(
        self,
        records: bytes,
        starts: array[int],
        first: int,
        at: int,
        count: int,
        next_place: int,
        step: int,
        is_marked: bool,
        form: SentForm,
        /,
    ) -> int:
        """Takes records of messages ``at`` to ``count`` of a segment, whose first one begins at
        ``starts[first]``: those from ``next_place`` on with ``step`` between them, none with 0, and
        those that are marked, which there are only if ``is_marked``. Where it stopped: full, or
        before a message that Python looks at.
        """

    def choose(
        self, messages: Sequence[Any], at: int, period: int, topic: str, found: list[Any], /
    ) -> int:
        """Appends to ``found`` which of the received messages from ``at`` on are traced: one of
        ``period`` by their ids, none with 0, and those that are marked, but none of the topic.
        Where it stopped: before a message that Python looks at.
        """

    def put_calls(self, messages: Sequence[object], at: int, form: CallForm, /) -> int:
        """Takes records of received messages from ``at`` on. Where it stopped, as put_sent."""

    def take(self) -> tuple[bytes, bytes]:
        """The records, and the keys with blanks between them; then it is empty."""


class Accelerator(Protocol):
    """The module ``cometmq.native._accelerator``. Arguments are positional."""

    CRC32: str  # how it computes CRCs: "pclmulqdq" or "tables"
    SharedOffsets: type[SharedOffsets]
    Message: type[object]  # the hot part of ``cometmq.model.Message``
    ReceivedMessage: type[object]  # the hot part of ``cometmq.client.received.ReceivedMessage``
    SendReceipt: type[object]  # the hot part of ``cometmq.client.messages.SendReceipt``
    SendEach: type[SendEach]
    SendFuture: type[object]  # of a message of a SendEach; what asyncio.Future does
    OpenRun: type[OpenRun]
    TracePack: type[TracePack]

    def crc32(self, data: Buffer, /) -> int:
        """``zlib.crc32(data)``."""

    def crc32_portable(self, data: Buffer, /) -> int:
        """The same as on a processor that does not help; for tests."""

    def stamp(
        self,
        records: bytes,
        stamped: bytearray,
        at: int,
        count: int,
        topic: bytes,
        queue_id: int,
        queue_offset: int,
        log_offset: int,
        hosts_and_time: bytes,
        host_flags: int,
        body_bytes_max: int,
        properties_bytes_max: int,
        reserved: bytes,
        reserved_prefix: bytes,
        prefix: bytes,
        due_ms: int,
        timer_base_ms: int,
        timer_last_ms: int,
        /,
    ) -> tuple[int, bytes]:
        """Verifies and stamps up to ``count`` records of one queue: see
        ``cometmq.format.batch._stamp_run``.

        ``queue_offset`` is the first record's, ``log_offset`` that of the whole batch;
        ``hosts_and_time`` stands in the record as it is given. ``reserved`` lists property names,
        each behind its length in one byte. All properties begin with ``prefix``; the units hold
        ``due_ms`` in place of the tag's hash, unless it is 0. With ``timer_base_ms`` from 0 on each
        record names a time in 13 digits of the prefix, to which that is added; the sum, at most
        ``timer_last_ms``, stands in the record and in its unit. Returns where it stopped, and the
        units of the records before.
        """

    def scan(
        self,
        chunk: bytes,
        at: int,
        log_offset: int,
        bytes_left: int,
        apart: bytes,
        delays_ms: array[int],
        /,
    ) -> tuple[int, int, int, int, int, bool, Groups]:
        """Verifies records of the log from ``at`` on: ``cometmq.format.scan.scan_run``.

        ``log_offset`` is the position of ``at``, ``bytes_left`` what records may fill of the file
        from there on. Stops too at a record of a topic that is listed in ``apart`` (each name
        behind its length in one byte), at a tag that is empty or not UTF-8, and at a record of the
        timer or the schedule topic that has another form than ours. ``delays_ms``: how long each
        delay level waits, an ``array("q")`` of at least one.

        Returns where it stopped, number of records, size of the last one, store times of the first
        and the last one, whether one is older than the one before it, and the units.
        """

    def decode(self, buffer: bytes, at: int, stop: int, kind: type[T], /) -> tuple[int, list[T]]:
        """The records from ``at`` on, until one reaches or passes ``stop``: see
        ``cometmq.format.record._decode_run``. Returns where it stopped, and the records.
        """

    def choose(
        self, units: bytes, max_count: int, max_bytes: int, codes: array[int], /
    ) -> tuple[list[tuple[int, int]], int, int] | None:
        """Which of the messages that ``units`` name a pull answers: ``cometmq.messaging.pull``.

        ``codes``: the wanted tags, an ``array("I")``; empty = every message. Returns the spans,
        their number of messages, and the index of the unit to look at next; None when one of the
        first ``max_count`` wanted units names no record.
        """

    def of_queue(
        self, records: bytes, units: bytes, offset: int, topic: bytes, queue_id: int, /
    ) -> int:
        """Whether ``records`` are messages of a queue: ``cometmq.format.belonging.first_strange``.
        ``units`` are the queue's from ``offset`` on. Returns where it stopped. ValueError unless
        the units are whole.
        """

    def at_places(self, records: bytes, topic: bytes, places: array[int], /) -> int:
        """As :meth:`of_queue`, of records in any order. ``places``, an ``array("q")``, has a queue
        id and a queue offset for each. Returns the bytes of as many records; 0 when one is not at
        its place.
        """

    def match(self, records: bytes, at: int, code: bytes, texts: bytes, /) -> tuple[int, bytes]:
        """Which records from ``at`` on match an SQL filter: ``cometmq.filters.sql``.

        ``code`` and ``texts`` are a ``Program``'s; ValueError when its steps lead astray. Returns
        where it stopped, also at a number whose double is not computed exactly here, and a byte
        for each record before, 1 = it matches.
        """

    def encode(
        self,
        buffer: bytearray,
        queue_id: int,
        flag: int,
        host_flags: int,
        born_time_ms: int,
        body: bytes,
        middle: bytes,
        counter: int,
        /,
    ) -> None:
        """Appends to ``buffer`` a record as the SDK sends it:
        ``cometmq.client.sending.encoder.RecordEncoder.append_record``.

        ``middle`` stands between the body and the eight digits of ``counter`` that end the
        properties. ValueError for a number that its field cannot hold.
        """

    def encode_run(
        self,
        buffer: bytearray,
        messages: list[Any],
        at: int,
        count_max: int,
        form: RunForm,
        is_keyed: bool,
        bytes_max: int,
        body_bytes_max: int,
        queue_id: int,
        host_flags: int,
        born_time_ms: int,
        counter: int,
        /,
    ) -> tuple[bytes, bool]:
        """Appends to ``buffer`` the records of messages from ``at`` on:
        ``cometmq.client.sending.encoder.RecordEncoder.extend``.

        Stops before the first one that is not of the form, has a sharding key where others have
        none (``is_keyed`` False) or none where they have one, a queue, a body above
        ``body_bytes_max``, a tag that the form does not have, or a field that has to be looked at;
        and where the buffer would have more than ``bytes_max``. Returns the place of each record,
        uint32 of this machine, and whether one has the property TRACE_ON. ValueError for a number
        that is out of range.
        """

    def index_keys(self, chunk: bytes, at: int, /) -> tuple[int, bytes]:
        """The index keys of the records from ``at`` on, which were verified: UNIQ_KEY, then each
        word of KEYS, nothing for a rolled back transaction.

        Returns where it stopped, and the keys as 20 bytes each, big-endian: hash of ``topic#key``
        (int32, not negative), log offset and store time in ms (int64).
        """

    def index_put(
        self,
        file: Buffer,
        keys: bytes,
        slot_count: int,
        entry_count: int,
        next_entry: int,
        begin_time_ms: int,
        /,
    ) -> int:
        """Puts ``keys``, as :meth:`index_keys` gives them, into the slots and entries of an index
        file: ``cometmq.format.indexfile.insert``, without the header. ``begin_time_ms`` is the
        file's. Returns how many slots it found empty. ValueError unless there is room for all keys.
        """

    def timer_entries(self, units: bytes, first_offset: int, /) -> bytes:
        """The entries of units of the timer queue: ``cometmq.store.timers.entries.of_units``.
        ValueError unless the units are whole.
        """

    def sort_timers(self, entries: Buffer, /) -> bytes:
        """The same entries, sorted: ``cometmq.store.timers.entries.in_order``. ValueError unless
        they are whole.
        """

    def delivery_targets(self, sources: bytes, places: array[int], /) -> tuple[list[bytes], bytes]:
        """For which queues messages are meant that wait for a delay level or a time:
        ``cometmq.format.relay_run.delivery_targets``. ``places``: an ``array("I")``.

        Stops at a record of another form than ours, at a body that does not fit its CRC, and at a
        tag that is empty or not UTF-8. Returns the texts of the targets, and for each record before
        the number of its text (uint32). ValueError unless the numbers are whole.
        """

    def half_targets(
        self, sources: bytes, places: array[int], /
    ) -> tuple[list[bytes], bytes, list[str], bytes]:
        """As :meth:`delivery_targets`, of half messages: ``cometmq.format.relay_run.half_targets``.
        Stops, too, at a record without a unique id in ASCII at the end of its properties. Behind
        the numbers stand these ids and the store times in ms (int64).
        """

    def half_run(self, sources: bytes, first_id: bytes, /) -> tuple[bytes, bytes]:
        """As :meth:`half_targets`, of half messages end to end: ``cometmq.format.relay_run
        .half_run``. Stops, too, at a record with another target than the first, and where the
        unique ids do not count on from ``first_id``. Returns the text of the target, and where each
        record begins (uint32).
        """

    def relay(
        self,
        sources: bytes,
        places: array[int],
        chosen: array[int],
        queues: tuple[tuple[bytes, int, int], ...],
        log_offset: int,
        store_time_ms: int,
        store_host: bytes,
        transaction_flags: int,
        room: int,
        /,
    ) -> tuple[bytearray, list[bytes]]:
        """The records that are made from those at ``places``, ``room`` zeros behind them, and the
        units of each queue:
        ``cometmq.format.relay_run.RelayRun.encode``. ``queues``: topic, queue id and the offset of
        its next message. ``transaction_flags``: for SYSFLAG. ValueError for a place or a number
        that is out of range, and for a record that :meth:`delivery_targets` stops at because of its
        frame or its tag.
        """
