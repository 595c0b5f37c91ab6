from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.cluster.proxies import PORTS, ProxyNetwork, owner

PORT = PORTS[0]
SOON_S, NEVER_S = 5.0, 0.2


@contextmanager
def echo(host: str) -> Iterator[None]:
    """Sends back what comes, one connection at a time."""
    server = socket.create_server((host, PORT))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@pytest.fixture
def network() -> Iterator[ProxyNetwork]:
    """Nodes *a*, which is this process, and *b*, which echoes."""
    with ProxyNetwork() as network:
        network.add("a")
        network.add("b")
        network.runs("a", os.getpid())
        with echo(network.listen_host("b")):
            yield network


@pytest.fixture
def link(network: ProxyNetwork) -> Iterator[socket.socket]:
    with socket.create_connection((network.addresses["b"], PORT), SOON_S) as link:
        said(link, b"hello")
        yield link


def said(link: socket.socket, word: bytes) -> None:
    link.settimeout(SOON_S)
    link.sendall(word)
    assert link.recv(100) == word


def silent(link: socket.socket) -> bool:
    link.settimeout(NEVER_S)
    try:
        link.recv(100)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_a_cut_holds_one_way_back_until_it_ends(
    network: ProxyNetwork, link: socket.socket, source: str, target: str
) -> None:
    with network.cut([source], [target]), network.cut([source], [target]):
        link.sendall(b"late")
        assert silent(link)
    link.settimeout(SOON_S)
    assert link.recv(100) == b"late"


def test_a_cut_is_between_two(network: ProxyNetwork, link: socket.socket) -> None:
    network.add("c")
    with network.parted(["c"], ["a", "b"]):
        said(link, b"still")


def test_where_nobody_listens_the_connection_ends(network: ProxyNetwork) -> None:
    network.add("c")
    with (
        socket.create_connection((network.addresses["c"], PORT), SOON_S) as link,
        suppress(ConnectionResetError),
    ):
        assert link.recv(100) == b""


def test_whose_a_socket_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert owner(port, [1 << 22, os.getpid()]) == os.getpid()
        assert owner(port, [1 << 22]) == 0
