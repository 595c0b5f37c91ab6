"""How a follower's log is kept equal to the writer's: where they agree, what may be sent, who may
take over. Pure: numbers in, decisions out.

Two logs agree up to the end of the newest epoch that both have with the same start: one incarnation
of a writer wrote both, and it only ever appended. A log may have lost its end in a crash, so the
shorter one counts. That is proved by one checksum: when everything that the follower has is kept,
its last record must be the writer's, byte for byte; when it is not, the whole epoch is doubted. The
follower cuts and asks again, so each doubt costs one epoch, and in the end it copies everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cometmq.errors import InvalidRequest, NoFollower, StaleEpoch
from cometmq.replication.epochs import Epoch

PROTOCOL_VERSION = 1
FORMAT_VERSION = 1
CHUNK_BYTES_MAX = 1024 * 1024  # a single larger record is a chunk all the same
WINDOW_BYTES_MAX = 8 * 1024 * 1024  # sent and not yet in the follower's page cache
HEARTBEAT_S = 1.0
SILENCE_S_MAX = 10.0
HANDOVER_BEHIND_BYTES_MAX = 64 * 1024 * 1024  # further behind, a follower cannot take over soon
EPOCHS_MAX = 100_000


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


def check_view(view: LogView) -> None:
    """InvalidRequest unless numbers and starts of the epochs grow, as a peer should tell them."""
    if len(view.epochs) > EPOCHS_MAX:
        raise InvalidRequest(f"epochs: {len(view.epochs)} are more than {EPOCHS_MAX}")
    before = (0, -1)
    for epoch in view.epochs:
        if epoch[0] <= before[0] or epoch[1] <= before[1]:
            raise InvalidRequest(f"epochs: {epoch} does not follow {before}")
        before = epoch


def start_of_copy(writer: LogView, follower: LogView, crc_at: Callable[[int], int | None]) -> int:
    """Where the follower has to go on: its end if all that it has is the writer's, else where it
    has to cut its log first, or, below or above all that it has, where it has to begin anew.

    ``crc_at`` tells the CRC-32 of the writer's record at a log offset, None: there is none. Raises
    StaleEpoch when the follower knows a newer writer.
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

    COPY = 1  # go on
    CUT = 2  # cut the log there, then ask again
    ANEW = 3  # forget everything, then ask again


def plan(follower: LogView, start: int) -> Plan:
    """What :func:`start_of_copy` means to the follower."""
    if start == follower.log_end:
        return Plan.COPY
    return Plan.CUT if follower.log_min < start < follower.log_end else Plan.ANEW


class Replica:
    """One follower, as its writer sees it.

    Invariant: flushed ≤ appended ≤ sent; none of them goes back while the stream lives.
    """

    __slots__ = ("appended", "flushed", "in_step_s", "member_id", "sent", "store_id")

    def __init__(self, member_id: int, store_id: str, start: int, now_s: float) -> None:
        self.member_id = member_id
        self.store_id = store_id
        self.sent = start
        self.appended = start
        self.flushed = 0  # until it tells
        self.in_step_s = now_s  # when it last had everything

    def room(self) -> int:
        """Bytes that may be sent now."""
        return max(0, self.appended + WINDOW_BYTES_MAX - self.sent)

    def sent_to(self, end: int) -> None:
        assert end > self.sent, (end, self.sent)
        self.sent = end

    def acked(self, appended: int, flushed: int, writer_end: int, now_s: float) -> None:
        """The follower has told how far it is. InvalidRequest: that cannot be."""
        if not (self.appended <= appended <= self.sent and self.flushed <= flushed <= appended):
            raise InvalidRequest(
                f"ack of {appended} and {flushed} after {self.appended} and {self.flushed}, "
                f"sent to {self.sent}"
            )
        self.appended, self.flushed = appended, flushed
        if appended >= writer_end:
            self.in_step_s = now_s

    def behind_bytes(self, writer_end: int) -> int:
        return max(0, writer_end - self.appended)

    def behind_s(self, writer_end: int, now_s: float) -> float:
        """How long ago it last had everything; 0 while it has."""
        return max(0.0, now_s - self.in_step_s) if self.behind_bytes(writer_end) else 0.0

    def has_all(self, end: int) -> bool:
        """On its disk."""
        return self.flushed >= end


def choose_successor(replicas: Sequence[Replica], wanted: int | None, end: int) -> Replica:
    """Who takes over: the named one, else the one that has come furthest. NoFollower."""
    known = [r for r in replicas if wanted is None or r.member_id == wanted]
    if not known:
        who = "no follower is" if wanted is None else f"member {wanted} is not"
        raise NoFollower(f"{who} connected")
    chosen = max(known, key=lambda r: (r.flushed, r.appended, -r.member_id))
    if chosen.behind_bytes(end) > HANDOVER_BEHIND_BYTES_MAX:
        raise NoFollower(
            f"member {chosen.member_id} is {chosen.behind_bytes(end)} bytes behind, "
            f"{HANDOVER_BEHIND_BYTES_MAX} are allowed"
        )
    return chosen
