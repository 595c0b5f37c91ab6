"""How a coroutine function becomes a command that works on a cluster, and the way to one."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from cometmq.admin import forms, local, render
from cometmq.admin.commandline import (
    DEFAULT_DIRECTORY,
    EXIT_FAULTY,
    Decorator,
    namesrv_option,
    output_option,
    secret_option,
    wide_option,
)
from cometmq.admin.connection import Connection
from cometmq.clock import SystemClock
from cometmq.errors import LocalStateInvalid
from cometmq.rpc.secret import open_secret


def cluster_command(
    group: click.Group,
    name: str,
    doubt: Callable[[Any], str] = lambda _: "",
    *,
    has_more: bool = False,
) -> Decorator:
    """Make a command of a coroutine function that takes a Connection and answers views. ``doubt``
    returns what is wrong with an answer, if anything is: then the command ends with EXIT_FAULTY.
    ``has_more``: its table has columns that --wide shows.
    """

    more: Decorator = wide_option if has_more else lambda command: command

    def decorate(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        @group.command(name)
        @namesrv_option
        @secret_option
        @output_option
        @more
        @functools.wraps(work)
        def command(
            namesrv: str | None,
            secret_file: Path | None,
            output: str,
            wide: bool = False,
            **arguments: Any,
        ) -> None:
            async def run() -> Any:
                async with connection_to(namesrv, secret_file) as connection:
                    return await work(connection, **arguments)

            answer = asyncio.run(run())
            render.show(answer, forms.WIDE if wide and output == forms.TABLE else output)
            if wrong := doubt(answer):
                render.show_warning(wrong, output)
                click.get_current_context().exit(EXIT_FAULTY)

        return command

    return decorate


def connection_to(namesrv: str | None, secret_file: Path | None) -> Connection:
    """The way to the cluster that was named, else to the local one, else a usage error. The local
    cluster's secret goes with its name servers, however they were named.
    """
    try:
        cluster = local.status(Path(os.environ.get("COMETMQ_LOCAL_DIR") or DEFAULT_DIRECTORY))
    except LocalStateInvalid:
        if not namesrv:
            raise
        cluster = None
    own = list(filter(None, cluster.namesrv.split(";"))) if cluster else []
    if not namesrv and not own:
        raise click.UsageError(
            "no name server is known: give --namesrv HOST:PORT or set COMETMQ_NAMESRV,"
            " or start a cluster here with: cometmq local up"
        )
    namesrv = namesrv or ";".join(own)
    if cluster is not None and secret_file is None and not set(own).isdisjoint(namesrv.split(";")):
        secret_file = cluster.secret_file
    return Connection(namesrv, open_secret(secret_file, SystemClock()))
