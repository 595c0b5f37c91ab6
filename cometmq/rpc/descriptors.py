"""How many files and connections a process may have open, and what they are used for.

The usual limit, 1,024, is for programs that use select(2) and is meant to be raised by all others.
Half of what there is the store may use (:class:`~cometmq.store.disk.files.OsFiles`), connections
most of the rest: one too many is refused, which concerns its client alone; a log file that cannot
be opened would concern all clients.
"""

from __future__ import annotations

import resource
from contextlib import suppress

SERVERS = 2  # of a member: its clients' port and the internal one
OTHERS = 128  # connections to other processes and to the port of metrics, pipes, the loop's own
CONNECTIONS_MIN = 16


def raise_limit() -> None:
    """Let this process open as many files as its parent allows: the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a sandbox may forbid it: then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share_of_connections() -> int:
    """How many connections one server takes; more are closed at once."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(CONNECTIONS_MIN, (allowed // 2 - OTHERS) // SERVERS)
