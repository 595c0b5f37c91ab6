"""Many relayed records at once: the bytes are those of records that are relayed one by one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import native
from cometmq.format import delayed, properties, queueunit, record, relay_run, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.relay import relay
from cometmq.format.relay_run import RelayRun, delivery_targets
from cometmq.format.timers import TIMER_QUEUE, TIMER_QUEUE_ID, TIMER_TOPIC
from cometmq.model import QueueKey

pytestmark = pytest.mark.usefixtures("implementation")

ACCELERATOR = native.accelerator
V4, V6 = record.host_bytes("10.0.0.1", 1), record.host_bytes("fe80::1", 2)
DUE_MS = 1_700_000_000_123
START, STORED_MS = 1 << 40, 1_800_000_000_000
QUEUES = (("A", 0), ("A", 3), ("%RETRY%g", 0), ("B" * 127, 999_999_999))


def message(
    queue: QueueKey,
    body: bytes = b"",
    tag: str = "",
    *,
    level: int = 0,
    host: bytes = V4,
    store: bytes = V4,
) -> bytes:
    """A stored record in our form that waits for a level, or for a time of its own (0)."""
    pairs = properties.encode({"TAGS": tag, "UNIQ_KEY": "m"} if tag else {"UNIQ_KEY": "m"})
    prefix = timers.with_time(timers.prefix(*queue), DUE_MS)
    waiting_queue = TIMER_QUEUE
    if level:
        prefix = delayed.prefix(level, *queue)
        waiting_queue = (SCHEDULE_TOPIC, delayed.queue_id_of(level))
    return record.encode(
        waiting_queue[0].encode(),
        waiting_queue[1],
        body,
        prefix + pairs,
        flag=len(body),
        sys_flag=1 if len(body) % 2 else 0,
        born_time_ms=1_600_000_000_000,
        born_host=host,
        store_host=store,
        queue_offset=len(body),
        log_offset=4096 + len(body),
        store_time_ms=1_650_000_000_000,
    )


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(QUEUES),
        st.binary(max_size=40),
        st.sampled_from(["", "x", "Schlüssel", "\U0001f600"]),
        st.sampled_from([0, 0, 1, 18]),
        st.sampled_from([V4, V6]),
        st.sampled_from([V4, V6]),
    ),
    min_size=1,
    max_size=12,
)


def laid_out(messages: list[bytes], order: list[int]) -> tuple[bytes, array[int]]:
    """Records end to end, and their places in another order."""
    places = [sum(map(len, messages[:at])) for at in order]
    return b"".join(messages), array("I", places)


@given(MESSAGES, st.randoms(use_true_random=False), st.sampled_from([V4, V6]))
def test_the_bytes_are_those_of_records_that_are_relayed_one_by_one(
    drawn: list[tuple[QueueKey, bytes, str, int, bytes, bytes]], source: object, host: bytes
) -> None:
    messages = [message(*one[:3], level=one[3], host=one[4], store=one[5]) for one in drawn]
    order = list(range(len(messages)))
    source.shuffle(order)  # type: ignore[attr-defined]
    sources, places = laid_out(messages, order)
    texts, chosen = delivery_targets(sources, places)
    queues = tuple(delayed.target_of_text(text) for text in texts)
    assert [queues[index] for index in chosen] == [drawn[at][0] for at in order]
    assert len({*queues}) == len(queues)

    firsts = [7 * index for index in range(len(queues))]
    run = RelayRun(sources, places, chosen, queues)
    records, units = run.encode(firsts, START, STORED_MS, host)

    following = dict(zip(queues, firsts, strict=True))
    expected, expected_units = b"", dict[QueueKey, bytes]()
    for at in order:
        queue = drawn[at][0]
        one = relay(record.decode(messages[at]), *queue, host)
        place = START + len(expected)
        code = one.tags_code(STORED_MS)
        unit = queueunit.pack(place, one.size_bytes, code)
        expected_units[queue] = expected_units.get(queue, b"") + unit
        expected += one.encode(following[queue], place, STORED_MS, host)
        following[queue] += 1
    assert records == expected
    assert units == [expected_units[queue] for queue in queues]


def with_properties(raw: bytes) -> bytes:
    hosts = {"born_time_ms": 1, "born_host": V4, "store_host": V4}
    return record.encode(TIMER_TOPIC.encode(), TIMER_QUEUE_ID, b"", raw, **hosts)  # type: ignore[arg-type]


OURS = timers.with_time(timers.prefix("A", 0), DUE_MS)
LEVEL = delayed.prefix(18, "A", 0)
GOOD = message(("A", 0), b"body")
OF_LEVEL = message(("A", 0), b"body", level=2)
DAMAGED = GOOD.replace(b"body", b"bodx")
NEEDS_A_LOOK = {
    "its body does not fit its CRC": DAMAGED,
    "it has RocketMQ's form": with_properties(b"REAL_TOPIC\x01A\x02REAL_QID\x010\x02"),
    "its time has a letter": with_properties(OURS.replace(b"%d" % DUE_MS, b"17000000x0123")),
    "it names no queue": with_properties(OURS.replace(b"REAL_QID\x010", b"REAL_QID\x01")),
    "its queue has ten digits": with_properties(OURS.replace(b"QID\x010", b"QID\x01" + b"1" * 10)),
    "its queue is none": with_properties(OURS.replace(b"QID\x010", b"QID\x010x")),
    "its topic is empty": with_properties(OURS.replace(b"TOPIC\x01A", b"TOPIC\x01")),
    "it ends in the queue": with_properties(OURS[:-1]),
    "it is a tombstone": with_properties(OURS + b"TIMER_DEL_UNIQKEY\x01m\x02"),
    "its level has three digits": with_properties(LEVEL.replace(b"18", b"118")),
    "its level has a letter": with_properties(LEVEL.replace(b"18", b"1x")),
    "its level is empty": with_properties(LEVEL.replace(b"18", b"")),
    "its level stands alone": with_properties(b"DELAY\x0118\x02"),
    "it ends in the level": with_properties(b"DELAY\x0118"),
    "its level's queue is none": with_properties(LEVEL.replace(b"QID\x010", b"QID\x010x")),
    "its level comes last": with_properties(LEVEL[9:] + LEVEL[:9]),
    "its level names a time, too": with_properties(LEVEL + b"TIMER_DELAY_MS\x011\x02"),
    "its tag is no text": with_properties(OURS + b"TAGS\x01\xff\x02"),
    "its properties are cut": GOOD[:-1],
    "its magic is wrong": GOOD[:4] + b"\0" + GOOD[5:],
}


@pytest.mark.parametrize("reason", NEEDS_A_LOOK)
def test_it_ends_before_a_message_that_needs_a_look(reason: str) -> None:
    bad = NEEDS_A_LOOK[reason]
    sources, places = GOOD + bad, array("I", [0, len(GOOD)])
    assert delivery_targets(sources, places) == (
        [b"REAL_TOPIC\x01A\x02REAL_QID\x010\x02"],
        array("I", [0]),
    )
    assert delivery_targets(bad, array("I", [0])) == ([], array("I"))


def test_there_are_so_many_targets_at_most() -> None:
    messages = [message(("A", number)) for number in range(1026)]
    sources, places = laid_out(messages, list(range(1026)))
    texts, chosen = delivery_targets(sources, places)
    assert len(texts) == len(chosen) == 1024
    assert list(chosen) == list(range(1024))


def plain_targets(sources: bytes) -> tuple[list[bytes], array[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_run, "accelerator", None)
        return delivery_targets(sources, array("I", [0]))


@given(
    st.sampled_from([GOOD, OF_LEVEL]),
    st.integers(0, len(OF_LEVEL) - 1),
    st.integers(0, 7),
    st.integers(0, len(GOOD)),
)
def test_any_bytes_are_safe(good: bytes, at: int, bit: int, length: int) -> None:
    data = bytearray(good)
    data[at] ^= 1 << bit
    for sources in (bytes(data), good[:length], bytes(data[:length])):
        texts, chosen = delivery_targets(sources, array("I", [0]))
        assert (texts, chosen) == plain_targets(sources)
        if chosen:
            found = record.decode(sources)
            relay(found, "A", 0, V4)  # the body fits its CRC
            assert delayed.target_of(found.raw_properties) == delayed.target_of_text(texts[0])


@pytest.mark.skipif(ACCELERATOR is None, reason="the C extension is not built")
def test_the_extension_refuses_what_does_not_belong_together() -> None:
    assert ACCELERATOR is not None
    make, one = ACCELERATOR.relay, array("I", [0])
    queues = ((b"A", 0, 0),)
    assert make(GOOD, one, one, queues, 0, 0, V4)
    wrong: list[tuple[object, ...]] = [
        (GOOD, array("I", [1]), one, queues, 0, 0, V4),
        (GOOD, array("I", [len(GOOD) + 1]), one, queues, 0, 0, V4),
        (GOOD, one, array("I", [1]), queues, 0, 0, V4),
        (GOOD, one, array("I"), queues, 0, 0, V4),
        (GOOD, b"abc", b"abc", queues, 0, 0, V4),
        (GOOD[:-1], one, one, queues, 0, 0, V4),
        (GOOD, one, one, ((b"", 0, 0),), 0, 0, V4),
        (GOOD, one, one, ((b"A" * 256, 0, 0),), 0, 0, V4),
        (GOOD, one, one, ((b"A", -1, 0),), 0, 0, V4),
        (GOOD, one, one, ((b"A", 0, -1),), 0, 0, V4),
        (GOOD, one, one, queues, -1, 0, V4),
        (GOOD, one, one, queues, 0, -1, V4),
        (GOOD, one, one, queues, 0, 0, V4 + b"x"),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="relay: "):
            make(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make(GOOD, one, one, (b"A",), 0, 0, V4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole numbers"):
        ACCELERATOR.delivery_targets(GOOD, b"abc")  # type: ignore[arg-type]
