"""Which server a client prefers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.cluster.rendezvous import ranked

CLIENTS = [f"host@{n}@abc" for n in range(2_000)]
SERVERS = ["a:1", "b:1", "c:1", "d:1"]
names = st.lists(st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1))


def first(client: str, servers: list[str]) -> str:
    return ranked(client, servers)[0]


@given(st.text(max_size=20), names)
def test_ranks_each_server_once_whatever_the_order(client: str, servers: list[str]) -> None:
    order = ranked(client, servers)
    assert sorted(order) == sorted(set(servers))
    assert order == ranked(client, reversed(servers))


def test_clients_spread_evenly() -> None:
    counts = Counter(first(client, SERVERS) for client in CLIENTS)
    assert set(counts) == set(SERVERS)
    assert max(counts.values()) < 1.2 * len(CLIENTS) / len(SERVERS)


def test_only_the_share_of_a_lost_server_moves_and_it_spreads() -> None:
    left = SERVERS[1:]
    before = {client: first(client, SERVERS) for client in CLIENTS}
    moved = [client for client in CLIENTS if first(client, left) != before[client]]
    assert {before[client] for client in moved} == {SERVERS[0]}
    assert all(first(client, left) == ranked(client, SERVERS)[1] for client in moved)
    assert set(Counter(first(client, left) for client in moved)) == set(left)
