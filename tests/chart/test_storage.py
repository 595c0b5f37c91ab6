"""The volumes that the chart asks for are large enough for the options that it gives: retention,
played on paper, always finds something to remove, so that no send is refused. Where they are not,
the notes say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import pytest

from cometmq.config import load
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.member.config import MemberConfig
from cometmq.member.state.retention import rules_of
from cometmq.store.retention import LogFile, Look, Space, decide
from tests.support.kube.chart import HELMS, Rendered, notes, rendered, template

GIB = 2**30
FILE_SYSTEM_SHARE = 0.05  # what a file system keeps of its volume
RECORD_BYTES, KEYS = 500, 2  # small messages cost most beside the log
NEVER_MS = 10**15  # a store time: no file is ever expired
FILES_PLAYED = 60
LOOKS = 10  # while one file fills: there are many more
# Of full log files that are left: a few, so that consumers have something to read.
FILES_KEPT_MIN = 4

SMALLER = (
    "--set",
    "broker.config.mapped_file_size_commit_log=67108864",
    "--set",
    "broker.config.state_copy_interval_bytes=67108864",
)


@dataclass
class Store:
    """A store alone on its volume, cut into files as its options say. Offsets of the log count from
    its beginning.
    """

    config: MemberConfig
    volume_bytes: int
    first: int = 0  # log file that is kept
    last: int = 0  # log file that is written
    copies: list[int] = field(default_factory=lambda: [0, 0])  # where copies of the state are
    refusing: bool = False

    @property
    def files_kept(self) -> int:
        return self.last - self.first

    def fill_a_file(self) -> None:
        """Another file is full; the one behind it is written, and one more made ready."""
        self.last += 1
        step = self.config.state_copy_interval_bytes
        self.copies += range(self.copies[-1] + step, self._end + 1, step)

    def look(self) -> None:
        """What retention does when it looks now."""
        verdict = decide(rules_of(self.config), self._seen())
        self.refusing = verdict.refuse
        self.first += len(verdict.remove)
        if verdict.waits_for_state:
            self.copies.append(self._end)

    @property
    def _end(self) -> int:
        return self.last * self.config.mapped_file_size_commit_log

    def _seen(self) -> Look:
        size = self.config.mapped_file_size_commit_log
        files = [LogFile(n * size, n * size + size, NEVER_MS) for n in range(self.first, self.last)]
        used = min(self.volume_bytes, self._used_bytes())
        space = Space(used, self.volume_bytes - used)
        return Look(files, 0, 12, [space], keep_from=self.copies[-2], refusing=self.refusing)

    def _used_bytes(self) -> int:
        config = self.config
        log = (self.files_kept + 2) * config.mapped_file_size_commit_log
        messages = self.files_kept * config.mapped_file_size_commit_log // RECORD_BYTES
        index_files = 1 + ceil(messages * KEYS / config.max_index_num)
        index = index_files * (4 * config.max_hash_slot_num + 20 * config.max_index_num)
        return log + messages * UNIT_BYTES + index


def play(store: Store) -> int:
    """Send until the volume is full, and on; the fewest full log files that were left once one had
    gone. 0: sends were refused.
    """
    fewest = FILES_PLAYED
    while store.last < FILES_PLAYED or not store.first:
        store.fill_a_file()
        for _ in range(LOOKS):
            store.look()
        if store.refusing:
            return 0
        if store.first:
            fewest = min(fewest, store.files_kept)
    return fewest


def stores(chart: Rendered, tmp_path: Path) -> Iterator[Store]:
    """One for each broker group of a rendered chart."""
    for member in chart.members():
        file = tmp_path / f"{member['metadata']['name']}.yaml"
        file.write_text(chart.config_text(member))
        environ = {"COMETMQ_LEASE": "kubernetes://namespace/name"}  # as the pod has it
        config = load(MemberConfig, argv=["--config", str(file)], environ=environ)
        (claim,) = member["spec"]["volumeClaimTemplates"]
        size = re.fullmatch(r"(\d+)Gi", claim["spec"]["resources"]["requests"]["storage"])
        assert size
        yield Store(config, round(int(size[1]) * GIB * (1 - FILE_SYSTEM_SHARE)))


@pytest.mark.parametrize("values", ["defaults", "three-groups"])
def test_a_volume_has_room_for_its_options(values: str, tmp_path: Path) -> None:
    found = list(stores(rendered(values), tmp_path))
    assert found
    for store in found:
        assert play(store) >= 2 * FILES_KEPT_MIN
    assert "are small" not in notes(values)


@pytest.mark.parametrize("gib", [2, 8, 15, 16])
@pytest.mark.parametrize("options", [(), SMALLER], ids=["default files", "small files"])
def test_a_volume_that_is_too_small_is_told(
    gib: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    values = ("--set", f"broker.storage.size={gib}Gi", *options)
    chart = Rendered("defaults", tuple(template(HELMS[-1], *values)))
    (store,) = stores(chart, tmp_path)
    kept = play(store)
    told = "are small" in notes("defaults", *values)
    assert told if kept < FILES_KEPT_MIN else kept
    assert told == (gib < 16 and not options)
