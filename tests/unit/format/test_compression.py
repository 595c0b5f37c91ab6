from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import BodyCompressionInvalid
from cometmq.format.compression import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION,
    SYS_FLAG_ZLIB,
    Compression,
    compress,
    compress_records,
    decompress,
)

# Flags of each type; RocketMQ before 4.9.3 names none (0), and means zlib.
FLAGS = [SYS_FLAG_COMPRESSED | kind << 8 for kind in range(4)]


@given(st.binary(max_size=200) | st.binary(max_size=8).map(lambda some: some * 500))
def test_what_is_compressed_comes_back(body: bytes) -> None:
    for how in Compression:
        stored, sys_flag = compress(body, how)
        assert sys_flag in (0, SYS_FLAG_COMPRESSED | how.value << 8)
        assert (len(stored) < len(body)) == bool(sys_flag), "only what gets smaller is changed"
        assert decompress(stored, sys_flag | 1 << 4) == body


def test_records_that_are_like_each_other_get_short() -> None:
    text = b"".join(b"Pub\x01%013d\x01T\x02" % number for number in range(1_000))
    stored = compress_records(text)
    assert decompress(stored, SYS_FLAG_ZLIB) == text
    assert len(stored) < len(text) // 5


def test_a_producer_of_before_names_no_type() -> None:
    assert decompress(zlib.compress(b"old"), SYS_FLAG_COMPRESSED) == b"old"


@given(st.binary(max_size=100), st.sampled_from(FLAGS), st.data())
def test_damage_is_an_error_of_the_catalogue(
    some: bytes, sys_flag: int, data: st.DataObject
) -> None:
    stored, _ = compress(some * 50 + bytes(200), Compression((sys_flag >> 8 & 7) or 3))
    cut = stored[: data.draw(st.integers(0, len(stored) - 1))]
    for hostile in (some, cut):
        with contextlib.suppress(BodyCompressionInvalid):
            decompress(hostile, sys_flag)
    with pytest.raises(BodyCompressionInvalid):
        decompress(stored, SYS_FLAG_COMPRESSION)  # type 7


@pytest.mark.parametrize("how", Compression)
def test_a_body_that_inflates_is_refused_within_bounds(how: Compression) -> None:
    stored, sys_flag = compress(bytes(32 * 1024 * 1024), how)
    tracemalloc.start()
    try:
        with pytest.raises(BodyCompressionInvalid, match="more than 1000 bytes"):
            decompress(stored, sys_flag, 1_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 1024 * 1024


@pytest.mark.parametrize("how", Compression)
def test_a_body_that_is_cut_is_not_taken_for_a_whole_one(how: Compression) -> None:
    stored, sys_flag = compress(b"a long body " * 100_000, how)
    with pytest.raises(BodyCompressionInvalid):
        decompress(stored[: len(stored) // 2], sys_flag)


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    """A Zstandard frame of a few bytes may ask its reader for as much memory as it likes."""
    params = zstandard.ZstdCompressionParameters(window_log=27)
    writer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    stored = writer.compress(bytes(1_000)) + writer.flush()
    with pytest.raises(BodyCompressionInvalid):
        decompress(stored, SYS_FLAG_COMPRESSED | Compression.ZSTANDARD.value << 8)
