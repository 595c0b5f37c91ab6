"""How a queue goes from one member to another without two readers: a member announces that it
is about to read a queue, and begins once no other member announces it.

The broker passes on what members tell in one order. Of two that tell at the same time the later one
sees both, and only the one to which the queue is allocated keeps to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cometmq.client.group.membership import KnownMember
from cometmq.model import QueueRef


class Handover:
    """``timeout_s``: after so long a queue is begun although another member announces that it reads
    it.
    """

    def __init__(self, client_id: str, instance_id: str, timeout_s: float) -> None:
        self._client_id = client_id
        self._instance_id = instance_id
        self._timeout_s = timeout_s
        self._awaited_s: dict[QueueRef, float] = {}  # queues to begin, since when

    @property
    def awaited(self) -> Collection[QueueRef]:
        """Queues that are allocated to this client and not begun."""
        return self._awaited_s.keys()

    def want(self, queues: Collection[QueueRef], now_s: float) -> None:
        """These queues are to be begun, and no others."""
        self._awaited_s = {queue: self._awaited_s.get(queue, now_s) for queue in queues}

    def may_begin(self, queue: QueueRef, members: Mapping[str, KnownMember], now_s: float) -> bool:
        """Whether no other of the topic's members reads the queue, or has done so for too long."""
        if now_s - self._awaited_s[queue] >= self._timeout_s:
            return True
        me = members.get(self._client_id)
        if me is None or me.instance_id != self._instance_id:
            return me is not None  # its broker passes nothing on
        others = (
            member
            for client, member in members.items()
            if client != self._client_id and not member.is_away
        )
        return queue in me.held and not any(queue in other.held for other in others)

    def begun(self, queues: Collection[QueueRef]) -> None:
        """These queues are read now."""
        for queue in queues:
            self._awaited_s.pop(queue, None)
