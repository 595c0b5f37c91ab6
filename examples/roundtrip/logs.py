"""Are the logs of a broker group's members the same, byte for byte? Told by the members while they
run, and by their files afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cometmq.admin import brokers
from cometmq.admin.connection import Connection, until
from cometmq.admin.local import LocalCluster
from cometmq.admin.views import LogChecksumView

CAUGHT_UP_S_MAX = 30.0
READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogCopy:
    """One member's log in the range that all members of its group have, summed twice."""

    told: LogChecksumView  # by the member
    file_sha256: str  # from its files


async def compare(connection: Connection) -> list[LogChecksumView]:
    """Checksums of all members, once every follower has everything. Errors: TimeoutError, and those
    of the catalogue.
    """

    async def caught_up() -> bool:
        members = await brokers.describe(connection)
        return all(member.behind_bytes == 0 for member in members)

    if not await until(caught_up, CAUGHT_UP_S_MAX):
        raise TimeoutError(f"a slave is still behind after {CAUGHT_UP_S_MAX:.0f} s")
    return await brokers.compare_logs(connection)


def read_again(cluster: LocalCluster, told: Sequence[LogChecksumView]) -> list[LogCopy]:
    """The same ranges from the files of the members' stores."""
    names = {(p.broker_group, p.member_id): p.name for p in cluster.brokers}
    copies = []
    for view in told:
        store = cluster.directory / names[view.broker_group, view.member_id] / "store"
        digest = sha256(store / "commitlog", view.from_offset, view.to_offset)
        copies.append(LogCopy(view, digest))
    return copies


def sha256(commitlog: Path, from_offset: int, to_offset: int) -> str:
    """Of a range of a log in its files."""
    digest = hashlib.sha256()
    for piece in pieces(commitlog, from_offset, to_offset):
        digest.update(piece)
    return digest.hexdigest()


def pieces(commitlog: Path, from_offset: int, to_offset: int) -> Iterator[bytes]:
    """A range of a log. Its files are named by the offsets of their first bytes."""
    for path in sorted(commitlog.iterdir()):
        start = int(path.name)
        at = max(from_offset, start)
        with path.open("rb") as file:
            file.seek(at - start)
            while at < to_offset and (piece := file.read(min(READ_BYTES, to_offset - at))):
                yield piece
                at += len(piece)


def complaints(copies: Sequence[LogCopy]) -> list[str]:
    """One sentence for each broker group whose members' logs are not one log."""
    found = [] if copies else ["no logs were compared"]
    for group in sorted({copy.told.broker_group for copy in copies}):
        its = [copy for copy in copies if copy.told.broker_group == group]
        sums = {text for copy in its for text in (copy.told.sha256, copy.file_sha256)}
        if len(its) < 2:
            found.append(f"{group} has no slave whose log could be compared")
        elif its[0].told.to_offset <= its[0].told.from_offset:
            found.append(f"the logs of {group} have no byte in common")
        elif len(sums) > 1:
            found.append(f"the logs of {group} differ")
    return found
