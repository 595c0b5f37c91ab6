"""What all tests share: hypothesis profiles, the seed, the slow tier, the list of what was skipped.

``--seed n`` (or ``TEST_SEED``) replays a run: it seeds hypothesis and the ``rng`` fixture.
``TEST_PROFILE`` chooses between ``quick`` (default: few examples, the same in every run) and
``ci`` (many, from the seed).
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadFileScheduling

from cometmq import native
from cometmq.store.disk.files import OsFiles, StrPath, Usage
from tests.support.faults import tally

TESTS = Path(__file__).parent
SPARK = "tests/spark/"
DEFAULT_SEED = 20260101
_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

# Neither has a deadline: on a shared machine one slow example would be a false alarm.
settings.register_profile(
    "quick",
    max_examples=50,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=_SLOW_MACHINES,
)
# Whether a test fails is all that is asked of a mutant: no simpler example is looked for.
settings.register_profile(
    "mutants", settings.get_profile("quick"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile(
    "ci",
    max_examples=500,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_MACHINES,
)
PROFILE = os.environ.get("TEST_PROFILE", "quick")
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cometmq")
    group.addoption("--slow", action="store_true", help="run the slow tests too")
    group.addoption(
        "--slow-share", type=int, default=1, help="of the slow tests run every n-th only"
    )
    group.addoption(
        "--seed",
        type=int,
        default=int(os.environ.get("TEST_SEED", DEFAULT_SEED)),
        help="seed of everything random",
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its own option
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None and PROFILE == "ci":
        config.option.hypothesis_seed = str(config.getoption("--seed"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis profile: {PROFILE}, replay with: --seed {config.getoption('--seed')}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of the test's own, from the run's seed and the test's name; shown on failure."""
    run_seed: int = request.config.getoption("--seed")
    number = zlib.crc32(request.node.nodeid.encode(), run_seed & 0xFFFF_FFFF)
    print(f"SEED={run_seed} (this test: {number})")
    return number


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Randomness that ``--seed`` replays."""
    return random.Random(seed)


# --- the machine's disk -------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stores in the tests' own folders do not clean up because the machine's disk is rather full.

    Disks that a test mounts are as full as they are.
    """
    machines = os.stat(tmp_path_factory.getbasetemp()).st_dev
    really = OsFiles.usage

    def usage(files: OsFiles, path: StrPath) -> Usage:
        if os.stat(path).st_dev == machines:
            return Usage(used_bytes=1 << 40, free_bytes=1 << 40)
        return really(files, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OsFiles, "usage", usage)
        yield


# --- plain Python and the C extension -----------------------------------------------------------


@pytest.fixture(scope="module", params=["plain", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests twice: what the C extension does must not differ in a byte."""
    chosen = None if request.param == "plain" else native.accelerator
    if chosen is None and request.param == "native":
        pytest.skip("the C extension was not built, or COMETMQ_NATIVE=0")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("cometmq.") and hasattr(module, "accelerator"):
                patch.setattr(module, "accelerator", chosen)
        yield request.param


# --- the slow tier ------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    chosen = _share(slow, config) if config.getoption("--slow") else []
    kept = {*quick, *chosen}
    left_out = [item for item in items if item not in kept]
    items[:] = _in_order([item for item in items if item in kept])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        _note(f"{item.nodeid}: slow (make test-long runs it)" for item in left_out)


def _share(slow: list[pytest.Item], config: pytest.Config) -> Sequence[pytest.Item]:
    share: int = config.getoption("--slow-share")
    return slow[config.getoption("--seed") % share :: share]


# --- what was left out --------------------------------------------------------------------------


def _note(lines: Iterable[str]) -> None:
    """Add lines to the list that `make test` ends with; nothing to do outside of make."""
    path = os.environ.get("TEST_SKIPPED")
    if path:
        Path(path).parent.mkdir(exist_ok=True)
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    _note([f"{report.nodeid}: {_reason(report)}" for report in skipped])
    played_again = terminalreporter.stats.get("rerun", [])
    _note([f"{report.nodeid}: failed and was played once more" for report in played_again])
    if tally.TALLY:
        terminalreporter.section("stores and what was done to them")
        for line in tally.lines():
            terminalreporter.write_line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The text that was given to skip()."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


# --- several processes (pytest-xdist) -----------------------------------------------------------

# The folders whose files take longest begin, so that all processes end at the same time.
LONGEST = ("spark", "e2e", "faults", "sim", "regressions", "integration", "model", "chart")


class OneProcessForAFile(LoadFileScheduling):  # type: ignore[misc]  # it is not typed
    """A file's tests stay together, for they share clusters; those of the lag job, for they share a
    JVM.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SPARK if file.startswith(SPARK) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneProcessForAFile | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests, which says little
    return OneProcessForAFile(config, log)


def _in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}

    def rank(item: pytest.Item) -> int:
        return ranks.get(item.path.relative_to(TESTS).parts[0], len(ranks))

    return sorted(items, key=rank)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs a part of the tests tells what it has counted."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["tally"] = dict(tally.TALLY)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    tally.TALLY.update(getattr(node, "workeroutput", {}).get("tally", {}))
