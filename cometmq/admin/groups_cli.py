"""``cometmq group create`` and ``info``: settings of consumer groups."""

from __future__ import annotations

import click

from cometmq.admin import groups
from cometmq.admin.commandline import broker_groups_option, cluster_command
from cometmq.admin.connection import Connection
from cometmq.admin.views import GroupSettingsView
from cometmq.v1 import broker_pb2


def add_commands(group: click.Group) -> None:
    """The verbs, as commands of ``group``."""

    @cluster_command(group, "create")
    @click.argument("name")
    @click.option("--consume/--no-consume", default=None, help="Whether members may read.")
    @click.option("--broadcast/--no-broadcast", default=None, help="Whether members may broadcast.")
    @click.option(
        "--retry-times", type=click.IntRange(min=0), help="Tries before a message is a dead letter."
    )
    @click.option(
        "--retry-queues",
        type=click.IntRange(1, 1024),
        help="Queues of the retry topic, when it is made.",
    )
    @broker_groups_option
    async def group_create(
        connection: Connection,
        name: str,
        consume: bool | None,
        broadcast: bool | None,
        retry_times: int | None,
        retry_queues: int | None,
        broker_groups: tuple[str, ...],
    ) -> list[GroupSettingsView]:
        """Create group NAME, or change its settings.

        A setting that is not given stays as it is; of a new group it is RocketMQ's default.

        With --no-consume members keep their progress and get nothing more; --consume ends that.
        mqadmin: updateSubGroup.
        """
        settings = broker_pb2.GroupSettings(
            group=name,
            consume_enable=consume,
            consume_broadcast_enable=broadcast,
            retry_times_max=retry_times,
            retry_queue_count=retry_queues,
        )
        return await groups.put_group(connection, settings, broker_groups)

    @cluster_command(group, "info")
    @click.argument("name")
    async def group_info(connection: Connection, name: str) -> list[GroupSettingsView]:
        """Show the settings of group NAME at each broker group.

        mqadmin: getConsumerConfig.
        """
        return await groups.group_settings(connection, name)
