"""The flight recorder: what this process did in the last seconds, in a ring of fixed size.

A stage that ends writes one entry, from any thread, in a fraction of a microsecond. Times are of
CLOCK_MONOTONIC, so the rings of all processes of a machine line up. There is one ring in a process,
as there is one interpreter and one collector. When something took longer than a limit, or at a
signal, the ring is kept as it is and the log names its longest stages. Both the ring and what was
kept are served beside the metrics.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cometmq.clock import monotonic_ns
from cometmq.errors import ConfigInvalid
from cometmq.telemetry import fields

TRACE_PATH = "/trace"  # beside the metrics
ENTRIES_VARIABLE = "COMETMQ_TRACE_ENTRIES"  # of the environment
ENTRIES_DEFAULT = 8192  # some seconds of a busy process
ENTRIES_MAX = 2**20  # some 200 MiB
KEPT_EVERY_NS = 10_000_000_000  # a burst of late stages keeps the ring once
NAMED_IN_LOG = 5
RECENT_NS = 2_000_000_000  # what began since then is named
THREAD_NAME_LENGTH_MAX = 15  # Linux

_QUEUE_SHIFT = 40

_log = logging.getLogger(__name__)


class Stage(IntEnum):
    """What an entry is about, and what its number means."""

    LOOP_TURN = 1  # gRPC woke the event loop, up to the end of all that this made ready
    TIMER_LATE = 2  # a timer fired so much late: the loop or the machine was busy
    GC_PAUSE = 3  # number: the generation
    APPEND = 4  # a batch went into the log; number: the log offset of its end
    FLUSH = 5  # a sync of the log; number: the log offset up to which it is on disk
    ARRIVAL = 6  # a queue's end goes to a pull-hold; number: :func:`queue_end`
    HOLD_ANSWERED = 7  # from the arrival until the answer was ready; number: :func:`queue_end`
    GRPC_WRITE = 8  # a message of a stream, until gRPC took it; number: its bytes
    FILE_GROWTH = 9  # the next log file was built
    QUEUE_FLUSH = 10  # the queue files were synced
    THREAD_WAIT = 11  # from the request for a sync until the flush thread began it
    STATE_SNAPSHOT = 12  # a snapshot of the state was written to the log


class Entry(NamedTuple):
    """``begin_ns``: CLOCK_MONOTONIC."""

    stage: Stage
    begin_ns: int
    duration_ns: int
    number: int

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.duration_ns


def queue_end(queue_id: int, offset: int) -> int:
    """The number of an entry about a queue: its id, and one more than the last message's offset."""
    return (queue_id << _QUEUE_SHIFT) | offset


def entry_count(environment: Mapping[str, str]) -> int:
    """How many stages a ring holds. ConfigInvalid."""
    text = environment.get(ENTRIES_VARIABLE) or str(ENTRIES_DEFAULT)
    count = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= count <= ENTRIES_MAX or count & (count - 1):
        raise ConfigInvalid(
            f"{ENTRIES_VARIABLE}={text[:30]}: give a power of two, {ENTRIES_MAX:,} at most"
        )
    return count


Ring: TypeAlias = "list[tuple[int, int, int, int] | None]"  # as Entry; None: not used yet


