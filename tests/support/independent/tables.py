"""The exports of the state, as ``docs/format/snapshots.md`` has them."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.independent.files import Epoch, entries
from tests.support.independent.log import Log
from tests.support.independent.record import expect
from tests.support.independent.state import TOPIC_KINDS, Json, State, Topic, changes_of, rebuild


def print_rocketmq_json(value: Any, indent: str = "\n") -> str:
    """As RocketMQ's library prints it: tabs, ascending keys, numeric ones without quotes."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    rows = []
    for key in sorted(value, key=lambda key: (key.isdigit(), int(key) if key.isdigit() else key)):
        name = key if key.isdigit() else json.dumps(key)
        rows.append(f"{indent}\t{name}:{print_rocketmq_json(value[key], indent + chr(9))}")
    return "{" + ",".join(rows) + indent + "}"


GROUP_NAMES = {
    "c": "consumeEnable",
    "m": "consumeFromMinEnable",
    "b": "consumeBroadcastEnable",
    "rq": "retryQueueNums",
    "rt": "retryMaxTimes",
    "i": "brokerId",
    "s": "whichBrokerWhenConsumeSlowly",
    "y": "notifyConsumerIdsChangedEnable",
}


def attributes_of(topic: Topic) -> Json:
    has_type = topic.message_type != "UNSPECIFIED"
    return {**topic.attributes, **({"message.type": topic.message_type} if has_type else {})}


def topics_export(state: State) -> Json:
    return {
        name: {
            "attributes": attributes_of(topic),
            "order": topic.is_ordered,
            "perm": topic.permission,
            "readQueueNums": topic.read_queues,
            "topicFilterType": "SINGLE_TAG",
            "topicName": name,
            "topicSysFlag": 0,
            "writeQueueNums": topic.write_queues,
        }
        for name, topic in state.topics.items()
    }


def groups_export(state: State) -> Json:
    return {
        name: {
            "groupName": name,
            **{GROUP_NAMES[key]: kept for key, kept in settings.items()},
            **_policy_export(state.policies.get(name)),
        }
        for name, settings in state.groups.items()
    }


def _policy_export(policy: Json | None) -> Json:
    """RocketMQ 5's fields, of groups that have a policy."""
    if policy is None:
        return {}
    retry: Json = {"type": "EXPONENTIAL" if "re" in policy else "CUSTOMIZED"}
    if "rs" in policy:
        retry["customizedRetryPolicy"] = {"next": policy["rs"]}
    if "re" in policy:
        initial, multiplier, longest = policy["re"]
        retry["exponentialRetryPolicy"] = {
            "initial": initial,
            "max": longest,
            "multiplier": multiplier,
        }
    return {
        "attributes": policy.get("a", {}),
        "consumeMessageOrderly": policy["o"],
        "consumeTimeoutMinute": policy["t"],
        "groupRetryPolicy": retry,
        "groupSysFlag": policy.get("f", 0),
    }


def offsets_export(state: State) -> Json:
    table: Json = {}
    for group, topic, queue_id in state.offsets:
        queues = table.setdefault(f"{topic}@{group}", {})
        queues[str(queue_id)] = state.resumes_at((group, topic, queue_id))
    if "RMQ_SYS_TRANS_HALF_TOPIC" in state.topics:
        table["RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS"] = {"0": state.halves.get("h", 0)}
        table["RMQ_SYS_TRANS_OP_HALF_TOPIC@CID_RMQ_SYS_TRANS"] = {"0": state.halves.get("o", 0)}
    return table


def delays_export(state: State) -> Json:
    return {str(level): offset for level, offset in state.delays.items()}


EXPORTS: Mapping[str, tuple[str, Callable[[State], Json]]] = {
    "topics.json": ("topicConfigTable", topics_export),
    "subscriptionGroup.json": ("subscriptionGroupTable", groups_export),
    "consumerOffset.json": ("offsetTable", offsets_export),
    "delayOffset.json": ("offsetTable", delays_export),
}


