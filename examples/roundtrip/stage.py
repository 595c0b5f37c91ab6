"""Where the job plays: its folder, and the cluster in it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cometmq.admin import local
from cometmq.admin.local import LocalCluster

NAMESRV_COUNT = 2
BROKER_COUNT = 2
SLAVES_PER_BROKER = 1
PULLHOLD_COUNT = 1
LOG_FILE_BYTES = 32 * 1024 * 1024  # small enough that the log of each broker has several files
# A group whose writer dies stands still for its lease and a second or two. The default, 6 s, is for
# machines that also do other things; the whole job takes less than a minute.
LEASE_S, RENEW_S = 3.0, 1.0
OPTIONS = {
    "mapped_file_size_commit_log": str(LOG_FILE_BYTES),
    "replication_mode": "APPENDED",  # nothing is acknowledged that only one member has
    "lease_duration_s": str(LEASE_S),
    "lease_renew_s": str(RENEW_S),
}
MARK = "made-by-roundtrip"  # only a folder with this file in it is ever emptied


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the job keeps everything."""

    path: Path

    @property
    def cluster(self) -> Path:
        return self.path / "cluster"

    @property
    def copies(self) -> Path:
        """The files as they came back."""
        return self.path / "files"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def snapshots(self) -> Path:
        """Exported offsets."""
        return self.path / "lag" / "snapshots"

    @property
    def results(self) -> Path:
        """What Spark made of them."""
        return self.path / "lag" / "results"

    def spool(self, number: int) -> Path:
        return self.path / f"consumer-{number}.spool"

    async def renew(self) -> None:
        """Empties the folder, after stopping the cluster that an earlier run has kept in it."""
        if self.path.exists() and any(self.path.iterdir()):
            if not (self.path / MARK).exists():
                raise FileExistsError(f"{self.path} holds something else: name another folder")
            await local.down(self.cluster)
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MARK).touch()


@asynccontextmanager
async def cluster_in(folder: Folder, keep: bool) -> AsyncIterator[LocalCluster]:
    """The cluster; it stops at the end, whatever happens, unless it is to be kept."""
    cluster = await local.up(
        folder.cluster,
        namesrv_count=NAMESRV_COUNT,
        broker_count=BROKER_COUNT,
        slave_count=SLAVES_PER_BROKER,
        pullhold_count=PULLHOLD_COUNT,
        options=OPTIONS,
    )
    try:
        yield cluster
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            await local.down(folder.cluster)
