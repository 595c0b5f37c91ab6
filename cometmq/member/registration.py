"""How a member makes itself known to the name servers (`rocketmq-facts` §3.2): with its topics, at
start, on every change, and every 30 s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cometmq.errors import StaleEpoch
from cometmq.rpc import registrar
from cometmq.rpc.interceptors import wire_errors
from cometmq.v1 import namesrv_pb2, namesrv_pb2_grpc

REGISTER_DEADLINE_S = 6.0
UNREGISTER_DEADLINE_S = 3.0


async def _try_again(error: StaleEpoch) -> None:
    pass


class Registrar(registrar.Registrar):
    """Keeps a member registered. ``describe()`` gives the registration as it stands now; None:
    there is nothing to tell yet.

    A name server may know a newer epoch. ``run`` ends with StaleEpoch then if ``stale_ends``; else
    ``overtaken`` is told, whose exceptions end it, and it tries again: a follower hears of the
    newer writer in a moment.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        describe: Callable[[], namesrv_pb2.RegisterMemberRequest | None],
        period_s: float,
        *,
        stale_ends: bool = True,
        overtaken: Callable[[StaleEpoch], Awaitable[None]] = _try_again,
    ) -> None:
        async def register(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
            request = describe()
            if request is None:
                return
            try:
                with wire_errors():
                    await stub.RegisterMember(request, timeout=REGISTER_DEADLINE_S)
            except StaleEpoch as error:
                await overtaken(error)
                raise

        async def unregister(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
            known = describe()
            if known is None:
                return
            member = known.member
            request = namesrv_pb2.UnregisterMemberRequest(
                cluster=member.cluster,
                broker_group=member.broker_group,
                member_id=member.member_id,
                epoch=member.epoch,
            )
            await stub.UnregisterMember(request, timeout=UNREGISTER_DEADLINE_S)

        fatal = (StaleEpoch,) if stale_ends else ()
        super().__init__(addresses, register, unregister, period_s, fatal=fatal)
