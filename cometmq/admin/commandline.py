"""What all commands of ``cometmq`` share: options, how refusals are shown, the way to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from cometmq.admin import forms
from cometmq.errors import CometError

EXIT_FAULTY = 3  # what was asked was found out, and is not as it should be
EXIT_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
DEFAULT_DIRECTORY = ".cometmq"
OFFSET_MAX = 2**63 - 1

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def parse_places(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Broker group and offset of each; texts like ``g1/17``. Raises click.UsageError."""
    found: list[tuple[str, int]] = []
    for text in texts:
        owner, _, offset = text.rpartition("/")
        if not owner or not offset.isdecimal() or int(offset) > OFFSET_MAX:
            raise click.UsageError(f"{text!r} is not BROKER_GROUP/OFFSET")
        found.append((owner, int(offset)))
    return found


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


# Options that may also be given before the subcommand.
output_option = click.option(
    "--output",
    callback=or_before,
    type=click.Choice(forms.FORMS),
    default=forms.TABLE,
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
    """A command that shows a CometError as the error catalogue describes it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CometError as error:
            from cometmq.admin import render  # loads rich, which a help page does without

            render.show_error(error, ctx.params.get("output", forms.TABLE))
            ctx.exit(1)
        except KeyboardInterrupt:  # how --follow ends
            ctx.exit(EXIT_INTERRUPTED)


class Group(click.Group):
    command_class = Command


class SectionedGroup(Group):
    """The root: its help lists the groups of commands by what they are for. The module of a group,
    which has it as ``NAME_group``, is imported when the group is used.
    """

    sections: ClassVar = {
        "Messaging": {
            "topic": ("topics_cli", "Topics: settings, routes and queues."),
            "group": ("groups_cli", "Consumer groups: members, progress, resets, clean-up."),
            "client": ("clients_cli", "Clients: members of groups, producers."),
            "message": ("messages_cli", "Send, read and look up messages."),
            "transaction": (
                "transactions_cli",
                "Transactions: half messages that have no end yet.",
            ),
            "quota": ("quotas_cli", "Quotas: what addresses and topics may send and read."),
            "dlq": ("dead_letters_cli", "Dead letters: messages that a group gave up."),
        },
        "Cluster": {
            "cluster": ("cluster_cli", "Broker groups and their members at a glance."),
            "broker": (
                "brokers_cli",
                "Members of broker groups: roles, logs, hand-over, election.",
            ),
            "offsets": ("offsets_cli", "Offsets of all queues and groups, for the lag job."),
        },
        "This machine": {
            "local": ("local_cli", "A cluster of real processes on this machine."),
            "store": ("store_cli", "A store's folder, without a broker: look, verify, repair."),
        },
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for groups in self.sections.values() for name in groups]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        for groups in self.sections.values():
            if name in groups:
                module = import_module(f"cometmq.admin.{groups[name][0]}")
                command: click.Command = getattr(module, f"{name}_group")
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, groups in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, help_) for name, (_, help_) in groups.items()])


def pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` options → a dict."""
    found = dict(value.partition("=")[::2] for value in values)
    if bad := [value for value in values if not value.partition("=")[0] or "=" not in value]:
        raise click.BadParameter(f"{bad[0]!r} is not NAME=VALUE")
    return found
