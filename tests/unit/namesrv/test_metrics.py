"""What a name server counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.namesrv.metrics import NamesrvMetrics
from services.namesrv.routes import DataVersion, Member, Role, RouteTable


def register(table: RouteTable, group: str, member_id: int, role: Role) -> None:
    address = f"{group}-{member_id}:1"
    table.register(
        Member("c", group, member_id, role, address, "", 1),
        DataVersion(1, 1),
        [],
        topic_count=0,
        now_s=0.0,
        now_ms=0,
    )


def members(registry: CollectorRegistry, group: str, role: str) -> float | None:
    labels = {"cluster": "c", "broker_group": group, "role": role}
    return registry.get_sample_value("cometmq_namesrv_members", labels)


def test_members_are_counted_by_group_and_role() -> None:
    registry, table = CollectorRegistry(auto_describe=True), RouteTable()
    NamesrvMetrics(registry, table)
    register(table, "g1", 0, Role.WRITER)
    register(table, "g1", 1, Role.FOLLOWER)
    register(table, "g1", 2, Role.FOLLOWER)
    register(table, "g2", 0, Role.FOLLOWER)
    found = {(g, r): members(registry, g, r) for g in ("g1", "g2") for r in ("writer", "follower")}
    assert found == {
        ("g1", "writer"): 1,
        ("g1", "follower"): 2,
        ("g2", "writer"): 0,  # known, so that an alert sees it
        ("g2", "follower"): 1,
    }
    table.unregister("c", "g2", 0, 1)
    assert members(registry, "g2", "writer") is None
