"""Whether another member than the one that is watched should be: there is a writer (again), or a
newer one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from cometmq.errors import CometError
from cometmq.rpc.secret import SharedSecret
from cometmq.telemetry import fields
from services.pullhold.directory import Directory, Member
from services.pullhold.peers import BrokerPeer

LOOK_S = 1.0

_log = logging.getLogger(__name__)


async def until_better(
    directory: Directory, broker_group: str, member: Member, secret: SharedSecret | None
) -> None:
    """Until another member than ``member`` is the one to watch, and answers."""
    while True:
        await asyncio.sleep(LOOK_S)
        with suppress(CometError):  # nobody knows better
            better = await directory.member(broker_group)
            # A writer of another epoch is another process, even if it has the same name.
            same = better.epoch == member.epoch or not better.writes
            if better.address == member.address and same:
                continue
            if await _answers(directory, broker_group, better, secret):
                _log.info(
                    "another member is watched",
                    extra=fields(group=broker_group, address=better.address),
                )
                return


async def _answers(
    directory: Directory, broker_group: str, member: Member, secret: SharedSecret | None
) -> bool:
    async with BrokerPeer(broker_group, member, secret) as peer:
        try:
            await peer.maxima([])
        except CometError:
            directory.failed(member)
            return False
    directory.answered(member)
    return True
