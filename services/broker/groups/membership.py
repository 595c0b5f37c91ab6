"""The members of consumer groups: one open stream is one member, and gets every change of its
group. A static member stays for its session after its stream has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cometmq.errors import ClientIdInUse, InvalidRequest
from cometmq.messaging.groups import NO_DETAILS, MemberDetails, Membership, MemberTable, Stay
from cometmq.model import Subscription
from cometmq.v1 import broker_pb2
from services.broker.groups.notices import Notices
from services.broker.groups.questions import Questioned

# Where a group's settings say so, members are notified of each other only so often: within the time
# that a client waits for a queue to be handed over.
NOTICE_S = 3.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a client's stream comes from: its network address, and the program that the client
    names.
    """

    address: str = ""  # host:port
    agent: str = ""
    since_ms: int = 0

    @property
    def host(self) -> str:
        """Its address without the port."""
        return self.address.rpartition(":")[0] or self.address


NOWHERE = Origin()
NOBODY = Membership(0, ())


class Groups:
    """The members of all groups, and the streams that hold them. Belongs to the event loop.
    ``is_notified``: whether a group's members learn of each other at once. ``forgotten`` gets the
    origin of a member that was away and is no longer kept.
    """

    def __init__(
        self,
        table: MemberTable,
        is_notified: Callable[[str], bool] = lambda _group: True,
        forgotten: Callable[[Origin], None] = lambda _origin: None,
    ) -> None:
        self.table = table
        self._is_notified = is_notified
        self._forgotten = forgotten
        self._numbers = itertools.count(1)
        self._streams: defaultdict[str, set[MemberStream]] = defaultdict(set)
        self._newest: dict[tuple[str, str], MemberStream] = {}  # by group and client id
        self._away: dict[str, dict[str, Origin]] = {}  # by group and client id
        self._notices = Notices(self._told)
        self._is_ending = False
        self._session_timer: asyncio.TimerHandle | None = None

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
        origin: Origin = NOWHERE,
        known_questions: Iterable[int] = (),
    ) -> MemberStream:
        """A new stream of a client, which can be asked ``known_questions`` from now on. Raises what
        ``MemberTable.put`` raises.
        """
        number = next(self._numbers)
        stream = MemberStream(self, group, client_id, number, details, origin, known_questions)
        stream.subscribe(group, client_id, subscriptions, details)
        self._streams[group].add(stream)
        if (before := self._newest.get((group, client_id))) is not None:
            before.wake()  # its client is here now
        self._newest[group, client_id] = stream
        self._forget(group, client_id)
        if self._is_ending:
            stream.end()
        return stream

    def end(self) -> None:
        """End all streams, and those that still come."""
        self._is_ending = True
        for streams in self._streams.values():
            for stream in streams:
                stream.end()

    def origins(self, group: str) -> Iterator[tuple[str, Origin]]:
        """Client id and origin of each member, those that are away included."""
        yield from self._away.get(group, {}).items()
        for stream in self._streams.get(group, ()):
            member = self.table.member(group, stream.client_id)
            if member is not None and member.stream == stream.number:
                yield stream.client_id, stream.origin

    def stays(self, group: str) -> list[Stay]:
        """For how long its members have been there, or away."""
        return self.table.stays(group, asyncio.get_running_loop().time())

    def with_away(self) -> list[str]:
        """The groups that have members without a stream."""
        return list(self._away)

    def stream(self, group: str, client_id: str) -> MemberStream | None:
        """The stream of a member; None: there is no such member, or it is away."""
        return self._newest.get((group, client_id))

    def changed(self, group: str) -> None:
        """Send all members of a group the list of members: at once, when many members are being
        told, in their turn, or, where its settings say so, soon.
        """
        if group not in self._streams:
            return
        if self._is_notified(group):
            self._notices.tell(group)
        else:
            self._notices.tell_in(group, NOTICE_S)

    def _told(self, group: str) -> list[MemberStream]:
        return [stream for stream in self._streams.get(group, ()) if not stream.receives]

    def notify(self, group: str) -> None:
        """Notify all members of a group that it was reset, or has other settings."""
        self.table.touch(group)
        self._notices.tell(group)

    def left(self, stream: MemberStream, *, for_good: bool = False) -> bool:
        """The stream has ended. Whether its client stays a member, and is away."""
        group, client_id = stream.group, stream.client_id
        streams = self._streams[group]
        assert stream in streams, "a stream ends once"
        streams.remove(stream)
        if self._newest.get((group, client_id)) is stream:
            del self._newest[group, client_id]
        if not streams:
            del self._streams[group]
        now_s = asyncio.get_running_loop().time()
        if not self.table.leave(group, client_id, stream.number, now_s, for_good=for_good):
            return False
        self.changed(group)
        if not self.table.is_away(group, client_id):
            return False
        self._away.setdefault(group, {})[client_id] = stream.origin
        self._time_sessions()
        return True

    def remove_away(self, group: str, client_ids: Iterable[str]) -> list[str]:
        """Ends the sessions of members without a stream before their time; those of the ids that
        were some. A client that comes back joins again as a new member.
        """
        removed = [one for one in client_ids if self.table.remove_away(group, one)]
        for client_id in removed:
            self._forget(group, client_id)
        if removed:
            self.changed(group)
        return removed

    def _time_sessions(self) -> None:
        """Look again when the next session ends."""
        at_s = self.table.next_session_s
        if at_s is not None and self._session_timer is None:
            self._session_timer = asyncio.get_running_loop().call_at(at_s, self._end_sessions)

    def _end_sessions(self) -> None:
        self._session_timer = None
        for group, client_id in self.table.end_sessions(asyncio.get_running_loop().time()):
            self._forget(group, client_id)
            self.changed(group)
        self._time_sessions()

    def _forget(self, group: str, client_id: str) -> None:
        """The member is no longer kept as away."""
        away = self._away.get(group, {})
        if (origin := away.pop(client_id, None)) is not None:
            if not away:
                del self._away[group]
            self._forgotten(origin)


