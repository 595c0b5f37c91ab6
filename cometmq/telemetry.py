"""Log lines and Prometheus metrics of a process.

Log: one line per event, plain or JSON, on standard error. An event is a short constant text; what
varies goes into fields: ``log.info("member registered", extra=fields(group="g1", member=0))``.
Control characters are escaped, so that no name a client chose can forge a line. Applications set up
logging of their own, which shows no fields: the SDK's loggers come from :func:`logger`, and their
lines are complete with every formatter.

Metrics: one registry per process, made by :func:`new_registry` and handed to the parts that count;
nothing is global. Names are RocketMQ 5's where it has one (``rocketmq_…``), else ``cometmq_…``.
Labels never carry what a client chose freely. What names the whole process (cluster, kind, broker
group) is put on every sample as it is served. docs/metrics.md lists all of them.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, TextIO

from cometmq import __version__, native
from cometmq.clock import Clock
from cometmq.errors import CometError

if TYPE_CHECKING:  # slow to import: a process answers health checks before that
    from prometheus_client import CollectorRegistry

    from cometmq.config import LogForm, LogLevel

_DELIVERY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0, 600.0, 3600.0,
)  # fmt: skip
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_ESCAPES |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


def version() -> str:
    """The program's version."""
    return __version__


def escape(text: str) -> str:
    """``text`` with control characters and line separators written as escapes."""
    return text.translate(_ESCAPES)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """What varies in an event, for the ``extra`` of a logging call."""
    return {"fields": values}


def logger(name: str) -> logging.Logger:
    """A logger whose lines have their fields under any handler, ``logging.basicConfig``'s too."""
    found = logging.getLogger(name)
    found.addFilter(_tell_fields)  # once: the same filter is not added twice
    return found


def _tell_fields(record: logging.LogRecord) -> bool:
    """Puts the fields into the text of the event. ``event`` keeps it as it was, for our forms."""
    if hasattr(record, "fields") and not hasattr(record, "event"):
        event = record.getMessage()
        vars(record)["event"] = event
        words = [event, *_words(record.fields)]
        record.msg, record.args = escape(" ".join(words)), ()
    return _LINES.take(record)


class _Lines:
    """Log lines of threads for which applications wait, written by a thread of its own. A handler
    of the application may send its lines as messages: it waits for such a thread, and has the
    lock of the handler, for which the thread would wait with a line of its own.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.forked()

    def forked(self) -> None:
        """In a child: the lines and their thread are the parent's."""
        self._queue: SimpleQueue[logging.LogRecord | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand_over(self) -> None:
        self._local.hands_over = True

    def take(self, record: logging.LogRecord) -> bool:
        """False: the line is taken, and is not to be written by the calling thread."""
        if not getattr(self._local, "hands_over", False):
            return True
        self._put(record)
        return False

    def wait(self, timeout_s: float) -> None:
        """Waits until the lines are written that were taken so far, at most so long."""
        written = threading.Event()
        self._put(written)
        written.wait(timeout_s)

    def _put(self, item: logging.LogRecord | threading.Event) -> None:
        self._queue.put(item)
        if self._thread is None or not self._thread.is_alive():  # a handler's exception ends it
            self._thread = threading.Thread(target=self._write, name="cometmq log", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                logging.getLogger(item.name).handle(item)


_LINES = _Lines()
os.register_at_fork(after_in_child=_LINES.forked)
_OTHERS = ("asyncio", "grpc._cython.cygrpc")  # log in a client's thread, too


def hand_over_lines() -> None:
    """The calling thread's log lines are written by another thread from now on."""
    for name in _OTHERS:
        logging.getLogger(name).addFilter(_LINES.take)
    _LINES.hand_over()


def wait_for_lines(timeout_s: float) -> None:
    """Waits until the lines are written that threads have handed over, at most so long."""
    _LINES.wait(timeout_s)


class OutageLogger:
    """Logs an operation that keeps failing: once when that begins, once when the error is another,
    and once when it succeeds again. ``begins`` and ``ends`` are the log events.
    """

    def __init__(self, log: logging.Logger, level: int, begins: str, ends: str) -> None:
        self._log = log
        self._level = level
        self._begins = begins
        self._ends = ends
        self._last = ""

    def failing(self, error: Exception | str, **values: object) -> None:
        """The operation failed."""
        before, self._last = self._last, str(error) or type(error).__name__
        level = logging.DEBUG if before == self._last else self._level
        self._log.log(level, self._begins, extra=fields(**values, error=error))

    def recovered(self, **values: object) -> None:
        """The operation succeeded."""
        if self._last:
            self._last = ""
            self._log.info(self._ends, extra=fields(**values))


class ThrottledLog:
    """An event that may come any number of times, logged at most once in ``every_s`` of each
    ``key``, with how often it came since the last line.
    """

    KEYS_MAX = 1_000

    def __init__(
        self, log: logging.Logger, level: int, clock: Clock, every_s: float = 60.0
    ) -> None:
        self._log = log
        self._level = level
        self._clock = clock
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}  # key → when, and how often since

    def log(self, event: str, key: str = "", **values: object) -> None:
        now_s = self._clock.monotonic_s()
        logged_s, count = self._last.get(key, (float("-inf"), 0))
        if now_s - logged_s < self._every_s:
            self._last[key] = logged_s, count + 1
            return
        if len(self._last) >= self.KEYS_MAX:
            self._last.clear()
        self._last[key] = now_s, 0
        more = {"more": count} if count else {}
        self._log.log(self._level, event, extra=fields(**values, **more))


def setup_logging(*, level: LogLevel, form: LogForm, stream: TextIO | None = None) -> None:
    """Send all log records to ``stream`` (standard error). Replaces what was set up before."""
    from cometmq.config import LogForm

    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if form is LogForm.JSON else _PlainFormatter())
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.value)


