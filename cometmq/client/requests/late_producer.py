"""A producer that a client opens for itself when it first has something to send: replies, trace
records.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cometmq.client.options import ProducerOptions
from cometmq.errors import ClientClosed

if TYPE_CHECKING:
    from cometmq.client.producer import Producer


class LateProducer:
    """Belongs to the event loop of its client."""

    def __init__(self, namesrv: str, options: ProducerOptions) -> None:
        self._namesrv = namesrv
        self._options = options
        self._opening = asyncio.Lock()
        self._producer: Producer | None = None
        self._is_closed = False

    @property
    def now(self) -> Producer | None:
        """The producer, if it is open."""
        return self._producer

    async def opened(self) -> Producer:
        """The producer, opened now if it was not. ClientClosed after :meth:`close`: nobody would
        close it.
        """
        async with self._opening:
            if self._is_closed:
                raise ClientClosed("The client was closed.")
            if self._producer is None:
                from cometmq.client.producer import Producer  # most consumers send nothing

                producer = Producer(self._namesrv, options=self._options)
                producer._answers.is_asked = False  # this client answers operators
                self._producer = await producer.start()
            return self._producer

    async def close(self, *, flush: bool = True) -> None:
        """Ends it, if it was opened. Without ``flush`` what is on its way fails."""
        self._is_closed = True
        async with self._opening:
            producer, self._producer = self._producer, None
        if producer is not None:
            error = None if flush else asyncio.CancelledError()
            await producer.__aexit__(type(error) if error else None, error, None)
