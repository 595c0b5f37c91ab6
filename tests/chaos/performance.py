"""One chaos run from beginning to end: a cluster, clients, faults one after the other or on top of
each other, the end, the verdict.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cometmq.admin import brokers
from cometmq.messaging.retry import dlq_topic
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.chaos import asked, consumers, single
from tests.chaos.cluster import HEALED_S, Cluster, end_of
from tests.chaos.consumers import ORDERED, RETRIED
from tests.chaos.later import HISTORY, read_ends
from tests.chaos.listing import Fault
from tests.chaos.machines import Member
from tests.chaos.topics import ASKED, LATER_TOPICS, TOPICS, config_of, queues_of
from tests.chaos.workload import EAGER
from tests.support.cluster.broker import BrokerClient
from tests.support.faults.checkers import (
    Held,
    Opening,
    Verdict,
    differing_epochs,
    gone,
    judge,
    two_writers,
)
from tests.support.faults.delivery_checkers import judge_deliveries
from tests.support.faults.delivery_history import DeliveryHistory
from tests.support.faults.extremes import (
    bygone,
    lost_from_disk,
    on_disk_before,
    reused_generations,
    revenants,
)
from tests.support.faults.group_checkers import Group, judge_group
from tests.support.faults.history import Disturbance, History, Outcome, Queue
from tests.support.faults.question_checkers import judge_questions
from tests.support.independent.files import Row, read_epochs

SETTLE_S = 1.0  # between two faults
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A fault, held for so long. ``beside``: faults that begin and end while it lasts."""

    fault: Fault
    hold_s: float
    beside: tuple[Step, ...] = ()

    def __str__(self) -> str:
        beside = "".join(f" with {step}" for step in self.beside)
        return f"{self.fault.name} ({self.hold_s:.1f} s){beside}"

    def every(self) -> Iterable[Fault]:
        yield self.fault
        for step in self.beside:
            yield from step.every()


async def perform(
    cluster: Cluster, steps: Sequence[Step], rng: random.Random, tell: Tell
) -> Verdict:
    """Play the steps. What the processes said and did stays in the cluster's folder."""
    topics = list(TOPICS)
    directory = cluster.directory
    async with cluster:
        await _make_topics(cluster)
        await cluster.load(topics)
        await cluster.healed()
        for step in steps:
            began_s = time.monotonic()
            await _play(cluster, step, rng)
            healing_s = time.monotonic()
            await cluster.healed()
            ended_s = time.monotonic()
            took = f"{healing_s - began_s:.1f} s, well again {ended_s - healing_s:.1f} s after"
            tell(f"{step.fault.name}: {took}")
            await asyncio.sleep(SETTLE_S)
        await cluster.quiet()
        final = await _read_all(cluster, queues_of(topics))
        dead = await _read_dead(cluster) if cluster.has_groups else {}
        verdict = _judge(directory, cluster, steps, final, dead, tell)
        if cluster.has_later:
            await _judge_later(directory, cluster, verdict)
        compared_to = await _compare(cluster, verdict)
        await _end(cluster)
        verdict.add("logs that differ", _differing_logs(cluster.members, compared_to))
        verdict.add("processes that ended by themselves", cluster.fallen)
        verdict.counts["damaged places found by verify"] += cluster.damage_found
    return verdict


async def _play(cluster: Cluster, step: Step, rng: random.Random) -> None:
    async with AsyncExitStack() as stack:
        if not step.fault.peaceful:
            stack.enter_context(cluster.recorder.fault(step.fault.name))
        block = step.fault.inject(cluster, rng)
        if isinstance(block, AbstractContextManager):
            stack.enter_context(block)
        else:
            await stack.enter_async_context(block)
        await asyncio.sleep(step.hold_s)
        for other in step.beside:
            await _play(cluster, other, rng)


async def _make_topics(cluster: Cluster) -> None:
    client = cluster.client(cluster.writer())
    try:
        for topic in (*TOPICS, *(LATER_TOPICS if cluster.has_later else ())):
            await client.admin.PutTopic(pb.PutTopicRequest(topic=config_of(topic)))
        if cluster.has_later:
            sent = await client.send(ASKED, 0, *(name.encode() for name in asked.MESSAGES))
            assert sent.status == pb.SEND_STATUS_SEND_OK, sent
    finally:
        await client.close()


# --- the end --------------------------------------------------------------------------------------


async def _read_all(cluster: Cluster, queues: Iterable[Queue]) -> dict[Queue, Held]:
    """Every queue from its beginning to its end, as the writer serves it."""
    client = cluster.client(cluster.writer())
    try:
        return {queue: await _read(client, queue) for queue in queues}
    finally:
        await client.close()


async def _read(client: BrokerClient, queue: Queue) -> Held:
    ref = common.QueueRef(topic=queue[0], queue_id=queue[1])
    [bounds] = (await client.stub.QueryQueues(pb.QueryQueuesRequest(queues=[ref]))).queues
    bodies = await client.bodies(*queue, bounds.min_offset)
    names = [body.partition(b" ")[0].decode() for body in bodies]
    return Held(bounds.generation, names, bounds.min_offset)


async def _read_dead(cluster: Cluster) -> dict[str, Sequence[str]]:
    """The dead letters of each group."""
    client = cluster.client(cluster.writer())
    try:
        letters: dict[str, Sequence[str]] = {}
        for group in (ORDERED, RETRIED):
            there = await end_of(client, dlq_topic(group), 0)
            letters[group] = (await _read(client, (dlq_topic(group), 0))).messages if there else ()
        return letters
    finally:
        await client.close()


