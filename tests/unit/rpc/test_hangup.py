"""Connections of this process are found by their peers, and end."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import pytest

from cometmq.rpc.hangup import hang_up


@pytest.mark.parametrize(
    ("family", "host", "name"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D")],
)
def test_only_the_named_ones_end(family: socket.AddressFamily, host: str, name: str) -> None:
    listening = socket.socket(family)
    try:
        listening.bind((host, 0))
    except OSError:
        pytest.skip(f"no {host} here")
    with listening:
        listening.listen()
        address = listening.getsockname()
        with (
            socket.create_connection(address[:2]) as one,
            socket.create_connection(address[:2]) as other,
        ):
            accepted = [listening.accept()[0] for _ in range(2)]
            port = one.getsockname()[1]
            assert hang_up([f"{name}:{port}", "unix:", "ipv4:10.0.0.1:1", "what"]) == 1
            one.settimeout(20)
            with suppress(ConnectionError):
                assert one.recv(1) == b""
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)
            for connection in accepted:
                connection.close()


def test_what_is_no_socket_is_left_as_it_was() -> None:
    """Each look doubled the descriptors of files and pipes, until none was left to accept with."""
    reading, writing = os.pipe()
    try:
        before = len(os.listdir("/dev/fd"))
        for _ in range(3):
            assert hang_up(["ipv4:10.0.0.1:1"]) == 0
        assert len(os.listdir("/dev/fd")) == before
        os.write(writing, b"x")
        assert os.read(reading, 1) == b"x"
    finally:
        os.close(reading)
        os.close(writing)
