"""Who is in which consumer group: one open stream is one member, and hears of every change of
its group.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from cometmq.errors import ClientIdInUse, InvalidRequest
from cometmq.messaging.groups import NO_DETAILS, MemberDetails, Membership, MemberTable
from cometmq.model import Subscription

# Where a group's settings say so, members hear of each other only so often: well within the time
# that a client waits for a queue to be handed over.
NOTICE_S = 3.0


class Groups:
    """The live members of all groups, and the streams that hold them. Belongs to the event loop.
    ``is_notified``: whether a group's members hear at once of each other.
    """

    def __init__(
        self, table: MemberTable, is_notified: Callable[[str], bool] = lambda _group: True
    ) -> None:
        self.table = table
        self._is_notified = is_notified
        self._notices: dict[str, asyncio.TimerHandle] = {}  # by group, due soon
        self._numbers = itertools.count(1)
        self._streams: defaultdict[str, set[MemberStream]] = defaultdict(set)

    def __len__(self) -> int:
        """Streams open now."""
        # Asked by the metrics' thread too: the list is made in one step, a loop is not.
        return sum(map(len, list(self._streams.values())))

    def join(
        self,
        group: str,
        client_id: str,
        subscriptions: Sequence[Subscription],
        details: MemberDetails = NO_DETAILS,
    ) -> MemberStream:
        """A new stream of a client. Raises what ``MemberTable.put`` raises."""
        stream = MemberStream(self, group, client_id, next(self._numbers), details.instance_id)
        stream.subscribe(group, client_id, subscriptions, details)
        self._streams[group].add(stream)
        return stream

    def changed(self, group: str) -> None:
        """Tell all members of a group who is in it: now or, where its settings say so, soon."""
        if self._is_notified(group):
            self._wake(group)
        elif group not in self._notices:
            loop = asyncio.get_running_loop()
            self._notices[group] = loop.call_later(NOTICE_S, self._wake, group)

    def _wake(self, group: str) -> None:
        if notice := self._notices.pop(group, None):
            notice.cancel()
        for stream in self._streams.get(group, ()):
            stream.wake()

    def tell(self, group: str) -> None:
        """Tell all members of a group that it was reset, or has other settings."""
        self.table.touch(group)
        self._wake(group)

    def left(self, stream: MemberStream) -> None:
        """The stream has ended."""
        streams = self._streams[stream.group]
        assert stream in streams, "a stream ends once"
        streams.remove(stream)
        if not streams:
            del self._streams[stream.group]
        if self.table.leave(stream.group, stream.client_id, stream.number) is not None:
            self.changed(stream.group)


class MemberStream:
    """One client's membership in one group, as long as its stream is open."""

    def __init__(
        self, groups: Groups, group: str, client_id: str, number: int, instance_id: str
    ) -> None:
        self._instance_id = instance_id
        self.group = group
        self.client_id = client_id
        self.number = number
        self._groups = groups
        self._look_again = asyncio.Event()
        self._look_again.set()
        self._ended = False

    def subscribe(
        self,
        group: str,
        client_id: str,
        subscriptions: Sequence[Subscription],
        details: MemberDetails = NO_DETAILS,
    ) -> None:
        """Join, or replace what the client reads and tells."""
        if (group, client_id) != (self.group, self.client_id):
            raise InvalidRequest("group and client_id stay the same for the whole stream")
        self._groups.table.put(group, client_id, self.number, subscriptions, details)
        self._groups.changed(group)

    def wake(self) -> None:
        """The group may have changed."""
        self._look_again.set()

    def end(self) -> None:
        """No more requests come: :meth:`views` ends."""
        self._ended = True
        self._look_again.set()

    async def views(self) -> AsyncIterator[Membership]:
        """The group now and after each change; changes in between are not queued up. Ends when a
        newer stream of the same client has taken over. Raises ClientIdInUse when another client of
        the same name has.
        """
        version = -1
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            view = self._groups.table.view(self.group)
            mine = next((m for m in view.members if m.client_id == self.client_id), None)
            if self._ended or mine is None:
                return
            if mine.stream != self.number:
                self._check_same(mine.details.instance_id)
                return
            assert view.version >= version, "the versions of a group only grow"
            if view.version != version:
                version = view.version
                yield view

    def _check_same(self, instance_id: str) -> None:
        if self._instance_id and instance_id and instance_id != self._instance_id:
            raise ClientIdInUse(
                f"another client has joined group {self.group} as {self.client_id}: this one is "
                "no member any more"
            )

    def leave(self) -> None:
        """The stream is over; its member is gone with it."""
        self._groups.left(self)
