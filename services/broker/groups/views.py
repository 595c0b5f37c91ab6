"""How a group looks on the wire: packed once for all its members."""

from __future__ import annotations

from collections import OrderedDict

from cometmq.member.rpc import convert
from cometmq.messaging.groups import Membership
from cometmq.v1 import broker_pb2

VIEWS_KEPT_MAX = 64  # of groups that change now; others need none


class GroupViews:
    """Serialized ``JoinGroupResponse``s, the newest of each group."""

    def __init__(self) -> None:
        self._packed: OrderedDict[str, tuple[tuple[object, ...], bytes]] = OrderedDict()

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
        if known is not None and known[0] == key:
            return known[1]
        data = broker_pb2.JoinGroupResponse(
            version=view.version,
            members=convert.members_proto(view),
            consume_disabled=consume_disabled,
            reset_number=reset_number,
            retry_times_max=retry_times_max,
        ).SerializeToString()
        self._packed[group] = key, data
        self._packed.move_to_end(group)
        if len(self._packed) > VIEWS_KEPT_MAX:
            self._packed.popitem(last=False)
        return data