class FlightRecorder:
    """The ring. ``limit_ms``: a loop turn or a message that takes longer keeps the ring; 0 = none
    does.
    """

    note: Callable[..., None]
    """``note(stage, begin_ns, number=0)``: the stage began then and ends now. From any thread."""

    def __init__(
        self, now_ns: Callable[[], int] = monotonic_ns, count: int = ENTRIES_DEFAULT
    ) -> None:
        self.limit_ms = 0
        self.now_ns = now_ns
        self._ring: Ring = [None] * count
        self.note = _noting(self._ring, now_ns)
        self._kept: Ring = []
        self._kept_ns = -KEPT_EVERY_NS
        self._collection_ns = 0

    def note_limited(self, stage: Stage, begin_ns: int, number: int = 0) -> None:
        """As :attr:`note`, for what is compared with the limit."""
        self.note(stage, begin_ns, number)
        limit_ms, now_ns = self.limit_ms, self.now_ns()
        if not limit_ms or now_ns - begin_ns <= limit_ms * 1_000_000:
            return
        if now_ns - self._kept_ns >= KEPT_EVERY_NS:
            self.keep(f"{stage.name.lower()} took longer than {self.limit_ms} ms")

    def keep(self, why: str) -> None:
        """Keeps the ring as it is now, in the place of what was kept before, and logs its longest
        stages of the last seconds.
        """
        now_ns = self.now_ns()
        self._kept_ns, self._kept = now_ns, list(self._ring)
        recent = (one for one in self._kept if one is not None and now_ns - one[1] < RECENT_NS)
        longest = map(_entry, heapq.nlargest(NAMED_IN_LOG, recent, key=itemgetter(2)))
        shown = [f"{one.stage.name.lower()} {one.duration_ns / 1e6:.1f} ms" for one in longest]
        _log.warning("flight recorder kept", extra=fields(why=why, longest=", ".join(shown)))

    def entries(self) -> list[Entry]:
        """The stages in the ring, in the order of their ends."""
        return _in_order(self._ring)

    def as_json(self, longer_than_ms: int = 0) -> str:
        """``entries`` and ``kept``: lists of [stage, begin_ns, duration_ns, number], without stages
        that took less. To look often without holding the process up, ask for long ones only.
        """
        least_ns = longer_than_ms * 1_000_000
        return json.dumps(
            {
                "entries": _rows(_in_order(self._ring, least_ns)),
                "kept": _rows(_in_order(self._kept, least_ns)),
                "pid": os.getpid(),
            }
        )

    def watch_collector(self) -> None:
        """Notes every pause of the garbage collector from now on."""
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_ns = self.now_ns()
        else:
            self.note(Stage.GC_PAUSE, self._collection_ns, info["generation"])


def _noting(ring: Ring, now_ns: Callable[[], int]) -> Callable[..., None]:
    """A closure costs half of what a method does."""
    mask, following = len(ring) - 1, itertools.count().__next__  # one step: no thread comes between

    def note(stage: int, begin_ns: int, number: int = 0) -> None:
        ring[following() & mask] = (stage, begin_ns, now_ns() - begin_ns, number)

    return note


def _entry(noted: tuple[int, int, int, int]) -> Entry:
    return Entry(Stage(noted[0]), *noted[1:])


def _in_order(ring: Ring, least_ns: int = 0) -> list[Entry]:
    found = [one for one in list(ring) if one is not None and one[2] >= least_ns]
    return sorted(map(_entry, found), key=lambda one: one.end_ns)


def _rows(some: Iterable[Entry]) -> list[tuple[str, int, int, int]]:
    return [(one.stage.name.lower(), *one[1:]) for one in some]


def parse(text: str) -> tuple[list[Entry], list[Entry]]:
    """``entries`` and ``kept`` of :meth:`FlightRecorder.as_json`, without stages of a newer
    release.
    """
    found = json.loads(text)
    return _entries(found["entries"]), _entries(found["kept"])


def _entries(rows: Iterable[tuple[str, int, int, int]]) -> list[Entry]:
    known = Stage.__members__
    return [Entry(known[name.upper()], *rest) for name, *rest in rows if name.upper() in known]


def name_thread(name: str) -> None:
    """Gives the calling thread its name for the kernel, as ``top -H`` shows it."""
    _rename(threading.get_native_id(), name)


def named_threads(name: str, count: int = 1) -> ThreadPoolExecutor:
    """An executor whose threads have that name."""
    return ThreadPoolExecutor(count, name, initializer=name_thread, initargs=(name,))


def name_threads() -> None:
    """The same for every thread that Python knows but the main one, whose name is the program's."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            _rename(thread.native_id, _NAMES.get(thread.name.partition("(")[2], thread.name))


_NAMES = {"_poll_wrapper)": "grpc-poller"}


def _rename(thread_id: int, name: str) -> None:
    with suppress(OSError):  # not Linux, or the thread has just ended
        Path(f"/proc/self/task/{thread_id}/comm").write_text(name[:THREAD_NAME_LENGTH_MAX])


recorder = FlightRecorder(count=entry_count(os.environ))
