"""Options of the name server."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.config import load
from cometmq.errors import ConfigInvalid
from services.namesrv.config import NamesrvConfig


def test_the_defaults_are_those_of_rocketmq() -> None:
    config = load(NamesrvConfig, argv=[], environ={})
    assert (config.port, config.member_silence_max_s, config.scan_interval_s) == (9876, 120, 10)
    assert config.kv_config_path == Path.home() / ".cometmq/namesrv/kvConfig.json"


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="port"):
        load(NamesrvConfig, argv=["--port", "65536"], environ={})