class _Formatter(logging.Formatter):
    """Common to both forms: time in UTC, the fields of an event, a traceback as one field."""

    def time_text(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"

    def event(self, record: logging.LogRecord) -> str:
        return str(getattr(record, "event", None) or record.getMessage())

    def event_fields(self, record: logging.LogRecord) -> dict[str, object]:
        found: dict[str, object] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return found


class _PlainFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        words = [self.time_text(record), f"{record.levelname:<7}", record.name, self.event(record)]
        words += _words(self.event_fields(record))
        return escape(" ".join(words))


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": self.time_text(record),
            "level": record.levelname,
            "logger": record.name,
            "event": self.event(record),
        }
        return json.dumps({**self.event_fields(record), **head}, default=str)


def _words(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def _named(error: BaseException) -> str:
    """With its kind: the text alone of a KeyError, say, is a puzzle."""
    kind = error.name() if isinstance(error, CometError) else type(error).__name__
    return f"{kind}: {error}".removesuffix(": ")


def _shown(value: object) -> str:
    """A field's value; quoted when a blank or a quote would make the line ambiguous."""
    text = _named(value) if isinstance(value, BaseException) else str(value)
    plain = text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


# --- metrics --------------------------------------------------------------------------------------


def new_registry(service: str, clock: Clock) -> CollectorRegistry:
    """The process's registry, with what every service has: build, start time, CPU, memory, GC."""
    from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics
    from prometheus_client.gc_collector import GCCollector
    from prometheus_client.process_collector import ProcessCollector

    # A second series for each counter, which no dashboard uses:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    build = Gauge("cometmq_build_info", "Always 1.", ["service", "version"], registry=registry)
    build.labels(service=service, version=version()).set(1)
    started = Gauge(
        "cometmq_start_time_seconds", "When the process started, Unix time.", registry=registry
    )
    started.set(clock.wall_ms() / 1000)
    accelerated = Gauge(
        "cometmq_native", "Whether the C extension is used, not plain Python.", registry=registry
    )
    accelerated.set(native.accelerator is not None)
    return registry


class DeliveryAge:
    """How old messages are when consumers get them: what a broker and a pullhold answer, each its
    own. The message's store time is the writer's clock, so two machines' clocks are compared.
    """

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        from cometmq.tallies import histogram

        self._clock = clock
        self._seconds = histogram(
            "cometmq_delivery_seconds",
            "Age of the first message of each answer to a consumer group.",
            _DELIVERY_BUCKETS_S,
            registry,
        )

    def answered(self, first_store_time_ms: int) -> None:
        """A group got messages, the first of which was stored then."""
        self._seconds.observe(max(0, self._clock.wall_ms() - first_store_time_ms) / 1000)
