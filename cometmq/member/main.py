"""``__main__`` of a member: signals and health first, then imports, then the role, until a signal
or another role ends it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cometmq import reexec
from cometmq.clock import SystemClock
from cometmq.config import load
from cometmq.errors import ConfigInvalid
from cometmq.member.config import MemberConfig
from cometmq.member.listen import new_ports
from cometmq.reexec import RoleChange
from cometmq.rpc.process import StopSignal, settle

if TYPE_CHECKING:
    from cometmq.member.app import MemberApp
    from cometmq.member.listen import Ports

BIND_TRIES_MAX = 50
BIND_RETRY_S = 0.1


async def live(stop: StopSignal, load_app: Callable[[], type[MemberApp]]) -> RoleChange | None:
    """Be a member; ``load_app`` imports the role. Returns the role that comes next, None: none."""
    before = reexec.received(os.environ)
    config = load(MemberConfig, argv=sys.argv[1:], environ=os.environ)
    if before is not None:
        config = with_ports(config, before.ports)
    if config.cpu_affinity:
        set_affinity(config.cpu_affinity)
    ports = await bound(config, rebinding=before is not None)
    try:
        app_class = load_app()

        from cometmq.telemetry import setup_logging

        setup_logging(level=config.log_level, form=config.log_form)
        await _wait(stop, reexec.delay_s(before, SystemClock().boottime_s()))
        if stop.is_set:
            return None
        async with app_class(config, ports, before=before, stop=stop) as app:
            settle(config.trace_limit_ms)
            return await app.until(stop)
    finally:
        await ports.stop(0)


def with_ports(config: MemberConfig, ports: Mapping[str, int]) -> MemberConfig:
    """The options with the ports that the process before had bound."""
    return replace(
        config,
        port=ports["port"],
        internal_port=ports["internal_port"],
        metrics_port=ports["metrics_port"],
    )


async def bound(config: MemberConfig, *, rebinding: bool) -> Ports:
    """Ports that listen. One that was ours a moment ago may be used by an outgoing connection for
    another.
    """
    for _ in range(BIND_TRIES_MAX if rebinding else 0):
        ports = new_ports(config)
        try:
            await ports.start()
            return ports
        except ConfigInvalid:
            await ports.stop(0)
            await asyncio.sleep(BIND_RETRY_S)
    ports = new_ports(config)
    await ports.start()
    return ports


async def _wait(stop: StopSignal, delay_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await stop.wait()


def set_affinity(cpus: tuple[str, ...]) -> None:
    """Stay on these CPUs. Raises ConfigInvalid when the machine lacks one."""
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus})
    except OSError as error:
        raise ConfigInvalid(f"option cpu_affinity: {';'.join(cpus)}: {error.strerror}") from None
