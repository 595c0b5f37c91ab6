"""What the writer does for consumers besides reading: groups on demand, committed offsets,
progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import GroupNotFound
from cometmq.member.advising import Adviser
from cometmq.member.progress import GroupReads
from cometmq.member.reading import Reader
from cometmq.member.statekeeper import StateKeeper
from cometmq.member.storage import MemberStorage
from cometmq.messaging.groups import GroupSettings, check_name
from cometmq.model import Position, Subscription
from services.broker.membership import Groups, MemberStream


class Consuming(GroupReads):
    """Groups and their offsets. Belongs to the event loop."""

    def __init__(
        self,
        keeper: StateKeeper,
        storage: MemberStorage,
        reader: Reader,
        groups: Groups,
        adviser: Adviser,
        *,
        auto_create_groups: bool,
    ) -> None:
        super().__init__(keeper.state, reader, groups.table, adviser)
        self._keeper = keeper
        self._storage = storage
        self._groups = groups
        self._auto_create_groups = auto_create_groups

    async def ensure_group(self, name: str) -> None:
        """Create a missing group. Raises GroupNameInvalid, GroupNotFound (not allowed here)."""
        if not self._is_there(name):
            await self._keeper.put_group(GroupSettings(name))

    def _is_there(self, group: str) -> bool:
        """False: it may be created."""
        if group in self._state.groups:
            return True
        check_name(group)
        if not self._auto_create_groups:
            raise GroupNotFound(f"there is no consumer group {group} here")
        return False

    def check_open(self) -> None:
        """Raises BrokerDraining while no commit is taken."""
        self._storage.check_open()

    async def join(
        self, group: str, client_id: str, subscriptions: Sequence[Subscription]
    ) -> MemberStream:
        """Let a client into a group, as long as the stream lives. A client that is refused leaves
        no group behind.
        """
        self._is_there(group)
        stream = self._groups.join(group, client_id, subscriptions)
        try:
            await self.ensure_group(group)
        except BaseException:
            stream.leave()
            raise
        return stream

    def commit(self, group: str, topic: str, queue_id: int, position: Position) -> Position:
        """Take one commit; the position that is kept. Raises TopicNotFound, QueueNotFound, and
        what the offset table raises.
        """
        self.check_open()
        view = self._reader.queue(topic, queue_id)
        history = self._state.generations.of(topic, queue_id)
        key = (topic, queue_id)
        return self._state.offsets.commit(group, key, position, history, view.max_offset)