TIMER_CHECK = struct.Struct(">qqqqqqq8sI")  # docs/format/timers.md
TIMER_CHECK_BYTES = 4096
TIMER_UNIT_BYTES = 52


def expect_timer_check(path: Path) -> None:
    """What RocketMQ goes on from, as a writer of ours leaves it."""
    content = path.read_bytes()
    expect(len(content) == TIMER_CHECK_BYTES, path, f"has {len(content)} bytes")
    time_ms, log, offset, master, *_, mark, crc = TIMER_CHECK.unpack_from(content)
    expect(time_ms > 0 and time_ms % 1000 == 0, path, f"{time_ms} is no second")
    expect(log >= 0 and log % TIMER_UNIT_BYTES == 0, path, f"a list of {log} bytes")
    expect(offset == master >= 0, path, f"offset {offset}, at the master {master}")
    expect(mark == b"cometmq\0", path, f"the mark {mark!r}")
    expect(crc == zlib.crc32(content[:56]), path, "another CRC")
    expect(not any(content[TIMER_CHECK.size :]), path, "more behind the CRC")


class Tables:
    """``config/*.json``, those that are there; beside each what it was before, as ``.bak``."""

    def __init__(self, folder: Path, log: Log, epochs: Sequence[Epoch], clean: bool) -> None:
        self._log = log
        self._starts = {epoch.number: epoch.start for epoch in epochs}
        self._clean = clean
        self.files: dict[str, Json] = {}
        for path in entries(folder):
            if path.name in EXPORTS:
                self.files[path.name] = self._export(path)
            elif path.name.removesuffix(".bak") in EXPORTS:
                expect(path.with_suffix("").exists(), path, "the elder of no file")
            elif path.name.removesuffix(".bak") == "timercheck" and not log.foreign:
                expect_timer_check(path)
            else:  # RocketMQ has more tables, and they stay
                expect(bool(log.foreign), path, "a name that does not belong here")

    def _export(self, path: Path) -> Json:
        """A file shows the state at its position, in the form that RocketMQ gives it."""
        table, export = EXPORTS[path.name]
        text = path.read_text(encoding="utf-8")
        parsed: Json = json.loads(re.sub(r"(?m)^(\t+)(\d+):", r'\1"\2":', text))
        expect(print_rocketmq_json(parsed) == text, path, "another form than RocketMQ's")
        expect(set(parsed) == {"cometmq", "dataVersion", table}, path, f"has {sorted(parsed)}")
        made, version = parsed["cometmq"], parsed["dataVersion"]
        expect(set(made) == {"epoch", "position"}, path, f"cometmq {made}")
        expect(set(version) == {"counter", "stateVersion", "timestamp"}, path, f"{version}")
        expect(version["stateVersion"] == 0, path, f"state version {version['stateVersion']}")
        epoch, position = made["epoch"], made["position"]
        if position > self._log.end:
            expect(not self._clean, path, f"position {position} is behind the log's end")
            return parsed
        expect(epoch in self._starts, path, f"epoch {epoch} is not known")
        shown, begun = self._state_at(position), self._state_at(self._starts[epoch])
        if shown is not None:
            same = parsed[table] == export(shown)
            expect(same or (export is offsets_export and not self._clean), path, "not its state")
        if shown is None or begun is None:
            return parsed  # the copies before that place went with older log files
        # The changes of topics that the writer has applied since it began to read the state; they
        # are more when it took tables over.
        for record in self._log.state.records:
            if self._starts[epoch] <= record.log_offset < position and record.tag == "CHANGE":
                kinds = [change["k"] for change in changes_of(record)]
                begun.topic_changes += sum(kind in TOPIC_KINDS for kind in kinds)
        more = (
            self._starts[epoch] in self._log.adoptions and version["counter"] > begun.topic_changes
        )
        right = version["counter"] == begun.topic_changes or more
        expect(right, path, f"counter {version['counter']} of {begun.topic_changes}")
        return parsed

    def _state_at(self, position: int) -> State | None:
        """The state that the records before a log offset give; None when they are gone."""
        if position < self._log.row.start:
            return None
        return rebuild([one for one in self._log.state.records if one.log_offset < position])
