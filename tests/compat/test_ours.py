"""Apache RocketMQ opens what CometMQ wrote, and reads the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.compat.listing import assert_same, content_of_folder
from tests.compat.rocketmq import RocketMq
from tests.compat.scenes import AFTER_A_CRASH, SCENES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scene", SCENES)
def test_rocketmq_reads_what_we_wrote(mq: RocketMq, tmp_path: Path, scene: str) -> None:
    folder = tmp_path / "store"
    SCENES[scene](folder)
    shutil.copytree(folder, tmp_path / "theirs")
    ours = content_of_folder(folder)
    # After an abnormal stop, its own included, RocketMQ may miss keys of older log files.
    whole_index = scene not in AFTER_A_CRASH
    assert assert_same(mq.read(tmp_path / "theirs"), ours, whole_index=whole_index) > 5
