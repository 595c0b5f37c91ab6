"""The nouns of a pullhold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from cometmq.filters import sql
from cometmq.messaging.inline_messages import WANTED_ARRIVALS


class ClusterQueue(NamedTuple):
    """One queue of the cluster."""

    broker_group: str
    topic: str
    queue_id: int


PullLimits = tuple[int, int]  # of an answer: messages, bytes


class HoldState(Enum):
    """A hold is WAITING, then PULLING whenever there may be something for it, then DONE. One of a
    group that receives is IN_LINE while others of its group were woken for what it waits for.
    """

    WAITING = "waiting"
    IN_LINE = "in line"
    PULLING = "pulling"
    DONE = "done"


WAITS = (HoldState.WAITING, HoldState.IN_LINE)  # what comes may wake the hold


class Due(Enum):
    """Why the time of a hold is over."""

    DEADLINE = "deadline"  # nothing came
    UNTAKEN = "untaken"  # members that were woken before have not taken what came
    UNREACHABLE = "unreachable"  # the broker could not be reached for the grace time


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """A ``client`` is a connection, a ``stream`` one of its calls, a ``peer`` an address with all
    its connections.
    """

    holds_max: int = 200_000
    holds_per_client_max: int = 20_000
    holds_per_stream_max: int = 10_000
    holds_per_peer_max: int = 100_000
    streams_per_peer_max: int = 10_000
    clients_max: int = 20_000
    queues_per_broker_max: int = 100_000  # as many as a broker reports on one stream
    unsent_bytes_per_stream_max: int = 8 * 1024 * 1024
    unsent_bytes_max: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HoldSpec:
    """What a hold waits for. ``codes``: low 32 bits of the tag hashes; empty = every message.
    ``program``: the SQL filter instead; a hold with one wakes for every message.
    ``generation`` 0: not tracked. ``limits``: None when only the broker can answer or refuse it:
    the pull asks for another form than encoded records, or its group's name is invalid; or nothing
    is pulled.
    """

    key: ClusterQueue
    generation: int
    offset: int
    codes: frozenset[int]
    hold_s: float
    request: Any = None  # the pull as it came; opaque here
    limits: PullLimits | None = None
    program: sql.Program | None = None
    answers_max: int = 1  # with messages
    arrival_group: str = ""  # waits for arrivals, and pulls nothing, for this group
    return_number: int = 0  # of that group in the queue: up to which return it has looked


class Session:
    """One call of a client: a stream with many holds, or a single hold. ``inbox`` takes the
    answers; opaque here.
    """

    __slots__ = ("address", "client", "holds", "inbox")

    def __init__(self, client: str, address: str, inbox: Any) -> None:
        self.client = client
        self.address = address
        self.inbox = inbox
        self.holds: dict[int, Hold] = {}


class Queue:
    """``known`` is (generation, maximum); None: unknown since ``unknown_since_s``."""

    __slots__ = (
        "_wanted",
        "answer_bytes",
        "holds",
        "idle_since_s",
        "known",
        "return_numbers",
        "unknown_since_s",
        "untaken_s",
    )

    def __init__(self, now_s: float) -> None:
        self.known: tuple[int, int] | None = None
        self.unknown_since_s = now_s
        self.idle_since_s = now_s  # when it lost its last hold
        self.holds: dict[Hold, None] = {}  # in order of parking
        self.answer_bytes: int | None = None  # of the last pull's answer
        # Of the newest return of messages to each group that receives, as the watch said.
        self.return_numbers: dict[str, int] = {}
        # Of groups with holds IN_LINE: when the next one of them wakes.
        self.untaken_s: dict[str, float] = {}
        self._wanted = 0  # estimate: next arrivals that the broker sends with their messages

    def want_inline(self) -> bool:
        """Whether to ask the broker now for the messages of the next arrivals: often enough that
        they do not end while holds wait, and no oftener.
        """
        if self._wanted > WANTED_ARRIVALS // 2:
            return False
        self._wanted = WANTED_ARRIVALS
        return True

    def has_returned(self, hold: Hold) -> bool:
        """Whether messages came back to the hold's group since it looked."""
        return (
            bool(hold.arrival_group)
            and self.return_numbers.get(hold.arrival_group, 0) > hold.return_number
        )

    def in_line(self, group: str) -> Iterator[Hold]:
        """The group's holds IN_LINE, in order of parking."""
        return (
            hold
            for hold in self.holds
            if hold.state is HoldState.IN_LINE and hold.arrival_group == group
        )

    def note_arrival(self) -> None:
        """An arrival came, with its messages or without them."""
        self._wanted = max(0, self._wanted - 1)

    def forget_known(self, now_s: float) -> None:
        """Its watch broke."""
        self.known = None
        self.unknown_since_s = now_s
        self.return_numbers.clear()
        self.untaken_s.clear()
        self._wanted = 0

    def validate(self) -> None:
        assert 0 <= self._wanted <= WANTED_ARRIVALS
        assert self.known is None or self.known >= (0, 0)


class Hold:
    """One held pull."""

    __slots__ = (
        "answers_left",
        "arrival_group",
        "codes",
        "deadline_s",
        "empty_pulls",
        "generation",
        "hold_id",
        "hold_s",
        "key",
        "limits",
        "offset",
        "parked_s",
        "program",
        "queue",
        "request",
        "return_number",
        "session",
        "state",
    )

    def __init__(
        self, session: Session, hold_id: int, spec: HoldSpec, queue: Queue, now_s: float
    ) -> None:
        self.session = session
        self.queue = queue
        self.hold_id = hold_id
        self.key = spec.key
        self.generation = spec.generation
        self.offset = spec.offset  # the next message to look at
        self.codes = spec.codes
        self.request = spec.request
        self.limits = spec.limits
        self.program = spec.program
        self.answers_left = spec.answers_max
        self.arrival_group = spec.arrival_group
        self.return_number = spec.return_number
        self.hold_s = spec.hold_s
        self.parked_s = now_s
        self.deadline_s = now_s + spec.hold_s
        self.empty_pulls = 0  # in a row
        self.state = HoldState.WAITING

    def is_above(self, known: tuple[int, int]) -> bool:
        """Whether its offset is above the maximum: messages there may wait for the disk, or the
        position is outside the queue. Only the broker knows which.
        """
        return self.offset > known[1] and self.generation in (0, known[0])

    def may_find(self, known: tuple[int, int]) -> bool:
        """Whether a pull may find something in a queue of this generation and maximum. The broker
        decides when the hold has another generation.
        """
        generation, maximum = known
        return self.generation not in (0, generation) or maximum > self.offset
