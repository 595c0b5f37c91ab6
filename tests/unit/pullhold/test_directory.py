"""Which member of a broker group is watched."""

from __future__ import annotations

from cometmq.clock import SystemClock
from services.pullhold.directory import Directory, Member, _merged, ranked
from tests.support.cluster.fake_cluster import FakeBroker


def member(number: int, epoch: int, *, writes: bool = False) -> Member:
    return Member(f"m{number}:1", f"m{number}:2", epoch, writes)


def test_the_writer_comes_first_then_the_followers_that_are_up_to_date() -> None:
    writer, near, far = member(2, 5, writes=True), member(1, 5), member(0, 4)
    assert ranked([far, near, writer]) == [writer, near, far]
    assert ranked([far, near]) == [near, far]
    assert ranked([]) == []


def test_of_two_writers_the_older_was_deposed() -> None:
    old, new = member(0, 4, writes=True), member(1, 5, writes=True)
    assert ranked([old, new, member(2, 5)]) == [new, member(2, 5)]


def test_several_name_servers_are_believed_by_the_newest_they_know() -> None:
    cut_off = {"g": [member(0, 4, writes=True), member(1, 4)]}
    present = {"g": [member(1, 5, writes=True), member(0, 5)], "h": [member(9, 1)]}
    for told in ([cut_off, present], [present, cut_off]):
        merged = _merged(told)
        assert ranked(merged["g"]) == [member(1, 5, writes=True), member(0, 5)]
        assert merged["h"] == [member(9, 1)]


def test_a_member_that_was_promoted_is_the_writer() -> None:
    as_follower, as_writer = member(0, 5), member(0, 5, writes=True)
    assert ranked(_merged([{"g": [as_writer]}, {"g": [as_follower]}])["g"]) == [as_writer]


async def test_while_no_name_server_answers_members_tell_who_writes() -> None:
    old, new = await FakeBroker().start(), await FakeBroker().start()
    directory = Directory(["127.0.0.1:1"], SystemClock())
    try:
        directory._members = {
            "g1": [Member(old.address, "", 1, True), Member(new.address, "", 1, False)]
        }
        await old.stop()
        new.epoch = 2
        assert (await directory.member("g1")).address == new.address
    finally:
        await directory.close()
        await new.stop()
