"""How a group looks on the wire: packed once for all its members, each member once for all views
that have it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cometmq.member.rpc import convert
from cometmq.messaging.groups import Member, Membership
from cometmq.v1 import broker_pb2

VIEWS_KEPT_MAX = 64  # of groups that change now; others need none


@dataclass(frozen=True, slots=True)
class _Packed:
    """``members``: by client id, each as it was and its bytes."""

    key: tuple[object, ...]
    members: dict[str, tuple[Member, bytes]]
    data: bytes


class GroupViews:
    """Serialized ``JoinGroupResponse``s, the newest of each group."""

    def __init__(self) -> None:
        self._packed: OrderedDict[str, _Packed] = OrderedDict()

    def pack(
        self,
        group: str,
        view: Membership,
        *,
        consume_disabled: bool,
        reset_number: int,
        retry_times_max: int,
    ) -> bytes:
        """The encoded answer with all of this."""
        key = view.version, bool(view.members), consume_disabled, reset_number, retry_times_max
        known = self._packed.get(group)
        if known is not None and known.key == key:
            return known.data
        before = known.members if known is not None else {}
        members = {one.client_id: _packed(one, before.get(one.client_id)) for one in view.members}
        rest = broker_pb2.JoinGroupResponse(
            version=view.version,
            consume_disabled=consume_disabled,
            reset_number=reset_number,
            retry_times_max=retry_times_max,
        ).SerializeToString()
        # A message is the concatenation of its parts.
        data = b"".join([rest, *(encoded for _, encoded in members.values())])
        self._packed[group] = _Packed(key, members, data)
        self._packed.move_to_end(group)
        if len(self._packed) > VIEWS_KEPT_MAX:
            self._packed.popitem(last=False)
        return data


def _packed(member: Member, before: tuple[Member, bytes] | None) -> tuple[Member, bytes]:
    """A member and its part of an answer."""
    if before is not None and before[0] is member:
        return before
    part = broker_pb2.JoinGroupResponse(members=[convert.member_proto(member)])
    return member, part.SerializeToString()
