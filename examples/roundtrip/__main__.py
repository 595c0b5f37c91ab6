"""``make run``: exit status 0 when every file came back byte for byte, lag counted in two ways is
the same, the members of each broker group have the same log, and every metric moved.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cometmq.admin import local
from cometmq.errors import CometError
from examples.roundtrip import job, lagging, screen, sources
from examples.roundtrip.job import Wishes
from examples.roundtrip.outcome import Outcome
from examples.roundtrip.stage import Folder
from examples.roundtrip.workers import WorkerFailed

INTERRUPTED = 130  # exit status, as shells have it
PLAIN_WIDTH = 110  # of what goes into a file or a pipe
PROJECT = Path(__file__).resolve().parent.parent.parent

KEPT = """
The cluster is still up, with all messages in it. Look at it with:

  export COMETMQ_LOCAL_DIR={cluster}
  .venv/bin/cometmq broker status
  .venv/bin/cometmq topic status {topic}
  .venv/bin/cometmq group progress {group}
  .venv/bin/cometmq message consume {topic} --count 5 --tag toml
  .venv/bin/cometmq message send {topic} 'hello' --tag txt
  .venv/bin/cometmq store dump "$COMETMQ_LOCAL_DIR/{member}/store"
  curl -s http://{metrics}/metrics | grep ^rocketmq_

Change the writer of {changing} again, or kill it (`cometmq local up` starts it again), and compare
the logs of all members:

  .venv/bin/cometmq cluster status
  .venv/bin/cometmq broker step-down --broker-group {changing}
  .venv/bin/cometmq broker checksum

Export offsets and compute the lag from them:

  .venv/bin/cometmq offsets export --output {snapshots}
  .venv/bin/python {spark}

Its name servers, for clients, are '{namesrv}'. Stop it, keeping the data:

  .venv/bin/cometmq local down
"""


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.roundtrip", description=__doc__)
    parser.add_argument(
        "--root",
        type=Path,
        default=sources.standard_library(),
        help="folder whose text files travel (default: the standard library, %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=PROJECT / "data" / "run",
        help="where the cluster and the copies are kept (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--no-lag", action="store_true", help="leave export and Spark job out")
    parser.add_argument(
        "--rate", type=int, default=0, help="messages a second of each producer (default: no limit)"
    )
    return parser.parse_args(argv)


def how_to_use(folder: Folder) -> str:
    cluster = local.status(folder.cluster)
    assert cluster is not None
    return KEPT.format(
        cluster=shlex.quote(str(folder.cluster)),
        topic=job.TOPIC,
        group=job.GROUP,
        changing=job.CHANGING,
        member=cluster.brokers[0].name,
        metrics=cluster.brokers[0].metrics_address,
        snapshots=shlex.quote(str(folder.snapshots)),
        spark=shlex.join(lagging.spark_arguments(folder)),
        namesrv=cluster.namesrv,
    )


async def run(wishes: Wishes, console: Console) -> Outcome:
    """The job; SIGTERM ends it as Ctrl-C does: in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await job.run(wishes, console)


def main(argv: Sequence[str]) -> int:
    arguments = arguments_of(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    folder = Folder(arguments.folder.resolve())
    wishes = Wishes(
        root=arguments.root.resolve(),
        folder=folder,
        rate=arguments.rate,
        keep=arguments.keep,
        lag=not arguments.no_lag,
    )
    try:
        outcome = asyncio.run(run(wishes, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped, the cluster too")
        return INTERRUPTED
    except (CometError, WorkerFailed, FileExistsError, TimeoutError) as error:
        text = f"{type(error).__name__}: {error}"
        console.print(text, style="red", markup=False, soft_wrap=True)
        return 1
    screen.show(console, outcome)
    if arguments.keep:
        console.print(how_to_use(folder), markup=False, soft_wrap=True)
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
