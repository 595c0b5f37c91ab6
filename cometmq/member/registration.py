"""How a member makes itself known to the name servers: with its topics, at start, on
every change, and every 30 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from cometmq.member.clocks import Clocks
from cometmq.rpc import registrar
from cometmq.rpc.secret import SharedSecret
from cometmq.v1 import namesrv_pb2, namesrv_pb2_grpc

REGISTER_DEADLINE_S = 6.0
UNREGISTER_DEADLINE_S = 3.0


class Registrar(registrar.Registrar):
    """Keeps a member registered. ``describe()`` gives the registration as it is now; None:
    there is nothing to register yet.

    ``clocks`` compares the clocks of name servers with this machine's.

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
        clocks: Clocks | None = None,
    ) -> None:
        assert period_s > 0, period_s

        async def register(
            stub: namesrv_pb2_grpc.NameServiceAsyncStub,
        ) -> namesrv_pb2.RegisterMemberResponse | bool:
            request = describe()
            if request is None:
                return False
            return await stub.RegisterMember(request, timeout=REGISTER_DEADLINE_S)

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
            addresses,
            register,
            unregister,
            watch,
            period_s,
            secret=secret,
            overtaken=overtaken,
            answered=None if clocks is None else partial(_compare, clocks),
        )


def _compare(clocks: Clocks, address: str, answer: object, asked_s: float) -> None:
    """Compares the clock of a name server that has answered with this machine's."""
    assert isinstance(answer, namesrv_pb2.RegisterMemberResponse), answer
    if answer.HasField("now_ms"):
        clocks.note(f"namesrv {address}", int(asked_s * 1000), answer.now_ms)
