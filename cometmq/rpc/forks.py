"""What a process that was forked may do with gRPC.

``fork`` copies the memory of a process and its sockets, and none of its threads. gRPC's threads are
gone in the child, so a call there waits for ever, or the process dies. Its own cure
(GRPC_ENABLE_FORK_SUPPORT) works where nothing waits for the network, and an asyncio channel always
does: then it starts threads in the child that crash it, also if the child never calls gRPC.

Therefore: without an open channel gRPC has no threads, and a child may use it as it likes. A child
of a process that had one keeps what it inherited, untouched, and is refused everything else.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

from cometmq.clock import SystemClock
from cometmq.errors import ClientForked
from cometmq.telemetry import logger

if TYPE_CHECKING:
    import grpc

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_OFF = ("0", "false", "no")
# gRPC names threads so, those of other libraries' channels too.
_CORE_THREADS = ("grpc_", "event_engine")
_AIO_THREAD = "_poll_wrapper"
_THREADS_END_S_MAX = 0.5
_TASKS = Path("/proc/self/task")

_log = logger(__name__)


class Forks:
    """What this process has that a child must not touch. There is one, :data:`FORKS`."""

    def __init__(self) -> None:
        self._channels: WeakSet[grpc.aio.Channel] = WeakSet()
        self._watched: WeakKeyDictionary[object, WeakMethod[Callable[[], None]]] = (
            WeakKeyDictionary()
        )
        self._was_used = False  # a channel was opened since the fork before
        self._grpc_runs = False  # before the fork that goes on now
        self._kept: list[object] = []  # what this process has inherited; freed when it ends
        self._is_refused = False

    def opened(self, channel: grpc.aio.Channel) -> None:
        """This process has opened the channel."""
        self._channels.add(channel)
        self._was_used = True

    def watch(self, owner: object, forked: Callable[[], None]) -> None:
        """Calls ``forked``, a method of ``owner``, in each child of this process, which must not
        use gRPC there.
        """
        self._watched[owner] = WeakMethod(forked)

    def check(self) -> None:
        """Raises ClientForked where gRPC cannot be used any more."""
        if self._is_refused:
            raise ClientForked(
                "This process was forked while its parent used gRPC, which does not work here."
            )

    def before(self) -> None:
        """This process is going to be forked."""
        # A closed channel in a cycle of objects holds gRPC's threads. Any state but "closed" is an
        # open one, and there is only one way to find out.
        if any(_is_closed(channel) for channel in self._channels):
            gc.collect()
        is_supported = os.environ.get(_VARIABLE, "").lower() not in _OFF  # gRPC's default is "on"
        self._grpc_runs = bool(self._channels) or _runs(is_supported)
        if self._was_used and not self._channels:
            # The threads of a channel that is gone end a moment later.
            clock, pause = SystemClock(), threading.Event()
            until_s = clock.monotonic_s() + _THREADS_END_S_MAX
            while self._grpc_runs and clock.monotonic_s() < until_s:
                pause.wait(0.001)
                self._grpc_runs = _runs(is_supported)
        self._was_used = bool(self._channels)
        if self._grpc_runs and is_supported:
            _log.warning(
                "the process is forked while it uses gRPC, whose fork support is on: the child may "
                f"crash. Set {_VARIABLE}=0, or import cometmq.client before anything imports gRPC"
            )

    def in_child(self) -> None:
        """This process is the child."""
        watched = list(self._watched.items())
        self._watched.clear()
        if self._grpc_runs or self._channels:
            self._is_refused = True
            # To free a channel or a call closes or writes to a socket, which is the parent's.
            self._kept += [*self._channels, *(owner for owner, _ in watched)]
        self._channels = WeakSet()
        for _, method in watched:
            if (forked := method()) is not None:
                forked()


def _is_closed(channel: grpc.aio.Channel) -> bool:
    import grpc

    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def _runs(is_supported: bool) -> bool:
    """Whether gRPC has threads that a child would miss. ``is_supported``: its support is on."""
    threads = set(_threads())
    return _AIO_THREAD in threads if is_supported else bool(threads)


def _threads() -> Iterator[str]:
    """The kinds of gRPC's threads in this process; of asyncio's only, where there is no /proc."""
    if any(_AIO_THREAD in thread.name for thread in threading.enumerate()):
        yield _AIO_THREAD
    if not sys.platform.startswith("linux"):
        return
    for task in _TASKS.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:  # it has ended
            continue
        yield from (kind for kind in _CORE_THREADS if name.startswith(kind))


def leave_forks_alone(environ: MutableMapping[str, str] = os.environ) -> None:
    """Turns gRPC's own support of forks off, unless the environment has decided that, or something
    has imported gRPC, which looks at it once.
    """
    if "grpc" not in sys.modules:
        environ.setdefault(_VARIABLE, _OFF[0])


FORKS = Forks()
os.register_at_fork(before=FORKS.before, after_in_child=FORKS.in_child)
