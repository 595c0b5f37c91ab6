"""Compressed bodies, in RocketMQ's forms: bit 0 of SYSFLAG says that a body is compressed, bits 8
to 10 say how.

LZ4 and Zstandard need the packages of the extra ``compression``; they are looked for when the first
such body is met.
"""

from __future__ import annotations

import io
import zlib
from enum import Enum
from typing import Final

from isal import isal_zlib

from cometmq.errors import BodyCompressionInvalid

SYS_FLAG_COMPRESSED: Final = 1
SYS_FLAG_COMPRESSION_SHIFT: Final = 8
SYS_FLAG_COMPRESSION: Final = SYS_FLAG_COMPRESSED | 7 << SYS_FLAG_COMPRESSION_SHIFT
# Of a body that was compressed: what a hostile producer can make a consumer hold.
PLAIN_BODY_BYTES_MAX: Final = 64 * 1024 * 1024

_ZLIB_LEVEL = 5  # RocketMQ's compressLevel


class Compression(Enum):
    """How a producer compresses bodies. The value is RocketMQ's type, in bits 8 to 10."""

    ZLIB = 3
    LZ4 = 1
    ZSTANDARD = 2


def compress(body: bytes, how: Compression) -> tuple[bytes, int]:
    """The body as it is stored, and its bits of SYSFLAG. A body that would not get smaller stays
    as it is. ModuleNotFoundError without the package.
    """
    if how is Compression.ZLIB:
        stored = zlib.compress(body, _ZLIB_LEVEL)
    elif how is Compression.LZ4:
        import lz4.frame

        stored = lz4.frame.compress(body)
    else:
        import zstandard

        stored = zstandard.compress(body)
    if len(stored) >= len(body):
        return body, 0
    return stored, SYS_FLAG_COMPRESSED | how.value << SYS_FLAG_COMPRESSION_SHIFT


SYS_FLAG_ZLIB: Final = SYS_FLAG_COMPRESSED | Compression.ZLIB.value << SYS_FLAG_COMPRESSION_SHIFT


class ZlibBody(bytes):
    """A body that is compressed already: a stream of zlib."""

    __slots__ = ()


def compress_records(text: bytes) -> ZlibBody:
    """Compresses a text of many records that are like each other, quickly."""
    return ZlibBody(isal_zlib.compress(text, 1))


def decompress(stored: bytes, sys_flag: int, size_max: int = PLAIN_BODY_BYTES_MAX) -> bytes:
    """The body as the producer gave it. BodyCompressionInvalid: it cannot be had, or has more than
    ``size_max`` bytes.
    """
    if not sys_flag & SYS_FLAG_COMPRESSED:
        return stored
    kind = sys_flag >> SYS_FLAG_COMPRESSION_SHIFT & 7
    try:
        read = {0: _zlib, 1: _lz4, 2: _zstandard, 3: _zlib}[kind]
        plain = read(stored, size_max + 1)
    except ModuleNotFoundError as error:
        raise BodyCompressionInvalid(f"the package {error.name} is not installed") from None
    except Exception as error:  # each library has its own
        raise BodyCompressionInvalid(f"a body of compression type {kind}: {error!r:.200}") from None
    if len(plain) > size_max:
        raise BodyCompressionInvalid(f"the body has more than {size_max} bytes")
    return plain


def _zlib(stored: bytes, size_max: int) -> bytes:
    stream = zlib.decompressobj()
    plain = stream.decompress(stored, size_max)
    if not stream.eof and len(plain) < size_max:
        raise EOFError("the body is cut off")
    return plain


def _lz4(stored: bytes, size_max: int) -> bytes:
    import lz4.frame

    stream = lz4.frame.LZ4FrameDecompressor()
    plain: bytes = stream.decompress(stored, max_length=size_max)
    if not stream.eof and len(plain) < size_max:
        raise EOFError("the body is cut off")
    return plain


def _zstandard(stored: bytes, size_max: int) -> bytes:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=PLAIN_BODY_BYTES_MAX)
    reader = decompressor.stream_reader(io.BytesIO(stored))
    plain = reader.read(size_max)
    whole = zstandard.get_frame_parameters(stored).content_size
    if whole != zstandard.CONTENTSIZE_UNKNOWN and len(plain) < min(whole, size_max):
        raise EOFError("the body is cut off")
    return plain
