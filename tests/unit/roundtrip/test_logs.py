"""Ranges of logs in files, against slices of one string; and what is said of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.admin.local import MEMBER, LocalCluster, LocalProcess
from cometmq.admin.views import LogChecksumView
from examples.roundtrip import logs
from examples.roundtrip.logs import LogCopy, complaints, pieces, read_again

FILE_BYTES = 10
LOG = bytes(range(40))
START = 20  # older files have been removed


@pytest.fixture(scope="module")
def commitlog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commitlog")
    for at in range(START, START + len(LOG), FILE_BYTES):
        content = LOG[at - START : at - START + FILE_BYTES]
        (folder / f"{at:020}").write_bytes(content)
    return folder


@given(st.tuples(st.integers(20, 60), st.integers(20, 60)).map(sorted), st.integers(1, 15))
def test_a_range_is_read_across_files(commitlog: Path, span: list[int], read_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "READ_BYTES", read_bytes)
        found = b"".join(pieces(commitlog, *span))
    assert found == LOG[span[0] - START : span[1] - START]


def view(member_id: int, group: str = "g1") -> LogChecksumView:
    return LogChecksumView(group, member_id, "follower", 22, 45, "aa", True)


GOOD = [LogCopy(view(0), "aa"), LogCopy(view(1), "aa")]


def test_one_log_many_times() -> None:
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([GOOD[0], replace(GOOD[1], file_sha256="bb")], "differ"),
        ([GOOD[0], replace(GOOD[1], told=replace(view(1), sha256="bb"))], "differ"),
        (GOOD[:1], "no slave"),
        ([replace(copy, told=replace(copy.told, to_offset=22)) for copy in GOOD], "in common"),
    ],
)
def test_anything_else_is_said(bad: list[LogCopy], why: str) -> None:
    other = [LogCopy(view(0, "g2"), "aa"), LogCopy(view(1, "g2"), "aa")]
    (text,) = complaints([*other, *bad])
    assert why in text
    assert "g1" in text


def test_each_member_has_its_own_files(commitlog: Path, tmp_path: Path) -> None:
    store = tmp_path / "g1-1" / "store"
    store.mkdir(parents=True)
    (store / "commitlog").symlink_to(commitlog)
    cluster = LocalCluster(tmp_path, (LocalProcess("g1-1", MEMBER, 1, 1),))
    (copy,) = read_again(cluster, [view(1)])
    assert copy.file_sha256 == hashlib.sha256(LOG[22 - START : 45 - START]).hexdigest()
