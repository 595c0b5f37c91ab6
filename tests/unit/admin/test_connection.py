from __future__ import annotations

import pytest

from cometmq.admin.connection import Connection, each_that_knows, until
from cometmq.errors import ConfigInvalid, PeerUnavailable, TopicNotFound
from cometmq.v1 import namesrv_pb2 as n

from .conftest import FakeCluster

SILENT = "127.0.0.1:1"  # nothing listens on port 1


async def test_the_next_name_server_is_asked_when_one_is_silent(cluster: FakeCluster) -> None:
    async with Connection(f"{SILENT};{cluster.namesrv.address}") as connection:
        assert list(await connection.writers()) == ["g1", "g2"]


async def test_silence_of_all_name_servers_names_them() -> None:
    async with Connection(SILENT) as connection:
        with pytest.raises(PeerUnavailable, match=SILENT):
            await connection.members()


async def test_a_refusal_is_an_answer(cluster: FakeCluster) -> None:
    async with Connection(f"{cluster.namesrv.address};{SILENT}") as connection:
        with pytest.raises(TopicNotFound, match="has no route"):
            await connection.route("T")


def test_an_address_without_port_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        Connection("localhost")


async def test_writers_of_wanted_groups_only(connection: Connection) -> None:
    assert list(await connection.writers(("g2",))) == ["g2"]


async def test_unknowing_groups_are_left_out_unless_nobody_knows() -> None:
    unknown = TopicNotFound("nobody")
    writers = {name: n.Member(broker_group=name) for name in ("g1", "g2")}

    async def ask(member: n.Member) -> str:
        if member.broker_group != known:
            raise TopicNotFound("not here")
        return "here"

    known = "g2"
    assert await each_that_knows(writers, ask, unknown) == {"g2": "here"}
    known = ""
    with pytest.raises(TopicNotFound, match="nobody"):
        await each_that_knows(writers, ask, unknown)


async def test_until_gives_up_at_the_deadline() -> None:
    async def never() -> bool:
        return False

    assert not await until(never, 0.01)
