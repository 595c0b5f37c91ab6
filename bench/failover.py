"""``python -m bench failover``: how long a broker group stores nothing when its writer dies, and
when it hands its role over.

Several clusters, each a group with one slave and a topic that waits for it, with the default
options of everything. A producer of each sends 100 messages a second, whatever happens. The writers
are killed (kill -9) in turn, so that one cluster's fail-over does not meet another's; who was
killed is started again and follows. The new writer's log shows where the time goes:

detection     from the kill until somebody takes the lease: what was left of it, and a look at it
acquisition   until that is written, and the follower knows that its role ends
role change   the follower stops, and the writer begins, until it takes the store over
recovery      the state, and the epoch
ready         the parts of a writer, its epoch in the lease
first ack     the producer finds the new writer

Then groups hand over, as ``cometmq broker step-down`` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from bench.group import Groups, create_topic, groups, wait_for
from bench.processes import REPOSITORY
from bench.report import machine, markdown
from bench.stats import percentile
from bench.watching import Watch, producing
from cometmq.admin import brokers
from cometmq.admin.connection import Connection
from cometmq.model import ReplicationMode

TOPIC = "failover"
RATE = 100.0
BODY_BYTES = 1024
LEASE_S = 6.0  # the default
FAILOVER_S_MAX = LEASE_S + 3.0
HAND_OVER_S_MAX = 3.0
PERIOD_S = 14.0  # from one kill to the next in the same cluster
PARTS = ("detection", "acquisition", "role change", "recovery", "ready", "first ack")
EVENTS = {
    "takes": "takes the lease",
    "ends": "role ends",
    "open": "store open",
    "ready": "ready role=writer",
}
SECONDS = re.compile(r" seconds=(\S+)")


@dataclass(frozen=True, slots=True)
class Failover:
    """Seconds from the kill to the first acknowledgement, and its parts in their order."""

    seconds: float
    parts: Mapping[str, float]


def failover_of(killed_s: float, log: Sequence[str], acked_s: float) -> Failover:
    """``log``: the new writer's lines since the kill. ValueError when one is missing."""
    lines = {name: _line_of(event, log) for name, event in EVENTS.items()}
    at = {name: time_of(line) for name, line in lines.items()}
    seconds = SECONDS.search(lines["open"])
    if seconds is None:
        raise ValueError(f"no seconds in {lines['open']!r}")
    opening_s = at["open"] - float(seconds[1])
    ends = (at["takes"], at["ends"], opening_s, at["open"], at["ready"], acked_s)
    starts = (killed_s, *ends)
    parts = [end - start for start, end in zip(starts, ends, strict=False)]
    return Failover(acked_s - killed_s, dict(zip(PARTS, parts, strict=True)))


def _line_of(event: str, log: Sequence[str]) -> str:
    found = [line for line in log if f" {event}" in line]
    if not found:
        raise ValueError(f"the log does not say: {event}")
    return found[-1]


def time_of(line: str) -> float:
    """Of a log line; seconds since 1970."""
    return datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()


class Stage:
    """One cluster with its producer."""

    def __init__(self, group: Groups, watch: Watch) -> None:
        self._group = group
        self._watch = watch
        self.failovers: list[Failover] = []

    def kill(self) -> None:
        """Kill the writer, see the other take over, and get the first one back."""
        group = self._group
        old = group.lease().holder_id
        log = group.log_of(1 - old)
        log_start = log.stat().st_size
        killed_s = group.kill(old)

        def told() -> list[str]:
            with log.open("rb") as file:
                file.seek(log_start)
                return file.read().decode(errors="replace").splitlines()

        wait_for(lambda: any(EVENTS["ready"] in line for line in told()), "a new writer")
        lines = told()
        self._watch.wait_for_ack(time_of(_line_of(EVENTS["ready"], lines)), FAILOVER_S_MAX)
        gap = self._watch.silence(killed_s)
        assert gap is not None
        self.failovers.append(failover_of(killed_s, lines, gap[1]))
        group.start()
        group.wait_in_sync(0, 1)

    def kill_often(self, count: int, first_s: float) -> None:
        """One kill each period, the first at ``first_s`` of the monotonic clock."""
        for number in range(count):
            time.sleep(max(0.0, first_s + number * PERIOD_S - time.monotonic()))
            self.kill()

    def hand_over(self) -> float:
        """Seconds without an acknowledgement."""
        asked_s = time.time()
        asyncio.run(self._step_down())
        done_s = time.time()
        self._group.wait_in_sync(0, 1)
        self._watch.wait_for_ack(done_s, HAND_OVER_S_MAX)
        gap = self._watch.silence(asked_s)
        assert gap is not None
        return gap[1] - gap[0]

    async def _step_down(self) -> None:
        async with Connection(self._group.namesrv) as connection:
            await brokers.step_down(connection, "g1")


