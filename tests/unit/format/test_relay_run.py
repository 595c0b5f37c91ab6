"""Many relayed records at once: the bytes are those of records that are relayed one by one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import native
from cometmq.format import delayed, halves, properties, queueunit, record, relay_run, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import HalfForm
from cometmq.format.relay import relay
from cometmq.format.relay_run import RelayRun, delivery_targets, half_run, half_targets
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
    records, units = run.encode(firsts, START, STORED_MS, host, 9)
    assert records[-9:] == bytes(9)
    del records[-9:]

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


# --- half messages --------------------------------------------------------------------------------


def half(
    queue: QueueKey,
    body: bytes = b"",
    tag: str = "",
    *,
    unique_id: str = "0A",
    immunity_s: int = 0,
    host: bytes = V4,
    store: bytes = V4,
) -> bytes:
    """A stored half message in our form."""
    pairs = properties.encode({"TAGS": tag} if tag else {})
    return record.encode(
        halves.HALF_TOPIC.encode(),
        halves.QUEUE_ID,
        body,
        halves.prefix(HalfForm("P", immunity_s), *queue)
        + pairs
        + f"UNIQ_KEY\x01{unique_id}\x02".encode(),
        sys_flag=1 if len(body) % 2 else 0,
        born_time_ms=1_600_000_000_000,
        born_host=host,
        store_host=store,
        queue_offset=len(body),
        log_offset=4096 + len(body),
        store_time_ms=1_650_000_000_000 + len(body),
    )


@given(MESSAGES, st.randoms(use_true_random=False), st.sampled_from([V4, V6]), st.booleans())
def test_the_bytes_of_committed_halves_are_those_of_halves_that_are_committed_one_by_one(
    drawn: list[tuple[QueueKey, bytes, str, int, bytes, bytes]],
    source: object,
    host: bytes,
    has_immunity: bool,
) -> None:
    ids = [f"{number:034X}" for number in range(len(drawn))]
    messages = [
        half(*one[:3], unique_id=unique_id, immunity_s=60 * has_immunity, host=one[4], store=one[5])
        for one, unique_id in zip(drawn, ids, strict=True)
    ]
    order = list(range(len(messages)))
    source.shuffle(order)  # type: ignore[attr-defined]
    sources, places = laid_out(messages, order)
    targets = half_targets(sources, places)
    assert targets.ids == [ids[at] for at in order]
    assert list(targets.store_times_ms) == [1_650_000_000_000 + len(drawn[at][1]) for at in order]
    # Some topics have fewer queues by now: two targets become one.
    goals = [(halves.target_of_text(text)[0], 0) for text in targets.texts]
    assert [halves.target_of_text(targets.texts[index]) for index in targets.chosen] == [
        drawn[at][0] for at in order
    ]
    queues = list(dict.fromkeys(goals))
    chosen = array("I", [queues.index(goals[index]) for index in targets.chosen])
    run = RelayRun(sources, places, chosen, tuple(queues), halves.SYS_FLAG_COMMITTED)
    assert run.sized() == [
        [drawn[at][0][0] for at in order].count(topic) for topic, _ in run.queues
    ]
    firsts = [7 * index for index in range(len(run.queues))]
    records, units = run.encode(firsts, START, STORED_MS, host)
    following = dict(zip(run.queues, firsts, strict=True))
    expected, expected_units = b"", dict[QueueKey, bytes]()
    for at in order:
        queue = drawn[at][0][0], 0
        found = record.decode(messages[at])
        one = relay(found, *queue, host, transaction_flags=halves.SYS_FLAG_COMMITTED)
        place = START + len(expected)
        unit = queueunit.pack(place, one.size_bytes, one.tags_code(STORED_MS))
        expected_units[queue] = expected_units.get(queue, b"") + unit
        expected += one.encode(following[queue], place, STORED_MS, host)
        following[queue] += 1
    assert records == expected
    assert units == [expected_units[queue] for queue in run.queues]


OUR_HALF = halves.prefix(HalfForm("P"), "A", 0)
GOOD_HALF = half(("A", 0), b"body")
ID = b"UNIQ_KEY\x010A\x02"
HALVES_TO_LOOK_AT = {
    "its body does not fit its CRC": GOOD_HALF.replace(b"body", b"bodx"),
    "it has RocketMQ's order": with_properties(
        b"REAL_TOPIC\x01A\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02REAL_QID\x010\x02" + ID
    ),
    "it names no group": with_properties(OUR_HALF.replace(b"PGROUP\x01P\x02", b"") + ID),
    "it names no queue": with_properties(OUR_HALF.replace(b"QID\x010", b"QID\x01") + ID),
    "its topic is empty": with_properties(OUR_HALF.replace(b"TOPIC\x01A", b"TOPIC\x01") + ID),
    "it has no id": with_properties(OUR_HALF),
    "its id is empty": with_properties(OUR_HALF + b"UNIQ_KEY\x01\x02"),
    "its id is no ASCII": with_properties(OUR_HALF + "UNIQ_KEY\x01é\x02".encode()),
    "its id does not come last": with_properties(OUR_HALF + ID + b"a\x01b\x02"),
    "its id has no end": with_properties(OUR_HALF + ID[:-1]),
    "it is another name": with_properties(OUR_HALF + b"X" + ID),
    "its tag is no text": with_properties(OUR_HALF + b"TAGS\x01\xff\x02" + ID),
    "its properties are cut": GOOD_HALF[:-1],
}


@pytest.mark.parametrize("reason", HALVES_TO_LOOK_AT)
def test_it_ends_before_a_half_that_needs_a_look(reason: str) -> None:
    bad = HALVES_TO_LOOK_AT[reason]
    sources, places = GOOD_HALF + bad, array("I", [0, len(GOOD_HALF)])
    texts = [b"REAL_TOPIC\x01A\x02REAL_QID\x010\x02"]
    stored_ms = array("q", [1_650_000_000_004])
    assert half_targets(sources, places) == (texts, array("I", [0]), ["0A"], stored_ms)
    assert half_targets(bad, array("I", [0])) == ([], array("I"), [], array("q"))


# --- halves that were sent together ---------------------------------------------------------------

STREAM = "0A0B0C0D0E0F00112233445566"


def together(count: int, first: int = 0) -> list[bytes]:
    return [half(("A", 3), b"x" * n, unique_id=f"{STREAM}{first + n:08X}") for n in range(count)]


@given(st.integers(0, 9), st.sampled_from([0, 0xFF, 0xFFFF_FFFA]))
def test_halves_that_count_on_have_one_target(count: int, first: int) -> None:
    messages = together(count, first)
    fitting = min(count, 2**32 - first)
    text, places = half_run(b"".join(messages), f"{STREAM}{first:08X}")
    assert list(places) == [sum(map(len, messages[:at])) for at in range(fitting)]
    if places:
        assert halves.target_of_text(text) == ("A", 3)
    else:
        assert text == b""


ENDS_A_RUN = {
    "its id does not count on": half(("A", 3), unique_id=f"{STREAM}00000003"),
    "its id is of another stream": half(("A", 3), unique_id=f"{STREAM[:-1]}700000002"),
    "its id is longer": half(("A", 3), unique_id=f"{STREAM}000000002"),
    "its id has small letters": half(("A", 3), unique_id=f"{STREAM}0000000a"),
    "it has another queue": half(("A", 4), unique_id=f"{STREAM}00000002"),
    "it has another topic": half(("B", 3), unique_id=f"{STREAM}00000002"),
    "its body does not fit its CRC": half(("A", 3), b"body", unique_id=f"{STREAM}00000002").replace(
        b"body", b"bodx"
    ),
    "it is cut": half(("A", 3), unique_id=f"{STREAM}00000002")[:-1],
    "it is no half": message(("A", 3)),
}


@pytest.mark.parametrize("reason", ENDS_A_RUN)
def test_a_run_ends_before_a_half_that_needs_a_look(reason: str) -> None:
    messages = together(2)
    sources = b"".join([*messages, ENDS_A_RUN[reason], *together(1, 3)])
    text, places = half_run(sources, f"{STREAM}00000000")
    assert text == b"REAL_TOPIC\x01A\x02REAL_QID\x013\x02"
    assert list(places) == [0, len(messages[0])]


@pytest.mark.parametrize("first_id", ["", "0A", "0000000a", "\u00e90000000", f"{STREAM}00000001"])
def test_no_run_begins_with_another_id(first_id: str) -> None:
    assert half_run(together(1)[0], first_id) == (b"", array("I"))


@given(st.integers(0, len(GOOD_HALF) - 1), st.integers(0, 7), st.integers(0, len(GOOD_HALF)))
def test_any_bytes_of_a_half_are_safe(at: int, bit: int, length: int) -> None:
    data = bytearray(GOOD_HALF)
    data[at] ^= 1 << bit
    for sources in (bytes(data), GOOD_HALF[:length], bytes(data[:length])):
        targets = half_targets(sources, array("I", [0]))
        if targets.chosen:
            found = record.decode(sources)
            relay(found, "A", 0, V4)  # the body fits its CRC
            its = halves.read(found.raw_properties)
            assert its is not None
            assert (its.topic, its.queue_id) == halves.target_of_text(targets.texts[0])
            assert its.unique_id == targets.ids[0]


@pytest.mark.skipif(ACCELERATOR is None, reason="the C extension is not built")
def test_the_extension_refuses_what_does_not_belong_together() -> None:
    assert ACCELERATOR is not None
    make, one = ACCELERATOR.relay, array("I", [0])
    queues = ((b"A", 0, 0),)
    assert make(GOOD, one, one, queues, 0, 0, V4, 0, 0)
    wrong: list[tuple[object, ...]] = [
        (GOOD, array("I", [1]), one, queues, 0, 0, V4, 0, 0),
        (GOOD, array("I", [len(GOOD) + 1]), one, queues, 0, 0, V4, 0, 0),
        (GOOD, one, array("I", [1]), queues, 0, 0, V4, 0, 0),
        (GOOD, one, array("I"), queues, 0, 0, V4, 0, 0),
        (GOOD, b"abc", b"abc", queues, 0, 0, V4, 0, 0),
        (GOOD[:-1], one, one, queues, 0, 0, V4, 0, 0),
        (GOOD, one, one, ((b"", 0, 0),), 0, 0, V4, 0, 0),
        (GOOD, one, one, ((b"A" * 256, 0, 0),), 0, 0, V4, 0, 0),
        (GOOD, one, one, ((b"A", -1, 0),), 0, 0, V4, 0, 0),
        (GOOD, one, one, ((b"A", 0, -1),), 0, 0, V4, 0, 0),
        (GOOD, one, one, queues, -1, 0, V4, 0, 0),
        (GOOD, one, one, queues, 0, -1, V4, 0, 0),
        (GOOD, one, one, queues, 0, 0, V4 + b"x", 0, 0),
        (GOOD, one, one, queues, 0, 0, V4, 1, 0),
        (GOOD, one, one, queues, 0, 0, V4, -1, 0),
        (GOOD, one, one, queues, 0, 0, V4, 0, -1),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="relay: "):
            make(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make(GOOD, one, one, (b"A",), 0, 0, V4, 0, 0)  # type: ignore[arg-type]
    for targets in (ACCELERATOR.delivery_targets, ACCELERATOR.half_targets):
        with pytest.raises(ValueError, match="whole numbers"):
            targets(GOOD, b"abc")  # type: ignore[arg-type]
