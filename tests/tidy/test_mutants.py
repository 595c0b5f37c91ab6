"""The faults of ``scripts/mutants.toml`` can be made in the code, and their tests are there."""

from __future__ import annotations

from scripts.mutants import ROOT, mutants


def test_every_fault_can_be_made() -> None:
    stale = [m for m in mutants() if (ROOT / m.file).read_text().count(m.find) != 1]
    assert not stale, "their text is not there, or not once: see scripts/mutants.toml"


def test_every_test_that_looks_for_them_is_there() -> None:
    paths = {path.partition("::")[0] for mutant in mutants() for path in mutant.tests.split()}
    assert not [path for path in paths if not (ROOT / path).exists()]
