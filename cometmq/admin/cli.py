"""The ``cometmq`` command: its root. Each group of commands is a module beside this one, thin over
:mod:`cometmq.admin.ops` and :mod:`cometmq.admin.local`, and is loaded when it is used.

Exit codes: 0 done; 1 refused, with the catalogue's text and advice on standard error; 2 the command
line is wrong; 130 interrupted. docs/cli.md shows every command and its JSON.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click

from cometmq.admin.commandline import SectionedGroup, namesrv_option, output_option, secret_option


@click.group(
    cls=SectionedGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: cometmq local up; cometmq topic create hello; cometmq message send hello "
    "world; cometmq message consume hello; cometmq local down",
)
@click.version_option(package_name="cometmq", message="CometMQ %(version)s")
@namesrv_option
@secret_option
@output_option
def cli(**_: Any) -> None:
    """Operate a CometMQ cluster.

    Every command takes --output json. All but `local` and `store` take --namesrv, before or behind
    the command. `cometmq COMMAND --help` shows the commands of a group.
    """


def main() -> None:
    """Run the command line; the process ends with its exit code, 1 if the output has no room."""
    try:
        try:
            cli()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        sys.exit("error: the output is not complete: no space is left where it goes")
