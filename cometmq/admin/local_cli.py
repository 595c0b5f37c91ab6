"""``cometmq local``: a cluster of real processes on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from cometmq.admin import forms, local, ops, render
from cometmq.admin.cluster_command import connection_to
from cometmq.admin.commandline import Group, directory_option, output_option, pairs
from cometmq.admin.views import LocalView, ProcessView, StoppedView

REGISTERED_WAIT_S = 60.0  # on a busy machine


@click.group("local", cls=Group)
def local_group() -> None:
    """A cluster of real processes on this machine."""


@local_group.command("up")
@directory_option
@click.option("--namesrvs", type=click.IntRange(1, 8), help="Default: 1.")
@click.option("--brokers", type=click.IntRange(0, 32), help="Default: 2.")
@click.option("--slaves", type=click.IntRange(0, 8), help="Of each broker. Default: 0.")
@click.option("--pullholds", type=click.IntRange(0, 8), help="Default: 0.")
@click.option(
    "--option", "options", multiple=True, callback=pairs, metavar="NAME=VALUE",
    help="A broker option, e.g. flush_disk_type=ASYNC_FLUSH. May be repeated.",
)  # fmt: skip
@output_option
def local_up(
    directory: Path,
    namesrvs: int | None,
    brokers: int | None,
    slaves: int | None,
    pullholds: int | None,
    options: dict[str, str],
    output: str,
) -> None:
    """Start the cluster, or its processes that have died.

    Returns when it is ready. Options that are not given keep the values of the cluster's first
    start, which the command prints.
    """
    before = local.known(directory)
    if before is not None and output == forms.TABLE:
        click.echo(f"This cluster was started with {local.as_given(before)}", err=True)

    async def run() -> LocalView:
        cluster = await local.up(
            directory,
            namesrv_count=namesrvs,
            broker_count=brokers,
            slave_count=slaves,
            pullhold_count=pullholds,
            options=options,
            own_secret=True,
            tell=lambda text: click.echo(text, err=True),
        )
        async with connection_to(cluster.namesrv, cluster.secret_file) as connection:
            groups = cluster.broker_groups
            await ops.wait_for_brokers(connection, groups, deadline_s=REGISTERED_WAIT_S)
        return _local_view(directory, cluster)

    render.show(asyncio.run(run()), output)


@local_group.command("down")
@directory_option
@click.option("--purge", is_flag=True, help="Remove its data, too.")
@output_option
def local_down(directory: Path, purge: bool, output: str) -> None:
    """Stop the cluster; messages stay for the next `up`."""
    stopped = asyncio.run(local.down(directory, purge=purge))
    if purge and (left := local.left_by_purge(directory)):
        names = ", ".join(str(path) for path in left)
        click.echo(f"not removed, because no local cluster made it: {names}", err=True)
    render.show(StoppedView(str(directory.resolve()), stopped, purge), output)


@local_group.command("env")
@directory_option
@output_option
def local_env(directory: Path, output: str) -> None:
    """Print variables for programs.

    Use it as: eval "$(cometmq local env)"
    """
    cluster = local.status(directory)
    if cluster is None:
        raise click.UsageError(f"nothing is up in {directory}: start a cluster: cometmq local up")
    view = _local_view(directory, cluster)
    if output == forms.JSON:
        render.show(view, output)
    else:
        click.echo("\n".join(render.export_lines(view)))


@local_group.command("status")
@directory_option
@output_option
def local_status(directory: Path, output: str) -> None:
    """Show the processes and their addresses."""
    render.show(_local_view(directory, local.status(directory)), output)


def _local_view(directory: Path, cluster: local.LocalCluster | None) -> LocalView:
    if cluster is None:
        return LocalView(str(directory.resolve()), "", "", [])
    rows = [
        ProcessView(
            name=process.name,
            kind=process.kind,
            alive=process.alive,
            pid=process.pid,
            address=process.address,
            internal_address=process.internal_address,
            metrics_address=process.metrics_address,
            log=str(cluster.log(process.name)),
        )
        for process in cluster.processes
    ]
    return LocalView(str(cluster.directory), cluster.namesrv, str(cluster.secret_file or ""), rows)
