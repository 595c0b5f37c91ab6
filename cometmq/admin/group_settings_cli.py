"""Options of ``cometmq group create`` and ``update``, and how settings are shown."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from cometmq.admin.commandline import Decorator
from cometmq.v1 import broker_pb2

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVELS, _EXPONENTIAL = "levels", "exponential"
_MODES = {
    "pull": broker_pb2.CONSUME_MODE_PULL,
    "pop": broker_pb2.CONSUME_MODE_POP,
}


class RetryPolicy(click.ParamType[broker_pb2.RetryPolicy]):
    """``levels``, ``exponential``, ``exponential 5s 2 2h`` or steps such as ``10s 30s 1m``."""

    name = "policy"

    def convert(self, value: Any, param: Any, ctx: Any) -> broker_pb2.RetryPolicy:
        """The policy; a step is a number with s, m, h or d."""
        words = str(value).split()
        try:
            if words == [_LEVELS]:
                kind = broker_pb2.RETRY_POLICY_KIND_DELAY_LEVELS
                return broker_pb2.RetryPolicy(kind=kind)
            if words[:1] == [_EXPONENTIAL]:
                return _exponential(words[1:])
            kind = broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED
            if not words:
                raise ValueError
            return broker_pb2.RetryPolicy(kind=kind, steps_ms=map(_ms, words))
        except (ValueError, KeyError):
            self.fail(
                f"{value!r} is none of: levels; exponential; exponential 5s 2 2h; 10s 30s 1m",
                param,
                ctx,
            )


def _exponential(words: list[str]) -> broker_pb2.RetryPolicy:
    policy = broker_pb2.RetryPolicy(kind=broker_pb2.RETRY_POLICY_KIND_EXPONENTIAL)
    if words:
        first, multiplier, longest = words
        policy.initial_ms, policy.max_ms = _ms(first), _ms(longest)
        policy.multiplier = int(multiplier)
    return policy


def _ms(word: str) -> int:
    return int(word[:-1]) * _UNIT_MS[word[-1:]]


def time_text(time_ms: int) -> str:
    """``90000`` → ``90s``: in the largest unit that divides it."""
    for unit, unit_ms in reversed(_UNIT_MS.items()):
        if time_ms and time_ms % unit_ms == 0:
            return f"{time_ms // unit_ms}{unit}"
    return f"{time_ms}ms"


def retry_policy_text(policy: broker_pb2.RetryPolicy) -> str:
    """A policy as the option takes it."""
    if policy.kind == broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED:
        return " ".join(map(time_text, policy.steps_ms))
    if policy.kind == broker_pb2.RETRY_POLICY_KIND_EXPONENTIAL:
        first, longest = time_text(policy.initial_ms), time_text(policy.max_ms)
        return f"{_EXPONENTIAL} {first} {policy.multiplier} {longest}"
    return _LEVELS


def mode_text(mode: broker_pb2.ConsumeMode.ValueType) -> str:
    """A mode as the option takes it."""
    return next((text for text, value in _MODES.items() if value == mode), "pull")


class QuotaType(click.ParamType[broker_pb2.Quota]):
    """``MESSAGES/BYTES`` a second, 0 = no limit."""

    name = "quota"

    def convert(self, value: Any, param: Any, ctx: Any) -> broker_pb2.Quota:
        """The quota; without a slash it has messages only."""
        messages, _, size = str(value).partition("/")
        try:
            return broker_pb2.Quota(messages_per_s=int(messages), bytes_per_s=int(size or 0))
        except ValueError:
            self.fail(f"{value!r} is not MESSAGES/BYTES a second, such as 100/1048576", param, ctx)


_OPTIONS: tuple[Decorator, ...] = (
    click.option("--consume/--no-consume", default=None, help="Whether members may read."),
    click.option("--broadcast/--no-broadcast", default=None, help="Whether members may broadcast."),
    click.option(
        "--from-min/--no-from-min", default=None, help="Whether it may begin at first messages."
    ),
    click.option(
        "--notify/--no-notify", default=None, help="Whether members learn of each other at once."
    ),
    click.option("--orderly/--no-orderly", default=None, help="Whether it consumes in order."),
    click.option(
        "--retry-times",
        type=click.IntRange(min=0),
        help="How often a failed message comes again before it is a dead letter.",
    ),
    click.option("--retry-queues", type=click.IntRange(1, 1024), help="Queues of the retry topic."),
    click.option(
        "--retry-policy",
        type=RetryPolicy(),
        help="Waits between tries: levels, exponential, or steps such as '10s 30s 1m'.",
    ),
    click.option(
        "--consume-timeout-min",
        type=click.IntRange(1, 10_080),
        help="Minutes until a message that is being consumed counts as failed.",
    ),
    click.option("--mode", type=click.Choice([*_MODES]), help="How members get messages."),
    click.option(
        "--read-quota",
        type=QuotaType(),
        metavar="MESSAGES/BYTES",
        help="What each client may read a second; 0 = no limit.",
    ),
    click.option(
        "--dlq-reserve-hours",
        type=click.FloatRange(min=0),
        help="Do not show dead letters that are older; 0 = show what the log has.",
    ),
    click.option(
        "--read-from", type=click.IntRange(0, 1_000), help="Member to read from; 0 = the writer."
    ),
    click.option(
        "--read-from-when-slow",
        type=click.IntRange(0, 1_000),
        help="Member to read from while far behind.",
    ),
)
_FIELDS = {
    "consume": "consume_enable",
    "broadcast": "consume_broadcast_enable",
    "from_min": "consume_from_min_enable",
    "notify": "notify_members_enable",
    "orderly": "consume_orderly",
    "retry_times": "retry_times_max",
    "retry_queues": "retry_queue_count",
    "retry_policy": "retry_policy",
    "consume_timeout_min": "consume_timeout_min",
    "read_quota": "read_quota",
    "read_from": "broker_id",
    "read_from_when_slow": "broker_id_when_slow",
}


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with all options of settings; it gets them as ``settings``, whose group is not
    named yet.
    """

    def with_settings(*args: Any, **given: Any) -> Any:
        settings = broker_pb2.GroupSettings(
            **{field: given.pop(option) for option, field in _FIELDS.items()}
        )
        if mode := given.pop("mode"):
            settings.mode = _MODES[mode]
        hours = given.pop("dlq_reserve_hours")
        if hours is not None:
            settings.dlq_reserve_time_ms = round(hours * 3_600_000)
        return command(*args, settings=settings, **given)

    decorated: Callable[..., Any] = functools.wraps(command)(with_settings)
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
