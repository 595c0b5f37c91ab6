"""Addresses: lists, parts, resolution."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cometmq.errors import ConfigInvalid
from cometmq.rpc import addresses
from cometmq.rpc.addresses import follow_addresses, parse_addresses, resolve, split_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", ("a:1",)),
        (" a:1 ; b:2;", ("a:1", "b:2")),
        ("a:1;a:1", ("a:1",)),
        (["a:1", "[::1]:2"], ("a:1", "[::1]:2")),
    ],
)
def test_lists_of_addresses(text: str | list[str], expected: tuple[str, ...]) -> None:
    assert parse_addresses(text) == expected


@pytest.mark.parametrize(
    "text", ["", ";", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "::1:80", "a:1;b", "a:²"]
)
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        parse_addresses(text)


def test_too_many_addresses_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="1 to 64"):
        parse_addresses([f"host{number}:1" for number in range(addresses.ADDRESSES_MAX + 1)])


@pytest.mark.parametrize(
    ("text", "host", "port"), [("a.b:80", "a.b", 80), ("[fe80::1]:65535", "fe80::1", 65535)]
)
def test_parts_of_an_address(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


def _answer(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    """Let the running loop resolve ``names`` and nothing else."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if not names.get(host):
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (ip, port)) for ip in names[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, {"ns": ["10.0.0.2", "10.0.0.1", "fe80::1"]})
    found = await resolve(["ns:9876", "10.0.0.9:1", "[::1]:2", "gone:3"])
    assert found == ("10.0.0.1:9876", "10.0.0.2:9876", "10.0.0.9:1", "[::1]:2", "[fe80::1]:9876")


async def test_changes_of_a_name_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"ns": ["10.0.0.1"]}
    _answer(monkeypatch, names)
    heard: asyncio.Queue[tuple[str, ...]] = asyncio.Queue(8)
    following = asyncio.create_task(follow_addresses(["ns:1"], heard.put_nowait, every_s=0))
    try:
        assert await heard.get() == ("10.0.0.1:1",)
        names["ns"] = ["10.0.0.2", "10.0.0.1"]
        assert await heard.get() == ("10.0.0.1:1", "10.0.0.2:1")
        names["ns"] = []  # nothing resolves: the last known stay
        names["ns"] = ["10.0.0.3"]
        assert await heard.get() == ("10.0.0.3:1",)
    finally:
        following.cancel()


async def test_unresolvable_names_do_not_empty_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, {})
    heard: list[tuple[str, ...]] = []
    following = asyncio.create_task(follow_addresses(["ns:1"], heard.append, every_s=0))
    for _ in range(20):
        await asyncio.sleep(0)
    following.cancel()
    assert heard == []


async def test_addresses_without_names_are_not_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[str, ...]] = []
    lookups: list[object] = []

    async def resolved(names: tuple[str, ...]) -> tuple[str, ...]:
        lookups.append(names)
        return names

    monkeypatch.setattr(addresses, "resolve", resolved)
    wanted = ["10.0.0.1:1", "[::1]:2"]
    following = asyncio.create_task(follow_addresses(wanted, heard.append, every_s=0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not following.done()
    following.cancel()
    assert (heard, len(lookups)) == ([tuple(wanted)], 1)
