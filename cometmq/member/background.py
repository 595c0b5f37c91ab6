"""Which errors of background work end the role of a member: retention and exports go on after
others, the log, the state, the lease and the index of timers do not.
"""

from __future__ import annotations

from cometmq.errors import StoreFailed
from cometmq.member.lease.lease_holder import Deposed

_ENDS_THE_ROLE = (StoreFailed, Deposed)


def ends_the_role(error: Exception) -> bool:
    """Whether no work of this role may go on: the disk has failed, or another member writes."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(_ENDS_THE_ROLE) is not None
    return isinstance(error, _ENDS_THE_ROLE)
