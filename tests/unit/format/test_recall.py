"""Handles of delayed messages: RocketMQ's form, read strictly, signed; and the record that tells of
a recall.
"""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import RecallHandleInvalid
from cometmq.format import delayed, recall, record, timers
from cometmq.format.recall import PURPOSE, Handle, RecallRun, Tombstone
from cometmq.messaging.handle_secrets import HandleSecrets, Secret

SECRETS = HandleSecrets()
SECRETS.add(Secret(0, bytes(range(32))))

numbers = st.integers(0, recall.NUMBER_MAX)
names = st.text("abcXYZ019_%|-", min_size=1, max_size=20)
runs = st.builds(RecallRun, names, names, numbers, numbers, st.integers(1, 1024))


def signed(run: RecallRun, place: int, due_ms: int, unique_id: str) -> Handle:
    return Handle(run, place, due_ms, unique_id, SECRETS.mac(PURPOSE, run.signed()))


@given(runs, st.data(), numbers, st.text("0123456789ABCDEF", max_size=34))
def test_what_is_written_is_read(
    run: RecallRun, choice: st.DataObject, due_ms: int, unique_id: str
) -> None:
    place = choice.draw(st.integers(0, run.message_count - 1))
    handle = signed(run, place, due_ms, unique_id)
    assert recall.decode(handle.encode()) == handle
    assert handle.offset == run.first + place


def test_the_golden_form() -> None:
    handle = signed(RecallRun("g1", "orders", 7, 40, 3), 2, 1_700_000_000_000, "01AB")
    words = base64.urlsafe_b64decode(handle.encode()).decode()
    assert words == ("v1 orders g1 1700000000000 01AB 40:3:2 7 d392a358808f9c7e00447ff5e271cff1")


@given(st.data())
def test_a_flipped_bit_is_noticed(choice: st.DataObject) -> None:
    run = RecallRun("g1", "orders", 7, 40, 3)
    handle = signed(run, 2, 1_700_000_000_000, "01AB")
    text = bytearray(base64.urlsafe_b64decode(handle.encode()))
    text[choice.draw(st.integers(0, len(text) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
    try:
        found = recall.decode(base64.urlsafe_b64encode(bytes(text)).decode())
    except RecallHandleInvalid:
        return
    # What the MAC does not cover is compared with the record.
    unsigned = (found.place, found.due_ms, found.unique_id)
    is_good = SECRETS.verifies(PURPOSE, found.run.signed(), found.mac)
    assert not is_good or unsigned != (2, 1_700_000_000_000, "01AB") or found == handle


@pytest.mark.parametrize(
    "words",
    [
        "",
        "v1 T g 1700000000000 01AB",  # RocketMQ's
        "v2 T g 1 a 0:1:0 7 00",
        "v1 T g 1 a 0:1:1 7 00",
        "v1 T g 1 a 0:1 7 00",
        "v1 T g -1 a 0:1:0 7 00",
        "v1 T g 1 a 0:1:0 x 00",
        "v1 T g 1 a 0:1:0 7 0g",
        "v1 T g 1 a 0:1:0 7 00 more",
        "v1 T g \u0661 a 0:1:0 7 00",  # a digit, but no ASCII
    ],
)
def test_what_is_no_handle(words: str) -> None:
    with pytest.raises(RecallHandleInvalid):
        recall.decode(base64.urlsafe_b64encode(words.encode()).decode())


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: base64.b64encode(b).decode()))
def test_noise_is_no_handle(noise: str) -> None:
    for handle in (noise, noise.encode(), None, 5):
        with pytest.raises(RecallHandleInvalid):
            recall.decode(handle)


@pytest.mark.parametrize("unique_id", ["01AB", ""])
def test_the_tombstone_is_rocketmqs_and_names_its_source(unique_id: str) -> None:
    raw = timers.with_time(timers.prefix("orders", 2), 1_700_000_000_123) + b"TAGS\x01A\x02"
    raw += f"UNIQ_KEY\x01{unique_id}\x02".encode() if unique_id else b""
    host = record.host_bytes("10.0.0.2", 10911)
    sent = record.encode(
        timers.TIMER_TOPIC.encode(),
        0,
        b"secret",
        raw,
        born_time_ms=5,
        born_host=bytes(8),
        store_host=host,
        log_offset=4_096,
    )
    tombstone = Tombstone.of(record.decode(sent), host)
    data = tombstone.encode(9, 8_000, 77, host)
    found = record.decode(data)
    assert len(data) == tombstone.size_bytes
    assert (found.topic, found.queue_id, found.body) == (timers.TIMER_TOPIC, 0, b"0")
    assert found.prepared_offset == 4_096
    assert found.properties["TIMER_OUT_MS"] == "1700000000123"
    assert timers.recalls(found.raw_properties) == (unique_id or "orders+")
    assert timers.due_ms(found.raw_properties) == tombstone.tags_code(0) == 1_700_000_000_123
    assert delayed.target_of(found.raw_properties) == ("orders", 2)
    assert found.unique_id == unique_id
