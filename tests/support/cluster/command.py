"""The ``cometmq`` command within the test's process: what it does and answers, without the start of
a Python for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from cometmq.admin.cli import cli


def run_command(directory: Path, *arguments: str, stdin: bytes = b"") -> Result:
    """What ``cometmq`` does for a user of the local cluster in ``directory``."""
    environment = {"COMETMQ_LOCAL_DIR": str(directory), "COMETMQ_NAMESRV": None}
    result = CliRunner().invoke(cli, arguments, input=stdin, env=environment)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def command_json(directory: Path, *arguments: str, stdin: bytes = b"") -> Any:
    """The JSON that a command answers, which has to succeed and to keep silent otherwise."""
    result = run_command(directory, *arguments, "--output", "json", stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return json.loads(result.stdout)
