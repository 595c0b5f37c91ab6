"""The list of pullholds."""

from __future__ import annotations

import pytest

from cometmq.errors import InvalidRequest, LimitExceeded
from services.namesrv.pullholds import PullholdTable


def test_lists_by_cluster_sorted_each_once() -> None:
    table = PullholdTable()
    for cluster, address in [("c", "b:2"), ("c", "a:1"), ("d", "a:1"), ("c", "b:2")]:
        table.register(cluster, address, 0.0)
    assert table.addresses("c") == ["a:1", "b:2"]
    assert table.addresses("d") == ["a:1"]
    assert table.addresses("") == ["a:1", "b:2"]
    assert table.addresses("e") == []
    assert len(table) == 3


def test_silence_removes() -> None:
    table = PullholdTable(silence_max_s=120)
    table.register("c", "a:1", 0.0)
    table.register("c", "b:2", 0.0)
    table.register("c", "b:2", 30.0)
    assert table.expire(119.9) == []
    assert table.expire(120.0) == ["a:1"]
    assert table.addresses("c") == ["b:2"]


def test_unregister_is_idempotent() -> None:
    table = PullholdTable()
    table.register("c", "a:1", 0.0)
    table.unregister("c", "a:1")
    table.unregister("c", "a:1")
    assert table.addresses("c") == []


@pytest.mark.parametrize(
    ("cluster", "address"), [("", "a:1"), ("c d", "a:1"), ("c", "a"), ("c", ""), ("c", "a:1\n")]
)
def test_refuses_what_is_no_name_or_address(cluster: str, address: str) -> None:
    with pytest.raises(InvalidRequest):
        PullholdTable().register(cluster, address, 0.0)


def test_a_full_table_still_hears_those_it_knows() -> None:
    table = PullholdTable(holds_max=1)
    table.register("c", "a:1", 0.0)
    with pytest.raises(LimitExceeded):
        table.register("c", "b:2", 0.0)
    table.register("c", "a:1", 9.0)
