"""Fewer threads between the network and the event loop.

In gRPC's event engine one thread waits for the socket, a second one reads it, and a third one wakes
the event loop. In its older poller one thread does all three. A change of threads costs more than
all that is done to a small message: one there and back took half the time, and little more than
half the CPU time; receiving a large one took two thirds of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

_VARIABLE = "GRPC_EXPERIMENTS"
_WITHOUT_ENGINE = "-event_engine_client,-event_engine_listener"


def poll_in_one_thread(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Let gRPC do so in this process and those that it starts: all of its gRPC, not CometMQ's
    alone. To be called before anything imports gRPC. False: something has done so already, or the
    parent process has decided which of gRPC's experiments this one takes part in.
    """
    decided = environ.setdefault(_VARIABLE, _WITHOUT_ENGINE) == _WITHOUT_ENGINE
    return decided and (environ is not os.environ or "grpc" not in sys.modules)
