"""Which batches of a send stream may be stored when one before them was refused. Pure.

A producer has several batches on their way. When one of those that are in order is refused, those
behind it are refused too, until the producer shows that it knows of the refusal. So what it sends
again comes before what it sent later.
"""

from __future__ import annotations

from cometmq.errors import BatchOutOfOrder


class SendOrder:
    """Of one stream. ``refused_id``: the newest batch in order that was refused, or stored in part;
    0 = none.
    """

    __slots__ = ("refused_id",)

    def __init__(self) -> None:
        self.refused_id = 0

    def check(self, known_id: int) -> None:
        """``known_id``: the newest refused batch that the sender of a batch in order knows of.
        Raises BatchOutOfOrder.
        """
        if known_id < self.refused_id:
            raise BatchOutOfOrder(f"batch {self.refused_id} was refused, and was to come before")

    def refused(self, batch_id: int) -> None:
        """A batch in order, not behind a refused one, was not stored whole."""
        assert batch_id > self.refused_id
        self.refused_id = batch_id
