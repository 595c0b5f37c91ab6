"""A member as a process: health first, then imports, then one role after the other, until a signal
or an error ends it.

Each role has an event loop, ports and objects of its own. What it passes to the next is a
:class:`~cometmq.member.role_change.RoleChange`, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from cometmq.clock import SystemClock
from cometmq.config import load
from cometmq.errors import ConfigInvalid
from cometmq.member.config import MemberConfig
from cometmq.member.listen import new_ports, rebound
from cometmq.member.role_change import WRITER_MODULE, RoleChange, delay_s
from cometmq.rpc.process import Main, StopSignal, settle

if TYPE_CHECKING:
    from cometmq.member.app import MemberApp
    from cometmq.member.listen import Ports


async def live(module: str, before: RoleChange | None, stop: StopSignal) -> Main | None:
    """Have the role of ``module``, after the role change ``before``. Returns the role that comes
    next; None: a signal to stop has come.
    """
    config = load(MemberConfig, argv=sys.argv[1:], environ=os.environ)
    if before is not None:
        config = with_ports(config, before.ports)
    elif config.cpu_affinity:
        set_affinity(config.cpu_affinity)
    ports = await bound(config, rebinding=before is not None)
    try:
        from cometmq.telemetry import setup_logging

        setup_logging(level=config.log_level, form=config.log_form)
        app_class = load_app(module)
        if config.lease:  # a follower may lead as soon as its store is open: a group waits for it
            load_app(WRITER_MODULE)
        await _wait(stop, delay_s(before, SystemClock().boottime_s()))
        if stop.is_set:
            if before is not None:
                await asyncio.to_thread(before.end_reports)
            return None
        app = app_class(config, ports, before=before, stop=stop)
        async with app:
            settle(config.trace_limit_ms)
            await app.until(stop)
        change = app.change
        return None if change is None else partial(live, change.module, change)
    finally:
        await ports.stop(0)
        if before is not None:
            await asyncio.to_thread(before.close_store)


def load_app(module: str) -> type[MemberApp]:
    """The role of a service, which is not imported before: services do not know each other."""
    app: type[MemberApp] = import_module(f"{module}.app").App
    return app


def with_ports(config: MemberConfig, ports: Mapping[str, int]) -> MemberConfig:
    """The options with the ports that the role before had bound."""
    return replace(
        config,
        port=ports["port"],
        internal_port=ports["internal_port"],
        metrics_port=ports["metrics_port"],
    )


async def bound(config: MemberConfig, *, rebinding: bool) -> Ports:
    """Ports that listen; ``rebinding``: a role of this process had them a moment ago."""

    async def bind() -> Ports:
        ports = new_ports(config)
        try:
            await ports.start()
        except ConfigInvalid:
            await ports.stop(0)
            raise
        return ports

    return await (rebound(bind) if rebinding else bind())


async def _wait(stop: StopSignal, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def set_affinity(cpus: tuple[str, ...]) -> None:
    """Stay on these CPUs. Raises ConfigInvalid when the machine lacks one."""
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus})
    except OSError as error:
        raise ConfigInvalid(f"option cpu_affinity: {';'.join(cpus)}: {error.strerror}") from None
