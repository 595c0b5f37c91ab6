"""The index thread: follows the log, and gives way to those who send.

In plain Python a key costs a few microseconds of the GIL, which an append needs as well. So while
the log grows, the thread rests after each step for some times as long as it worked; the index falls
behind then, and catches up when it is quieter. The C extension holds the GIL for next to nothing.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from cometmq.native import accelerator
from cometmq.store.base import BaseStore

STEPS = 16  # that are taken on end: whoever closes the store waits for them
IDLE_S = 0.1  # until it looks for what has been synced meanwhile
STALLED_S = 1.0  # until it looks whether there is room again
# About three times what plain Python takes for a key.
REST_S_PER_KEY = 10e-6 if accelerator is None else 0.0


class IndexThread:
    """Owns the thread. :meth:`run` as a task; it ends only by an error of the disk."""

    def __init__(self, store: BaseStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")
        self._closing = threading.Event()

    async def run(self) -> None:
        """Index what is on the disk, until cancelled. StoreFailed."""
        loop = asyncio.get_running_loop()
        while True:
            if not await loop.run_in_executor(self._thread, self._some_steps):
                await asyncio.sleep(STALLED_S if self._store.index.status.stalled else IDLE_S)

    def _some_steps(self) -> bool:
        return all(self._step() for _ in range(STEPS))

    def _step(self) -> bool:
        store = self._store
        keys, end = store.index.status.entry_count, store.appended_offset
        if not store.index_some():
            return False
        if store.appended_offset != end:  # somebody sends
            self._closing.wait(REST_S_PER_KEY * (store.index.status.entry_count - keys))
        return not self._closing.is_set()

    def close(self) -> None:
        """Wait for the step that is under way; nothing is indexed any more. Blocking."""
        self._closing.set()
        self._thread.shutdown(wait=True)
