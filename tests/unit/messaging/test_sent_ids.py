from __future__ import annotations

import random

import pytest

from cometmq.messaging.sent_ids import ID_LENGTH_MAX, KEPT_S, SentId, SentIds, sent_id

HOST = bytes([10, 0, 0, 1]) + (5000).to_bytes(4, "big")


def test_the_client_of_an_id_is_its_beginning_or_the_address_without_the_port() -> None:
    numbered = "01" + "AB" * 12 + "0000002A"
    assert sent_id(numbered, HOST).client == numbered[:26]
    other_port = HOST[:4] + (6000).to_bytes(4, "big")
    assert sent_id("order-7", HOST) == sent_id("order-7", other_port) == ("0a000001", "order-7")


def test_of_a_long_id_little_is_kept() -> None:
    long = [sent_id("x" * 30_000 + last, HOST) for last in "aab"]
    assert len({one.unique_id for one in long}) == 2
    assert all(len(one.unique_id) <= ID_LENGTH_MAX for one in long)


@pytest.mark.parametrize("seed", range(30))
def test_ids_are_found_for_a_minute_while_a_client_has_few(seed: int) -> None:
    """Against a list of everything that was added."""
    source = random.Random(seed)
    ids_max, per_client_max = source.choice([(1000, 10), (40, 10), (1000, 1000)])
    table, now_s = SentIds(ids_max, per_client_max), 0.0
    added: list[tuple[SentId, int, float]] = []
    for step in range(1_000):
        now_s += source.choice([0.0, 0.1, 1.0, 5.0, 70.0 if step % 97 == 0 else 0.0])
        sent = SentId(f"c{source.randrange(6)}", f"id{source.randrange(40)}")
        found = table.find(sent, now_s)
        same = [entry for entry in added if entry[0] == sent]
        if found is not None:
            _, place, came_s = same[-1]
            assert (found, now_s - came_s <= KEPT_S) == (place, True)
        elif same and now_s - same[-1][2] <= KEPT_S:  # it must have been crowded out
            at = added.index(same[-1])
            behind = [entry for entry in added[at + 1 :] if entry[0].client == sent.client]
            assert len(behind) >= per_client_max or len(added) - at > ids_max / 6
        if found is None or source.random() < 0.1:
            table.add(sent, step, now_s)
            added.append((sent, step, now_s))
            assert table.find(sent, now_s) == step
        table.validate()
    table.add(SentId("last", "x"), 1, now_s + 2 * KEPT_S)
    assert len(table) == 1, "what is too old stays in memory"
