"""How far back this writer knows requests that come a second time: what clients rely on."""

from __future__ import annotations

from cometmq.messaging import dedup, sent_ids
from cometmq.messaging.retry import ATTEMPTS_KNOWN_MAX
from cometmq.v1 import broker_pb2
from services.broker.pop import acks, receive

# Of one stream; beyond it the broker stops reading, and HTTP/2 makes the producer wait. A batch is
# known as long as its sender may wait for the answer.
BATCHES_IN_FLIGHT_MAX = dedup.RUNS_MAX


def request_memory(*, dedup_enable: bool) -> broker_pb2.RequestMemory:
    """The numbers as clients get them; those of sends are 0 where nothing is compared."""
    memory = broker_pb2.RequestMemory(
        batches_in_flight_max=BATCHES_IN_FLIGHT_MAX,
        send_backs_max=ATTEMPTS_KNOWN_MAX,
        receives_max=receive.REPEATS_MAX,
        invisible_time_changes_max=acks.REPEATS_MAX,
    )
    if dedup_enable:
        memory.batches_max = dedup.RUNS_MAX
        memory.sender_ms = round(dedup.IDLE_S_MAX * 1000)
        memory.senders_max = dedup.STREAMS_MAX
        memory.ids_per_client_max = sent_ids.IDS_PER_CLIENT_MAX
        memory.id_ms = round(sent_ids.KEPT_S * 1000)
        memory.ids_max = sent_ids.IDS_MAX
    return memory
