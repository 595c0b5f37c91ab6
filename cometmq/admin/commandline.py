"""What all commands of ``cometmq`` share: options, how refusals are shown, the way to a cluster."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from cometmq.admin import local, render
from cometmq.admin.connection import Connection
from cometmq.clock import SystemClock
from cometmq.errors import CometError
from cometmq.rpc.secret import open_secret

EXIT_FAULTY = 3  # what was asked was found out, and is not as it should be
EXIT_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
DEFAULT_DIRECTORY = ".cometmq"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def or_before(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """What was given here, else what was given before the subcommand, else the value that the
    environment or the default gives.
    """
    name, root = option.name, ctx.find_root()
    assert name is not None
    given = ParameterSource.COMMANDLINE
    if ctx.get_parameter_source(name) is given or root.get_parameter_source(name) is not given:
        return value
    return root.params[name]


# Options that may stand before the subcommand, too.
output_option = click.option(
    "--output",
    callback=or_before,
    type=click.Choice(render.FORMS),
    default=render.TABLE,
    show_default=True,
    help="Form of the result, and of errors.",
)
wide_option = click.option("--wide", is_flag=True, help="Show every column.")
directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    envvar="COMETMQ_LOCAL_DIR",
    show_envvar=True,
    help="Folder of the local cluster.",
)
namesrv_option = click.option(
    "--namesrv",
    callback=or_before,
    metavar="HOST:PORT;…",
    envvar="COMETMQ_NAMESRV",
    show_envvar=True,
    help="Name servers. Default: those of the local cluster in --dir of `cometmq local`.",
)
secret_option = click.option(
    "--internal-secret-file",
    "secret_file",
    callback=or_before,
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="COMETMQ_INTERNAL_SECRET_FILE",
    show_envvar=True,
    help="File with the cluster's secret. Default: the local cluster's, if it is the one.",
)
again_option = click.option("--again", is_flag=True, help="Also those that were sent again before.")
rate_option = click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Messages a second; 0 = as fast as it goes.",
)
broker_groups_option = click.option(
    "--broker-group",
    "broker_groups",
    multiple=True,
    metavar="NAME",
    help="Only there; may be repeated. Default: every broker group.",
)


class Command(click.Command):
    """A command whose refusals are shown as the catalogue tells them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CometError as error:
            render.show_error(error, ctx.params.get("output", render.TABLE))
            ctx.exit(1)
        except KeyboardInterrupt:  # how --follow ends
            ctx.exit(EXIT_INTERRUPTED)


class Group(click.Group):
    command_class = Command


class SectionedGroup(Group):
    """The root: its help lists the commands by what they are for."""

    sections: ClassVar = {
        "Messaging": ("topic", "group", "client", "message", "dlq"),
        "Cluster": ("cluster", "broker", "offsets"),
        "This machine": ("local", "store"),
    }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(70)) for name in names]
                )


def cluster_command(
    group: click.Group,
    name: str,
    doubt: Callable[[Any], str] = lambda _: "",
    *,
    has_more: bool = False,
) -> Decorator:
    """Make a command of a coroutine function that takes a Connection and answers views. ``doubt``
    tells what is wrong with an answer, if anything is: then the command ends with EXIT_FAULTY.
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
            render.show(answer, render.WIDE if wide and output == render.TABLE else output)
            if wrong := doubt(answer):
                render.show_warning(wrong, output)
                click.get_current_context().exit(EXIT_FAULTY)

        return command

    return decorate


def connection_to(namesrv: str | None, secret_file: Path | None) -> Connection:
    """The way to the cluster that was named, else to the local one, else a usage error. The local
    cluster's secret goes with its name servers, however they were named.
    """
    cluster = local.status(Path(os.environ.get("COMETMQ_LOCAL_DIR") or DEFAULT_DIRECTORY))
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


def pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` options → a dict."""
    found = dict(value.partition("=")[::2] for value in values)
    if bad := [value for value in values if not value.partition("=")[0] or "=" not in value]:
        raise click.BadParameter(f"{bad[0]!r} is not NAME=VALUE")
    return found
