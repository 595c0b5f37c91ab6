"""The cometmq command against a cluster of a test."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from click.testing import CliRunner

from cometmq.admin.cli import cli


class Commands:
    """The command line, against one cluster."""

    def __init__(self, namesrv: str) -> None:
        self._namesrv = namesrv

    async def __call__(self, *words: str, code: int = 0) -> Any:
        """The answer of a command that ends with this code; of a refused one its output."""

        def run() -> Any:
            options = ["--namesrv", self._namesrv, "--output", "json"]
            return CliRunner().invoke(cli, [*words, *options])

        done = await asyncio.to_thread(run)
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if code != 1 else done.output
