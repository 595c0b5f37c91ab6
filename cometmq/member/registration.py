"""How a member makes itself known to the name servers: with its topics, at start, on
every change, and every 30 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cometmq.rpc import registrar
from cometmq.rpc.secret import SharedSecret
from cometmq.v1 import namesrv_pb2, namesrv_pb2_grpc

REGISTER_DEADLINE_S = 6.0
UNREGISTER_DEADLINE_S = 3.0


class Registrar(registrar.Registrar):
    """Keeps a member registered. ``describe()`` gives the registration as it is now; None:
    there is nothing to register yet.

    A name server may know a newer epoch: ``overtaken`` gets the error, and the registration is
    tried again. A follower learns of the newer writer in a moment.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        describe: Callable[[], namesrv_pb2.RegisterMemberRequest | None],
        period_s: float,
        *,
        secret: SharedSecret | None = None,
        overtaken: registrar.Overtaken | None = None,
    ) -> None:
        assert period_s > 0, period_s

        async def register(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> bool:
            request = describe()
            if request is not None:
                await stub.RegisterMember(request, timeout=REGISTER_DEADLINE_S)
            return request is not None

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
                store_id=known.store_id,
            )
            await stub.UnregisterMember(request, timeout=UNREGISTER_DEADLINE_S)

        async def watch(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
            registration = describe()
            if registration is None:
                await asyncio.Event().wait()
                return
            request = namesrv_pb2.WatchRegistrationRequest(
                cluster=registration.member.cluster,
                broker_group=registration.member.broker_group,
                member_id=registration.member.member_id,
            )
            async for now in stub.WatchRegistration(request):
                if now.member != registration.member:
                    return

        super().__init__(
            addresses, register, unregister, watch, period_s, secret=secret, overtaken=overtaken
        )
