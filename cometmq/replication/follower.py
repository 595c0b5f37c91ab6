"""How a follower's log is kept equal to the writer's: where they agree, what may be sent, which
follower may take over. Pure: numbers in, decisions out.

Two logs agree up to the end of the newest epoch that both have with the same start: one incarnation
of a writer wrote both, and it only ever appended. A log may have lost its end in a crash, so the
shorter one counts. That is proved by one checksum: when everything that the follower has is kept,
its last record must be the writer's, byte for byte; when it is not, the whole epoch is doubted. The
follower cuts and asks again, so each doubt costs one epoch, and in the end it copies everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cometmq.errors import InvalidRequest, NoFollower, StaleEpoch
from cometmq.model import EPOCH_MAX
from cometmq.replication.epoch_history import Epoch
from cometmq.replication.lease import CLOCK_DRIFT_MAX, ReplicaId

CHUNK_BYTES_MAX = 1024 * 1024  # a single larger record is a chunk all the same
WINDOW_BYTES_MAX = 8 * 1024 * 1024  # sent and not yet in the follower's page cache
HEARTBEAT_S = 1.0
SILENCE_S_MAX = 10.0
HANDOVER_BEHIND_BYTES_MAX = 64 * 1024 * 1024  # further behind, a follower cannot take over soon
EPOCHS_MAX = 100_000
FRAME_NOTE_MS = 20  # so often it is noted where the log ended when a frame was sent


@dataclass(frozen=True, slots=True)
class LogView:
    """One member's log. ``epochs`` are those that own a byte of it; of the writer's also the one
    that is open.
    """

    epochs: tuple[Epoch, ...]  # (number, start), oldest first
    log_min: int
    log_end: int
    last_offset: int = -1  # where the last record starts; -1: the log is empty
    last_crc32: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.log_min <= self.log_end, self

    @property
    def empty(self) -> bool:
        return self.log_min == self.log_end

    @property
    def epoch(self) -> int:
        """The newest; 0 = none."""
        return self.epochs[-1][0] if self.epochs else 0


def owned(epochs: Iterable[Epoch], log_end: int) -> tuple[Epoch, ...]:
    """The epochs that own a byte of a log that ends there."""
    return tuple(epoch for epoch in epochs if epoch[1] < log_end)


def check_epochs(epochs: Sequence[Epoch]) -> None:
    """InvalidRequest unless numbers and starts of the epochs of a peer grow."""
    if len(epochs) > EPOCHS_MAX:
        raise InvalidRequest(f"epochs: {len(epochs)} are more than {EPOCHS_MAX}")
    before = (0, -1)
    for epoch in epochs:
        if epoch[0] > EPOCH_MAX:
            raise InvalidRequest(f"epochs: {epoch[0]} is above {EPOCH_MAX}")
        if epoch[0] <= before[0] or epoch[1] <= before[1]:
            raise InvalidRequest(f"epochs: {epoch} does not follow {before}")
        before = epoch


def start_of_copy(
    writer: LogView,
    follower: LogView,
    crc_at: Callable[[int], int | None],
    waits_from: int | None = None,
) -> int:
    """From where the follower copies: its end if all that it has is the writer's; else where it
    has to cut its log first; or, below or above all that it has, where its log begins again.

    ``crc_at`` gives the CRC-32 of the writer's record at a log offset; None: there is none.
    ``waits_from``: where the writer's oldest message lies that waits for its time or its end; None:
    there is none. Raises StaleEpoch when the follower knows a newer writer.
    """
    if follower.epoch > writer.epoch:
        raise StaleEpoch(
            f"the follower has a part of epoch {follower.epoch}, this writer's is {writer.epoch}"
        )
    if follower.empty:
        return writer.log_min
    start = _common_end(writer, follower)
    if start is None:
        return writer.log_min
    # As a writer it had stored again what waits, which is cut, and had removed the file with it.
    if waits_from is not None and writer.log_min <= waits_from < follower.log_min:
        return writer.log_min
    epoch_start, common = start
    if common == follower.log_end and crc_at(follower.last_offset) != follower.last_crc32:
        common = epoch_start
    # What one of them does not keep any more cannot be compared nor copied.
    return common if max(writer.log_min, follower.log_min) < common else writer.log_min


def _common_end(writer: LogView, follower: LogView) -> tuple[int, int] | None:
    """Start and common end of the newest epoch that both have; None: they have none in common."""
    ends = dict(_with_ends(follower))
    for epoch, end in reversed(list(_with_ends(writer))):
        if epoch in ends:
            return epoch[1], min(end, ends[epoch])
    return None


def _with_ends(view: LogView) -> Iterable[tuple[Epoch, int]]:
    ends = [start for _, start in view.epochs[1:]] + [view.log_end]
    return zip(view.epochs, ends, strict=True) if view.epochs else ()


class Plan(Enum):
    """What a follower does with the writer's answer."""

    COPY = 1  # from there on
    CUT = 2  # cut the log there, then ask again
    RESET = 3  # forget everything, then ask again


def plan(follower: LogView, start: int) -> Plan:
    """What :func:`start_of_copy` means to the follower."""
    if start == follower.log_end:
        return Plan.COPY
    return Plan.CUT if follower.log_min < start < follower.log_end else Plan.RESET


class Ack(NamedTuple):
    """What a follower reports to its writer."""

    appended: int  # all below is in its page cache
    flushed: int  # all below is on its disk
    answers_ms: int  # the writer's clock, as the newest frame said that it has taken
    no_election_ms: int  # for so long from now it does not take the lease; 0: no promise
    leaving: bool = False  # it is about to stop: sends are not to wait for it


