"""What the listener writes is what the job reads, and it stops when it is told to."""

from __future__ import annotations

import asyncio
from io import BytesIO
from types import SimpleNamespace

from examples.roundtrip.consuming import Spooler
from examples.roundtrip.spool import unpack


def message(number: int) -> SimpleNamespace:
    return SimpleNamespace(
        properties={"file": "a.py", "line": str(number)},
        body=b"x\n",
        born_time_ms=number,
        store_time_ms=number + 10,
        queue=SimpleNamespace(broker_group="g1", queue_id=3),
        queue_offset=number + 100,
    )


async def test_messages_go_to_the_spool_in_order() -> None:
    file = BytesIO()
    spooler = Spooler(file)
    await spooler([message(1), message(2)])  # type: ignore[list-item]  # it asks no more of it
    arrivals, used = unpack(file.getvalue())
    assert [(a.name, a.line_number, a.body, a.born_ms, a.stored_ms) for a in arrivals] == [
        ("a.py", 1, b"x\n", 1, 11),
        ("a.py", 2, b"x\n", 2, 12),
    ]
    assert {arrival.broker_group for arrival in arrivals} == {"g1"}
    assert [(a.queue_id, a.queue_offset) for a in arrivals] == [(3, 101), (3, 102)]
    assert used == len(file.getvalue())
    assert spooler.received == 2


async def test_held_back_it_does_nothing_and_then_goes_on() -> None:
    file = BytesIO()
    spooler = Spooler(file)
    spooler.going.clear()
    call = asyncio.create_task(spooler([message(1)]))  # type: ignore[list-item]
    await asyncio.sleep(0)
    assert (spooler.received, file.getvalue()) == (0, b"")
    spooler.going.set()
    await call
    assert spooler.received == 1
