"""What one process writes the other reads, wherever the file happens to end at the moment."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip.spool import READ_BYTES, Arrival, SpoolReader, pack, unpack

ARRIVALS = st.lists(
    st.builds(
        Arrival,
        name=st.text(max_size=5),
        line_number=st.integers(0, 2**32 - 1),
        body=st.binary(max_size=20),
        received_ms=st.integers(0, 2**64 - 1),
        born_ms=st.integers(0, 2**64 - 1),
        stored_ms=st.integers(0, 2**64 - 1),
        broker_group=st.text(max_size=5),
        queue_id=st.integers(0, 2**32 - 1),
        queue_offset=st.integers(0, 2**64 - 1),
    )
)


@given(ARRIVALS, st.data())
def test_whole_frames_come_out_and_the_rest_waits(
    arrivals: list[Arrival], data: st.DataObject
) -> None:
    frames = [pack(arrival) for arrival in arrivals]
    written = b"".join(frames)
    cut = data.draw(st.integers(0, len(written)))
    found, used = unpack(written[:cut])
    assert found == arrivals[: len(found)]
    assert used == sum(map(len, frames[: len(found)])) <= cut
    rest, _ = unpack(written[used:])
    assert found + rest == arrivals


def test_the_reader_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    reader = SpoolReader(path)
    assert list(reader.read()) == []
    first = Arrival("a.py", 1, b"x\n", 5, 3, 4, "g1", 2, 10)
    second = Arrival("b.py", 2, b"", 8, 6, 7, "g2", 0, 11)
    path.write_bytes(pack(first) + pack(second)[:7])
    assert list(reader.read()) == [[first]]
    assert list(reader.read()) == []
    path.write_bytes(pack(first) + pack(second))
    assert list(reader.read()) == [[second]]


def test_a_frame_larger_than_a_piece_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    large = Arrival("a.py", 1, bytes(2 * READ_BYTES), 5, 3, 4, "g1", 2, 10)
    small = Arrival("b.py", 2, b"", 8, 6, 7, "g2", 0, 11)
    path.write_bytes(pack(large) + pack(small))
    assert [one for piece in SpoolReader(path).read() for one in piece] == [large, small]
