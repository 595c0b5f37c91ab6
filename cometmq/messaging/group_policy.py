"""What a consumer group asks for beyond RocketMQ 4's settings: order, retries, quotas.

RocketMQ 5 has most of it in its subscription group, with the same names and defaults; what it has
not (mode, quota, time of dead letters) is ours. What takes effect only in a later program is kept
and shown. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from cometmq.errors import InvalidRequest
from cometmq.messaging.quotas import NO_QUOTA, Quota, check_quota
from cometmq.messaging.topics import RESERVE_TIME_MS_MAX, in_hours

RETRY_STEPS_MAX = 64
RETRY_STEP_MS_MAX = 40 * 86_400_000
MULTIPLIER_MAX = 1_000
CONSUME_TIMEOUT_MIN_MAX = 10_080
ATTRIBUTES_MAX = 64
ATTRIBUTE_LENGTH_MAX = 1_024
_UNUSED_STEPS = 2  # of RocketMQ's list, as it does not use its first two delay levels
_DOUBLINGS_MAX = 32


class ConsumeMode(Enum):
    """How members get messages; the values are those of ``cometmq.v1.ConsumeMode``."""

    PULL = 1
    POP = 2


@dataclass(frozen=True, slots=True)
class CustomizedRetry:
    """Steps in ms, as RocketMQ keeps them: the first retry waits for the third step, and what has
    come past the last one for the last.
    """

    next_ms: tuple[int, ...]

    def delay_ms(self, times: int) -> int:
        """How long a message waits that was sent back ``times`` times before."""
        return self.next_ms[min(times + _UNUSED_STEPS, len(self.next_ms) - 1)]

    @property
    def steps_ms(self) -> tuple[int, ...]:
        """The steps that retries take, in order."""
        return self.next_ms[_UNUSED_STEPS:] or self.next_ms[-1:]

    @classmethod
    def of_steps(cls, steps_ms: tuple[int, ...]) -> CustomizedRetry:
        """The policy whose first retry waits for the first of these steps."""
        return cls(steps_ms[:1] * _UNUSED_STEPS + steps_ms)


@dataclass(frozen=True, slots=True)
class ExponentialRetry:
    """Each step is ``multiplier`` times the one before, up to ``max_ms``."""

    initial_ms: int = 5_000
    multiplier: int = 2
    max_ms: int = 7_200_000

    def delay_ms(self, times: int) -> int:
        """How long a message waits that was sent back ``times`` times before."""
        factor: int = self.multiplier ** min(times, _DOUBLINGS_MAX)
        return min(self.max_ms, self.initial_ms * factor)


EXPONENTIAL = ExponentialRetry()  # RocketMQ's
RetryPolicy = CustomizedRetry | ExponentialRetry


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """``retry`` None: by RocketMQ's delay levels, 10 s to 2 h."""

    is_orderly: bool = False
    retry: RetryPolicy | None = None
    consume_timeout_min: int = 15
    mode: ConsumeMode = ConsumeMode.PULL
    read_quota: Quota = NO_QUOTA  # of each client
    dlq_reserve_ms: int = 0  # dead letters that are older are not shown; 0 = as long as all others
    system_flag: int = 0  # RocketMQ's, not used here, and as the attributes kept for the way back
    attributes: tuple[tuple[str, str], ...] = ()  # in order of name


DEFAULT = GroupPolicy()


def kept_attributes(attributes: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that we keep: 64, of 1,024 printable characters each."""
    return tuple(
        (name, value)
        for name, value in sorted(attributes.items())
        if all(len(t) <= ATTRIBUTE_LENGTH_MAX and t.isprintable() for t in (name, value))
    )[:ATTRIBUTES_MAX]


def check_policy(policy: GroupPolicy) -> None:
    """Raises InvalidRequest."""
    _check_retry(policy.retry)
    check_quota("read_quota", policy.read_quota)
    if not 1 <= policy.consume_timeout_min <= CONSUME_TIMEOUT_MIN_MAX:
        raise InvalidRequest(
            f"consume_timeout_min is 1 to {CONSUME_TIMEOUT_MIN_MAX}, not "
            f"{policy.consume_timeout_min}"
        )
    if not 0 <= policy.dlq_reserve_ms <= RESERVE_TIME_MS_MAX:
        raise InvalidRequest(
            f"a reserve time is 0 (none) to {in_hours(RESERVE_TIME_MS_MAX)}, not "
            f"{in_hours(policy.dlq_reserve_ms)}"
        )


def _check_retry(retry: RetryPolicy | None) -> None:
    match retry:
        case CustomizedRetry(steps):
            if not 1 <= len(steps) <= RETRY_STEPS_MAX:
                raise InvalidRequest(f"a retry policy has 1 to {RETRY_STEPS_MAX} steps")
            wrong = next((step for step in steps if not 1 <= step <= RETRY_STEP_MS_MAX), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"a retry step is 1 to {RETRY_STEP_MS_MAX} ms (40 days), not {wrong}"
                )
        case ExponentialRetry(initial, multiplier, longest):
            if not 1 <= initial <= longest <= RETRY_STEP_MS_MAX:
                raise InvalidRequest(
                    f"an exponential retry policy begins with 1 ms or more and ends with "
                    f"{RETRY_STEP_MS_MAX} ms or less, not {initial} to {longest}"
                )
            if not 1 <= multiplier <= MULTIPLIER_MAX:
                raise InvalidRequest(f"a multiplier is 1 to {MULTIPLIER_MAX}, not {multiplier}")
