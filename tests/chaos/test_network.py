from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.play import NAMESPACES
from tests.support.cluster.network import Network, why_no_loss, why_not

ROOT = Path(__file__).resolve().parents[2]
PORT = 5000
ECHO = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
while True:
    with server.accept()[0] as connection:
        connection.sendall(connection.recv(100))
"""
ASK = f"""
import socket, sys
good = 0
for _ in range(int(sys.argv[2])):
    try:
        with socket.create_connection((sys.argv[1], {PORT}), float(sys.argv[3])) as link:
            link.sendall(b"hello")
            good += link.recv(100) == b"hello"
    except OSError:
        pass
print(good)
"""


def asked(
    network: Network, source: str, target: str, times: int = 1, patience_s: float = 10
) -> int:
    """How many of so many words came back."""
    address = network.addresses[target]
    command = [sys.executable, "-c", ASK, address, str(times), str(patience_s)]
    done = subprocess.run([*network.at(source), *command], capture_output=True, check=True)
    return int(done.stdout)


def is_silent(network: Network, source: str, target: str) -> bool:
    return asked(network, source, target, patience_s=0.4) == 0


def answering(address: str) -> None:
    end_s = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((address, PORT), 1).close()
            return
        except OSError:
            assert time.monotonic() < end_s, address
            time.sleep(0.01)


def play() -> None:
    """Runs in a network namespace of its own."""
    with Network() as network:
        own = network.add_address("own")
        nodes = {name: network.add(name) for name in ("a", "b")}
        echoes = [subprocess.Popen([*network.at(n), sys.executable, "-c", ECHO]) for n in nodes]
        echoes.append(subprocess.Popen([sys.executable, "-c", ECHO]))
        for address in (own, *nodes.values()):
            answering(address)
        try:
            _cut_and_mend(network)
        finally:
            for process in echoes:
                process.kill()
                process.wait()


def _cut_and_mend(network: Network) -> None:
    assert asked(network, "a", "b") == asked(network, "a", "own") == 1
    with network.cut(["a"], ["b"]), network.cut(["a"], ["b"]):
        assert is_silent(network, "a", "b")
        assert asked(network, "a", "own") == 1
    assert asked(network, "a", "b") == 1
    with network.parted(["a"], ["own"]):
        assert is_silent(network, "a", "own")
        assert asked(network, "b", "own") == asked(network, "a", "b") == 1
    if not why_no_loss():
        with network.losing("a", 99):
            assert is_silent(network, "a", "b")
    assert asked(network, "a", "own", 20) == 20


def test_cuts_are_made_and_mended() -> None:
    if reason := why_not():
        pytest.skip(f"network namespaces: {reason}")
    call = "from tests.chaos.test_network import play; play()"
    done = subprocess.run(
        ["unshare", *NAMESPACES, "--propagation", "private", sys.executable, "-c", call],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
