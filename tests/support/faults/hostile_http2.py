"""A client on bare sockets that does what no gRPC library would: it asks, and reads nothing.

Its window for answers is ``window`` bytes: with 0 the server has to keep every answer. Whether it
reads the socket is up to the caller: it does not, so what the server sends stays in the kernel.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
_CONNECTION_WINDOW = 65_535  # of all streams together, at first


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    length = len(payload).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def _text(text: bytes) -> bytes:
    """A string of HPACK, as it is."""
    length = len(text)
    return (bytes([length]) if length < 127 else bytes([127, length - 127])) + text


def _headers(path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _text(k.encode()) + _text(v.encode()) for k, v in fields.items())


class HostileConnection:
    """One connection, which never reads."""

    def __init__(self, address: str, window: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._stream_id = -1
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        hello = _PREFACE + _frame(_SETTINGS, 0, 0, settings)
        if window > _CONNECTION_WINDOW:
            more = struct.pack(">I", window - _CONNECTION_WINDOW)
            hello += _frame(_WINDOW_UPDATE, 0, 0, more)
        self._socket.sendall(hello)

    def ask(self, path: str, message: bytes, times: int, *, half_close: bool = True) -> None:
        """The same call ``times`` times. Not half closed, it is a stream that may go on."""
        body = b"\0" + struct.pack(">I", len(message)) + message
        last = _END_STREAM if half_close else 0
        frames = []
        for _ in range(times):
            self._stream_id += 2
            frames.append(_frame(_HEADERS, _END_HEADERS, self._stream_id, _headers(path)))
            frames.append(_frame(_DATA, last, self._stream_id, body))
        self.send(b"".join(frames))

    def begin(self, path: str, times: int) -> None:
        """Calls whose request does not come."""
        frames = []
        for _ in range(times):
            self._stream_id += 2
            frames.append(_frame(_HEADERS, _END_HEADERS, self._stream_id, _headers(path)))
        self.send(b"".join(frames))

    def send(self, octets: bytes) -> None:
        """As long as the server listens."""
        with suppress(ConnectionError):
            self._socket.sendall(octets)

    def closed(self) -> bool:
        """Whether the server has closed it; what came before is dropped."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(65_536):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self._socket.setblocking(True)
        return True

    def close(self) -> None:
        self._socket.close()


@contextmanager
def hostile_connections(
    address: str, count: int, window: int = 0
) -> Iterator[list[HostileConnection]]:
    """So many of them."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(_closing(HostileConnection(address, window))) for _ in range(count)
        ]


@contextmanager
def _closing(connection: HostileConnection) -> Iterator[HostileConnection]:
    try:
        yield connection
    finally:
        connection.close()


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