def _judge(
    directory: Path,
    cluster: Cluster,
    steps: Sequence[Step],
    final: dict[Queue, Held],
    dead: dict[str, Sequence[str]],
    tell: Tell,
) -> Verdict:
    records = cluster.lease_records()
    took_over = [
        after
        for before, after in pairwise(records)
        if after["holder_id"] != before["holder_id"] and not before["released"]
    ]
    power_cuts = max((fault.powerless for step in steps for fault in step.every()), default=0)
    firm, lit = (
        frozenset(
            name
            for name, mode in TOPICS.items()
            if mode.keeps(took_over=bool(took_over), power_cuts=cuts, members=len(cluster.members))
        )
        for cuts in (power_cuts, 0)
    )
    history = History.read(directory.glob("*.jsonl"))
    for name, gap_s in gaps(history):
        tell(f"  longest time without an acknowledgement around {name}: {gap_s:.1f} s")
    verdict = judge(
        history,
        final,
        firm,
        hasty=frozenset({EAGER}),
        single=frozenset(map(single.name_of, TOPICS)),
    )
    for name, letters in dead.items():
        group = Group(
            name, frozenset(consumers.TOPICS), letters, consumers.TRIES_MAX, name == ORDERED
        )
        found = judge_group(history, final, firm, group)
        verdict.broken += found.broken
        verdict.counts.update(found.counts)
    if not any(fault.fills for step in steps for fault in step.every()):
        verdict.add("messages gone from a queue's front", gone(final))
    verdict.add("messages of a topic's former life in its new one", revenants(history, final))
    verdict.add("generations used again", reused_generations(history))
    verdict.add("acknowledged messages lost from disks", lost_from_disk(history, final, lit))
    verdict.counts["acknowledged messages of deleted topics"] += sum(
        1 for rebirth in history.rebirths for _ in bygone(history, rebirth)
    )
    verdict.counts["acknowledged messages on a disk before all power went"] += sum(
        1 for darkness in history.darknesses for _ in on_disk_before(history, darkness)
    )
    verdict.counts["unplanned take-overs"] += len(took_over)
    verdict.counts["planned hand-overs"] += sum(record["released"] for record in records)
    verdict.counts["epochs in the lease"] += len(openings(records))
    verdict.add("epochs with two writers", two_writers(openings(records)))
    return verdict


async def _judge_later(directory: Path, cluster: Cluster, verdict: Verdict) -> None:
    client = cluster.client(cluster.writer())
    try:
        ends = await read_ends(client)
    finally:
        await client.close()
    history = _deliveries(directory)
    for found in (judge_deliveries(history, ends), judge_questions(history, asked.VERDICTS)):
        verdict.broken += found.broken
        verdict.counts.update(found.counts)


def _deliveries(directory: Path) -> DeliveryHistory:
    return DeliveryHistory.read([*directory.glob(f"*.{HISTORY}"), directory / "faults.jsonl"])


def openings(records: Sequence[dict[str, Any]]) -> list[Opening]:
    """Who opened which epoch, by the lease as it was written."""
    return [
        Opening(after["epoch"], after["holder_id"])
        for before, after in pairwise([{"epoch": 0}, *records])
        if after["epoch"] != before["epoch"]
    ]


def gaps(history: History) -> list[tuple[str, float]]:
    """For each fault the longest time in which no send was acknowledged, from a second before it
    until the next one, at most so long behind it as all may take to be well again.
    """
    acknowledged = sorted(s.ended_s for s in history.sends.values() if s.outcome is Outcome.OK)
    faults: list[Disturbance] = []
    for fault in sorted(history.disturbances, key=lambda fault: fault.began_s):
        if (
            not faults or fault.began_s > faults[-1].ended_s
        ):  # those beside another one count with it
            faults.append(fault)
    found = []
    for number, fault in enumerate(faults, 1):
        next_s = faults[number].began_s if number < len(faults) else math.inf
        until_s = min(next_s, fault.ended_s + HEALED_S)
        near = [at_s for at_s in acknowledged if fault.began_s - 1.0 <= at_s <= until_s]
        found.append((fault.name, max((b - a for a, b in pairwise(near)), default=math.inf)))
    return found


async def _compare(cluster: Cluster, verdict: Verdict) -> tuple[int, int]:
    """The range in which all logs must be the same, by the members' own word."""
    sums = await brokers.compare_logs(cluster.connection)
    verdict.add("logs that differ", [str(sums)] if not all(view.equal for view in sums) else [])
    verdict.counts["bytes of log compared"] += sums[0].to_offset - sums[0].from_offset
    return sums[0].from_offset, sums[0].to_offset


async def _end(cluster: Cluster) -> None:
    """All processes in good order, the writer last: nobody is to take over."""
    writer = cluster.writer()
    for machine in [*(m for m in cluster.members if m is not writer), writer, cluster.pullhold]:
        status = machine.end()
        assert status == 0, f"{machine.name}: {status}"


def _differing_logs(members: Sequence[Member], compared: tuple[int, int]) -> Iterable[str]:
    """The same with our own eyes: the bytes of the files, and the files of epochs."""
    start, end = compared
    first, *others = [Row(member.store / "commitlog") for member in members]
    kept = {m.member_id: read_epochs(m.store / "cometmq.epochs") for m in members}
    for member, row in zip(members[1:], others, strict=True):
        if row.read(start, end) != first.read(start, end):
            yield f"member {member.member_id} and {members[0].member_id} in [{start}, {end})"
        row.close()
    first.close()
    yield from differing_epochs(kept)
