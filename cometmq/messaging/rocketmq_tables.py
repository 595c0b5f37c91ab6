"""The state as RocketMQ's ``config/*.json``, in the form that its fastjson writes.

Tabs, keys in order, no blank behind the colon, and numbers as keys of maps without quotes: what a
RocketMQ broker writes it surely reads, though it is not legal JSON. Each file has an extra
top-level field ``"cometmq"`` which RocketMQ ignores when it reads and leaves out when it writes: a
file without it was written by RocketMQ. Described in ``docs/format/snapshots.md``; the state log,
not these files, is what a broker starts from. What RocketMQ wrote is read by ``adoption.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cometmq.errors import StoreDamaged
from cometmq.format import fastjson
from cometmq.format.halves import HALF_TOPIC, OFFSETS_GROUP, OP_TOPIC, QUEUE_ID
from cometmq.messaging import group_policy
from cometmq.messaging.group_policy import CustomizedRetry, ExponentialRetry, GroupPolicy
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.state import BrokerState
from cometmq.messaging.topics import AUTO_CREATE_TOPIC
from cometmq.model import MessageType, TopicConfig

_PERMISSION_INHERIT = (
    1  # RocketMQ's sign of a topic whose settings are the pattern for topics created on demand
)

TOPICS = "topics.json"
GROUPS = "subscriptionGroup.json"
OFFSETS = "consumerOffset.json"
DELAYS = "delayOffset.json"


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """What distinguishes our files from RocketMQ's: the epoch and log position of their state."""

    epoch: int
    position: int


def export(state: BrokerState, mark: SnapshotMark, time_ms: int) -> dict[str, bytes]:
    """All files by name. ``time_ms`` goes into RocketMQ's data versions."""
    version = {"counter": state.topics.version, "stateVersion": 0, "timestamp": time_ms}
    tables: dict[str, dict[str, Any]] = {
        TOPICS: {
            "dataVersion": version,
            "topicConfigTable": {config.name: _topic(config) for config in state.topics},
        },
        GROUPS: {
            "dataVersion": version,
            "subscriptionGroupTable": {
                name: _group(settings) for name, settings in state.groups.items()
            },
        },
        OFFSETS: {"dataVersion": version, "offsetTable": _offsets(state)},
        DELAYS: {"dataVersion": version, "offsetTable": state.delays},
    }
    stamp = {"epoch": mark.epoch, "position": mark.position}
    return {name: _render({**table, "cometmq": stamp}).encode() for name, table in tables.items()}


def parse(data: bytes) -> dict[str, Any]:
    """A file of ours or of RocketMQ; the keys of all maps are strings. Raises ``StoreDamaged``."""
    table = fastjson.loads(data)
    if not isinstance(table, dict):
        raise StoreDamaged("a configuration file holds something else than a JSON object")
    return table


def mark_of(table: Mapping[str, Any]) -> SnapshotMark | None:
    """The mark of a parsed file; None when RocketMQ wrote it."""
    match table.get("cometmq"):
        case {"epoch": int(epoch), "position": int(position)}:
            return SnapshotMark(epoch, position)
    return None


def _topic(config: TopicConfig) -> dict[str, Any]:
    permission = config.permission
    if config.name == AUTO_CREATE_TOPIC:
        permission |= _PERMISSION_INHERIT
    attributes = dict(config.attributes)
    if config.message_type is not MessageType.UNSPECIFIED:
        attributes["message.type"] = config.message_type.name
    return {
        "attributes": attributes,
        "order": config.is_ordered,
        "perm": permission,
        "readQueueNums": config.read_queue_count,
        "topicFilterType": "SINGLE_TAG",
        "topicName": config.name,
        "topicSysFlag": 0,
        "writeQueueNums": config.write_queue_count,
    }


def _group(settings: GroupSettings) -> dict[str, Any]:
    return {
        **_policy(settings.policy),
        "brokerId": settings.broker_id,
        "consumeBroadcastEnable": settings.consume_broadcast_enable,
        "consumeEnable": settings.consume_enable,
        "consumeFromMinEnable": settings.consume_from_min_enable,
        "groupName": settings.name,
        "notifyConsumerIdsChangedEnable": settings.notify_members_enable,
        "retryMaxTimes": settings.retry_times_max,
        "retryQueueNums": settings.retry_queue_count,
        "whichBrokerWhenConsumeSlowly": settings.broker_id_when_slow,
    }


def _policy(policy: GroupPolicy) -> dict[str, Any]:
    """RocketMQ 5's fields, of a group for which they say something."""
    if policy == group_policy.DEFAULT:
        return {}
    retry: dict[str, Any] = {"type": "CUSTOMIZED"}
    match policy.retry:
        case CustomizedRetry(next_ms):
            retry["customizedRetryPolicy"] = {"next": list(next_ms)}
        case ExponentialRetry(initial_ms, multiplier, max_ms):
            retry["type"] = "EXPONENTIAL"
            retry["exponentialRetryPolicy"] = {
                "initial": initial_ms,
                "max": max_ms,
                "multiplier": multiplier,
            }
    return {
        "attributes": dict(policy.attributes),
        "consumeMessageOrderly": policy.is_orderly,
        "consumeTimeoutMinute": policy.consume_timeout_min,
        "groupRetryPolicy": retry,
        "groupSysFlag": policy.system_flag,
    }


def _offsets(state: BrokerState) -> dict[str, dict[int, int]]:
    table: dict[str, dict[int, int]] = {}
    for commit in state.offsets:
        # RocketMQ knows no generations: it gets what of the position still holds in the present
        # one.
        position = state.generations.of(commit.topic, commit.queue_id).settle(commit.position)
        table.setdefault(f"{commit.topic}@{commit.group}", {})[commit.queue_id] = position.offset
    if HALF_TOPIC in state.topics:
        for topic, floor in zip((HALF_TOPIC, OP_TOPIC), state.halves.floors, strict=True):
            table[f"{topic}@{OFFSETS_GROUP}"] = {QUEUE_ID: floor}
    return table


def _render(value: Any, indent: int = 0) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    if not value:
        return "{}"
    tabs = "\t" * indent
    return (
        "{"
        + ",".join(f"\n{tabs}\t{entry}" for entry in _entries(value, indent + 1))
        + f"\n{tabs}}}"
    )


def _entries(table: dict[Any, Any], indent: int) -> Iterator[str]:
    for key in sorted(table):
        yield f"{key if isinstance(key, int) else json.dumps(key)}:{_render(table[key], indent)}"
