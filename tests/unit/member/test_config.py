from __future__ import annotations

from typing import Any

import pytest

from cometmq.errors import ConfigInvalid
from cometmq.member.config import MIB, FlushDiskType, MemberConfig


def test_without_the_pool_nothing_waits_in_memory() -> None:
    assert MemberConfig().transient_bytes_max == 0
    assert MemberConfig(transient_store_pool_enable=True).transient_bytes_max == 64 * MIB


def test_the_pool_is_refused_where_new_topics_want_the_disk() -> None:
    with pytest.raises(ConfigInvalid, match="transient_store_pool_enable"):
        MemberConfig(transient_store_pool_enable=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)


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