class MemberStream:
    """One client's membership in one group, as long as its stream is open."""

    def __init__(
        self,
        groups: Groups,
        group: str,
        client_id: str,
        number: int,
        details: MemberDetails,
        origin: Origin,
        known_questions: Iterable[int],
    ) -> None:
        self._instance_id = details.instance_id
        self.receives = details.receives
        self.group = group
        self.client_id = client_id
        self.number = number
        self.origin = origin
        self.questioned = Questioned(self.wake, client_id, known_questions)
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
        """Join, or replace what the client has sent: what it reads, and its details."""
        if (group, client_id) != (self.group, self.client_id):
            raise InvalidRequest("group and client_id stay the same for the whole stream")
        if details.instance_id != self._instance_id:
            raise InvalidRequest("instance_id stays the same for the whole stream")
        if details.receives != self.receives:
            raise InvalidRequest("mode stays the same for the whole stream")
        now_s = asyncio.get_running_loop().time()
        self._groups.table.put(
            group, client_id, self.number, subscriptions, details, now_s, self.origin.since_ms
        )
        self._groups.changed(group)

    def wake(self) -> None:
        """The group may have changed, or there is a question."""
        self._look_again.set()

    def end(self) -> None:
        """No more requests come: :meth:`outgoing` ends."""
        self._ended = True
        self._look_again.set()

    async def outgoing(self) -> AsyncIterator[Membership | broker_pb2.ClientQuestion]:
        """The group now and after each change; changes in between are not queued up. A member that
        receives gets one view, without the others. And questions to the client. Ends when a newer
        stream of the same client has taken over. Raises ClientIdInUse when another client of the
        same name has.
        """
        version = -1
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            mine = self._groups.table.member(self.group, self.client_id)
            if self._ended or mine is None:
                return
            if mine.stream != self.number:
                self._check_same(mine.details.instance_id)
                return
            view = NOBODY if self.receives else self._groups.table.view(self.group)
            assert view.version >= version, "the versions of a group only grow"
            if view.version != version:
                version = view.version
                yield view
            while (question := self.questioned.take()) is not None:
                yield question

    def _check_same(self, instance_id: str) -> None:
        if self._instance_id and instance_id and instance_id != self._instance_id:
            raise ClientIdInUse(
                f"another client has joined group {self.group} as {self.client_id}: this one is "
                "no member any more"
            )

    def leave(self, *, for_good: bool = False) -> bool:
        """The stream is over. Whether its client stays a member, and is away."""
        return self._groups.left(self, for_good=for_good)
