"""What a process's flight recorder has, over the port of its metrics."""

from __future__ import annotations

import http.client

from cometmq.admin.views import TraceEntryView
from cometmq.errors import InvalidRequest, PeerUnavailable
from cometmq.flight_recorder import TRACE_PATH, Entry, parse
from cometmq.rpc.addresses import split_address

TIMEOUT_S = 10.0


def read(address: str, *, kept: bool, longer_than_ms: float) -> list[TraceEntryView]:
    """The stages that took at least so long, in the order of their begin: of the last seconds, or
    of the ring that was kept. Blocking. ConfigInvalid, PeerUnavailable; InvalidRequest: no process
    of this cluster serves there.
    """
    now, before = parse_answer(address, int(longer_than_ms))
    found = [one for one in (before if kept else now) if one.duration_ns >= longer_than_ms * 1e6]
    return [_view(one) for one in sorted(found, key=lambda one: one.begin_ns)]


def parse_answer(address: str, longer_than_ms: int = 0) -> tuple[list[Entry], list[Entry]]:
    """The ring as it is now, and as it was kept, without the stages that took less."""
    connection = http.client.HTTPConnection(*split_address(address), timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{TRACE_PATH}?longer_than_ms={longer_than_ms}")
        return parse(connection.getresponse().read().decode())
    except (OSError, http.client.HTTPException) as error:
        raise PeerUnavailable(f"{address}: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{address} is not the metrics_port of a process of CometMQ") from None
    finally:
        connection.close()


def _view(entry: Entry) -> TraceEntryView:
    return TraceEntryView(
        entry.stage.name.lower(), entry.begin_ns / 1e6, entry.duration_ns / 1e6, entry.number
    )
