from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cometmq.config import MIB
from cometmq.errors import ConfigInvalid
from cometmq.member.config import FlushDiskType, MemberConfig
from cometmq.model import ReplicationMode


def test_without_the_pool_nothing_waits_in_memory() -> None:
    assert MemberConfig().transient_bytes_max == 0
    assert MemberConfig(transient_store_pool_enable=True).transient_bytes_max == 64 * MIB


def test_the_pool_is_refused_where_new_topics_want_the_disk() -> None:
    with pytest.raises(ConfigInvalid, match="transient_store_pool_enable"):
        MemberConfig(transient_store_pool_enable=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)


@pytest.mark.parametrize(
    ("options", "flush", "copies"),
    [
        ({}, "SYNC", "ASYNC"),
        ({"lease": "file:///lease"}, "SYNC", "APPENDED"),
        ({"lease": "file:///lease", "peers": ("0@a:10912", "1@b:10912")}, "SYNC", "APPENDED"),
        ({"lease": "file:///lease", "peers": ("0@a:10912",)}, "SYNC", "ASYNC"),
        ({"peers": ("0@a:10912",)}, "SYNC", "ASYNC"),
        ({"flush_disk_type": FlushDiskType.ASYNC_FLUSH}, "ASYNC", "ASYNC"),
        (
            {"lease": "file:///lease", "flush_disk_type": FlushDiskType.ASYNC_FLUSH},
            "ASYNC",
            "APPENDED",
        ),
        ({"lease": "file:///lease", "replication_mode": ReplicationMode.ASYNC}, "SYNC", "ASYNC"),
        (
            {"lease": "file:///lease", "replication_mode": ReplicationMode.FLUSHED},
            "SYNC",
            "FLUSHED",
        ),
        ({"replication_mode": ReplicationMode.APPENDED}, "SYNC", "APPENDED"),
        ({"lease": "file:///lease", "transient_store_pool_enable": True}, "ASYNC", "ASYNC"),
    ],
)
def test_a_new_topic_is_as_safe_as_its_group_can_make_it(
    options: dict[str, Any], flush: str, copies: str
) -> None:
    """Unless an option says otherwise."""
    new = MemberConfig(**options).new_topic
    assert (new.flush_mode.name, new.replication_mode.name) == (flush, copies)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"delete_when": ("24",)}, "delete_when"),
        ({"delete_when": ("4am",)}, "delete_when"),
        ({"disk_max_used_space_ratio": 86.0}, "disk_space_clean_forcibly_ratio"),
        ({"disk_space_warning_level_ratio": 84.0}, "disk_space_warning_level_ratio"),
        ({"store_quota_bytes": 5 * 1024 * MIB - 1}, "store_quota_bytes"),
    ],
)
def test_retention_that_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        MemberConfig(**options)


def test_retention_may_be_set_to_the_limits() -> None:
    MemberConfig(
        delete_when=("00", "23"),
        disk_max_used_space_ratio=90.0,
        disk_space_clean_forcibly_ratio=90.0,
        store_quota_bytes=5 * 1024 * MIB,
    )


ALL = ("0@a:10912", "1@b:10912")
LED: dict[str, Any] = {"lease": "file:///lease"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"min_in_sync_replicas": 2}, "min_in_sync_replicas: without the option lease"),
        ({"peers": ALL}, "peers: without the option lease"),
        ({**LED, "peers": ALL, "min_in_sync_replicas": 3}, "3 can never be in sync"),
        ({**LED, "peers": ALL, "member_id": 2}, "this member, 2, is not among them"),
        ({**LED, "peers": ALL, "internal_port": 10913}, r"0@a:10912, has not its internal_port"),
        ({**LED, "peers": ALL, "internal_port": 0}, r"0@a:10912, has not its internal_port"),
        ({**LED, "peers": ("0@a:10912", "1@a:10912")}, "two members have the address"),
    ],
)
def test_a_group_that_can_never_work_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        MemberConfig(**options)


def test_a_group_may_ask_for_all_its_members() -> None:
    """By whatever names their hosts have; without a list nobody knows how many there are."""
    assert MemberConfig(**LED, peers=ALL, min_in_sync_replicas=2).peer_addresses() == {1: "b:10912"}
    assert MemberConfig(peers=("0@a:10912",), internal_port=0).peer_addresses() == {}, "alone"
    MemberConfig(**LED, peers=("0@[::1]:7", "1@b:10912"), internal_port=7, listen_host="0.0.0.0")
    MemberConfig(**LED, min_in_sync_replicas=16)
    MemberConfig(replication_mode=ReplicationMode.FLUSHED)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lease": "g1.json"}, "lease"),
        ({"lease": "file:///tmp"}, "is a folder"),
        ({"lease": "kubernetes://only"}, "lease"),
        ({"lease_poll_s": 6.1}, "lease_poll_s must not be above lease_duration_s"),
        ({"lease_renew_s": 6.0}, "lease_renew_s must be below lease_duration_s"),
    ],
)
def test_a_lease_that_cannot_be_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        MemberConfig(**options)


def test_options_are_read_before_what_takes_time_to_import() -> None:
    ask = "import sys, cometmq.member.config; sys.exit('cometmq.member.lease.kube' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0
