"""Questions of operators to running clients: what they do now, and to consume a message."""

from __future__ import annotations

from cometmq.member.hosts import BrokerIdentity
from cometmq.member.read.reader import Reader
from cometmq.messaging.groups import check_name
from cometmq.names import check_client_id
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, common_pb2
from services.broker.groups.clients import Client, ClientList
from services.broker.groups.questions import Description, Questions, Result

_log = logger(__name__)


class LiveClients:
    """Belongs to the event loop."""

    def __init__(
        self, identity: BrokerIdentity, clients: ClientList, questions: Questions, reader: Reader
    ) -> None:
        self._identity = identity
        self._clients = clients
        self._questions = questions
        self._reader = reader

    async def describe(
        self, group: str, client_id: str, timeout_ms: int, *, with_stacks: bool
    ) -> tuple[Client, Description]:
        """A member of a group, or a producer (``group`` empty): what the broker knows, and what the
        client says. Raises GroupNameInvalid, InvalidRequest, ClientNotFound, and what
        :class:`Questions` raises.
        """
        if group:
            check_name(group)
        check_client_id(client_id)
        client, questioned = self._clients.find(group, client_id)
        said = await self._questions.describe(questioned, timeout_ms, with_stacks=with_stacks)
        return client, said

    async def verify(self, group: str, client_id: str, message_id: str, timeout_ms: int) -> Result:
        """Lets a member's listener consume a message of this broker group. Raises as
        :meth:`describe`; MessageIdInvalid, MessageNotFound, StoreDamaged.
        """
        check_name(group)
        check_client_id(client_id)
        log_offset = self._identity.log_offset_of(message_id)
        raw, found = await self._reader.raw_message(log_offset)
        _, questioned = self._clients.find(group, client_id)
        queue = common_pb2.QueueRef(topic=found.topic, queue_id=found.queue_id)
        asked = broker_pb2.ConsumeQuestion(queue=queue, record=raw)
        about = fields(group=group, client=client_id, id=message_id)
        _log.info("a client is to consume a message", extra=about)
        return await self._questions.consume(questioned, timeout_ms, asked)