class Replica:
    """One follower on its store, as its writer sees it; it outlives its streams. Times are of the
    writer's CLOCK_BOOTTIME.

    Invariant: flushed ≤ appended ≤ sent; none of them goes back while a stream lives.
    """

    __slots__ = (
        "_answered_ms",
        "_framed_ms",
        "_unanswered",
        "appended",
        "caught_up",
        "connected",
        "flushed",
        "heard_s",
        "in_step_s",
        "leaving",
        "promised_until_s",
        "replica_id",
        "sent",
    )

    def __init__(self, replica_id: ReplicaId, start: int, now_s: float) -> None:
        self.replica_id = replica_id
        self.connected = False
        self.heard_s: float | None = None  # sending time of the newest frame that it answered
        self.in_step_s = now_s  # as of when it had everything; when it came, until …
        self.caught_up = False  # … it has acknowledged all of it
        self.promised_until_s = 0.0  # it does not take the lease before
        # Frames that were sent and not answered: when, and the end of the log then.
        self._unanswered: deque[tuple[int, int]] = deque()
        self.flushed = 0  # until it reports one
        self.join(start)

    @property
    def member_id(self) -> int:
        return self.replica_id.member_id

    def join(self, start: int) -> None:
        """A stream of it begins at ``start``."""
        self.connected = True
        self.leaving = False  # it has not announced its stop on this stream
        self.sent = start
        self.appended = start
        self.flushed = min(self.flushed, start)  # it is the same store: that stays on its disk
        self._unanswered.clear()
        self._framed_ms = self._answered_ms = 0  # of the newest frame that was sent, and answered

    @property
    def has_room(self) -> bool:
        """Whether a chunk may be sent now: a whole one. If every answer made room for as much as it
        answers, chunks would shrink to single records, each with the cost of a chunk.
        """
        return self.sent - self.appended + CHUNK_BYTES_MAX <= WINDOW_BYTES_MAX

    @property
    def has_what_was_sent(self) -> bool:
        """In its page cache, and has acknowledged it."""
        return self.appended == self.sent

    def sent_to(self, end: int) -> None:
        assert end > self.sent, (end, self.sent)
        self.sent = end

    def framed(self, sent_ms: int, writer_end: int) -> None:
        """A frame is sent at ``sent_ms``, when the writer's log ends at ``writer_end``."""
        self._framed_ms = max(self._framed_ms, sent_ms)
        last = self._unanswered[-1][0] if self._unanswered else 0
        if sent_ms - last >= FRAME_NOTE_MS:
            self._unanswered.append((sent_ms, writer_end))

    def acked(self, ack: Ack, writer_end: int) -> None:
        """The follower acknowledges its positions. InvalidRequest: that cannot be."""
        if not (
            self.appended <= ack.appended <= self.sent
            and self.flushed <= ack.flushed <= ack.appended
        ):
            raise InvalidRequest(
                f"ack of {ack.appended} and {ack.flushed} after {self.appended} and "
                f"{self.flushed}, sent to {self.sent}"
            )
        if not self._answered_ms <= ack.answers_ms <= self._framed_ms or ack.no_election_ms < 0:
            raise InvalidRequest(f"ack of a frame that was not sent: {ack.answers_ms}")
        self.appended, self.flushed = ack.appended, ack.flushed
        self.leaving = self.leaving or ack.leaving
        if not ack.answers_ms:  # it has taken no frame of this stream yet
            return
        self._answered_ms = ack.answers_ms
        answers_s = ack.answers_ms / 1000
        self.heard_s = max(self.heard_s or 0.0, answers_s)
        if ack.no_election_ms:
            # The follower counts from when it sent the ack, which is later.
            until_s = answers_s + ack.no_election_ms / 1000 * (1.0 - CLOCK_DRIFT_MAX)
            self.promised_until_s = max(self.promised_until_s, until_s)
        waiting = self._unanswered
        while waiting and waiting[0][0] <= ack.answers_ms and waiting[0][1] <= ack.appended:
            self._in_step(waiting.popleft()[0] / 1000)
        if ack.appended >= writer_end:
            self._in_step(answers_s)

    def _in_step(self, as_of_s: float) -> None:
        self.in_step_s = max(self.in_step_s, as_of_s)
        self.caught_up = True

    def behind_bytes(self, writer_end: int) -> int:
        return max(0, writer_end - self.appended)

    def behind_s(self, writer_end: int, now_s: float) -> float:
        """How long ago it last had everything; 0 while it has."""
        return max(0.0, now_s - self.in_step_s) if self.behind_bytes(writer_end) else 0.0

    def has_all(self, end: int) -> bool:
        """Whether it has the log up to ``end`` on its disk."""
        return self.flushed >= end


def choose_successor(
    replicas: Sequence[Replica],
    wanted: int | None,
    end: int,
    off_clocks: Collection[int] = (),
) -> Replica:
    """The follower to hand over to: the named one, else the one that has most; one of the members
    ``off_clocks``, whose clocks are off, only where no other can. NoFollower.
    """
    known = [r for r in replicas if wanted in (None, r.member_id) and not r.leaving]
    if not known:
        who = "no follower is" if wanted is None else f"member {wanted} is not"
        raise NoFollower(f"{who} connected and answering")

    def is_preferred(replica: Replica) -> bool:
        is_near = replica.behind_bytes(end) <= HANDOVER_BEHIND_BYTES_MAX
        return is_near and replica.member_id not in off_clocks

    chosen = max(known, key=lambda r: (is_preferred(r), r.flushed, r.appended, -r.member_id))
    if chosen.behind_bytes(end) > HANDOVER_BEHIND_BYTES_MAX:
        raise NoFollower(
            f"member {chosen.member_id} is {chosen.behind_bytes(end)} bytes behind, "
            f"{HANDOVER_BEHIND_BYTES_MAX} are allowed"
        )
    return chosen
