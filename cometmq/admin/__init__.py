"""Operating a cluster: :mod:`.ops` holds the functions, :mod:`.cli` the ``cometmq`` command."""

from __future__ import annotations

from cometmq.rpc.forks import leave_forks_alone

leave_forks_alone()