@contextmanager
def stages(folder: Path, count: int) -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        found = []
        for number in range(count):
            group = stack.enter_context(groups(folder / f"cluster-{number}", 1))
            create_topic(group.namesrv, TOPIC, ReplicationMode.APPENDED)
            work = producing(group.namesrv, TOPIC, rate=RATE, body_bytes=BODY_BYTES)
            found.append(Stage(group, stack.enter_context(work)))
        yield found


def run(
    folder: Path, clusters: int, kills: int, hand_overs: int
) -> tuple[list[Failover], list[float]]:
    """Kills of all clusters together; hand-overs one after the other."""
    with stages(folder, clusters) as found:
        started_s = time.monotonic()
        threads = []
        for number, stage in enumerate(found):
            first_s = started_s + number * PERIOD_S / clusters
            share = len(range(number, kills, clusters))
            threads.append(threading.Thread(target=stage.kill_often, args=(share, first_s)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pauses = [found[number % clusters].hand_over() for number in range(hand_overs)]
        return [one for stage in found for one in stage.failovers], pauses


def table(failovers: Sequence[Failover], pauses: Sequence[float]) -> str:
    columns = {name: [one.parts[name] for one in failovers] for name in PARTS}
    columns["fail-over"] = [one.seconds for one in failovers]
    columns["hand-over"] = list(pauses)
    header = ("seconds", "lowest", "median", "p90", "highest", "number")
    return markdown(header, [row(name, values) for name, values in columns.items() if values])


def row(name: str, values: Sequence[float]) -> tuple[str, ...]:
    figures = (min(values), percentile(values, 0.5), percentile(values, 0.9), max(values))
    return name, *(f"{figure:.2f}" for figure in figures), str(len(values))


def missed(failovers: Sequence[Failover], pauses: Sequence[float]) -> list[str]:
    """Which limits were not kept, by the slowest of all."""
    checks = {
        f"fail-over within {FAILOVER_S_MAX:g} s": [t.seconds for t in failovers],
        f"hand-over within {HAND_OVER_S_MAX:g} s": list(pauses),
    }
    limits = (FAILOVER_S_MAX, HAND_OVER_S_MAX)
    return [
        name
        for (name, values), limit in zip(checks.items(), limits, strict=True)
        if any(value > limit for value in values)
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench failover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clusters", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hand_overs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    failovers, pauses = run(
        folder / "failover", arguments.clusters, arguments.kills, arguments.hand_overs
    )
    print(f"{table(failovers, pauses)}\n\nmachine: {machine()}")
    result = {
        "machine": machine(),
        "failovers": [asdict(one) for one in failovers],
        "hand_overs_s": pauses,
    }
    (folder / "failover.json").write_text(json.dumps(result, indent=2) + "\n")
    if len(failovers) < arguments.kills:
        sys.exit(f"only {len(failovers)} of {arguments.kills} kills were measured")
    if limits := missed(failovers, pauses):
        sys.exit(f"not reached: {', '.join(limits)}")


if __name__ == "__main__":
    main(sys.argv[1:])
