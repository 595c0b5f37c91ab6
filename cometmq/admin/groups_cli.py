"""``cometmq group create`` and ``info``: settings of consumer groups."""

from __future__ import annotations

import click

from cometmq.admin import groups, ops
from cometmq.admin.commandline import broker_groups_option, cluster_command
from cometmq.admin.connection import Connection
from cometmq.admin.views import GroupMemberView, GroupSettingsView
from cometmq.v1 import broker_pb2


def disagreement(members: list[GroupMemberView]) -> str:
    """What members of one group must have in common, and have not; empty: nothing."""
    wrong = []
    if len({one.message_model for one in members}) > 1:
        wrong.append("the message model")
    if len({one.allocation for one in members if one.allocation}) > 1:
        wrong.append("the allocation (all use average)")
    filters: dict[str, set[tuple[str, ...]]] = {}
    for one in members:
        for topic, wanted in one.subscriptions.items():
            filters.setdefault(topic, set()).add(tuple(wanted))
    wrong += [f"the filter of {topic}" for topic, some in sorted(filters.items()) if len(some) > 1]
    return f"members do not agree on {', '.join(wrong)}" if wrong else ""


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

    @cluster_command(group, "members", disagreement)
    @click.argument("name")
    async def group_members(connection: Connection, name: str) -> list[GroupMemberView]:
        """Show the live members of group NAME, what they read, and how they divide the queues.

        mqadmin: consumerConnection.
        """
        return await ops.group_members(connection, name)

    @cluster_command(group, "info")
    @click.argument("name")
    async def group_info(connection: Connection, name: str) -> list[GroupSettingsView]:
        """Show the settings of group NAME at each broker group.

        mqadmin: getConsumerConfig.
        """
        return await groups.group_settings(connection, name)
