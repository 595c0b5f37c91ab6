"""The faults of ``scripts/mutants.toml`` can be made in the code, and their tests are there."""

from __future__ import annotations

from scripts.mutants import ROOT, mutants, row_of


def test_every_fault_can_be_made() -> None:
    stale = [m for m in mutants() if (ROOT / m.file).read_text().count(m.find) != 1]
    assert not stale, "their text is not there, or not once: see scripts/mutants.toml"


def test_every_test_that_looks_for_them_is_there() -> None:
    paths = {path.partition("::")[0] for mutant in mutants() for path in mutant.tests.split()}
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_a_mutant_of_a_row_plays_tests_that_the_row_names() -> None:
    assert all(mutant.title for mutant in mutants()), "each breaks a rule, or a row"
    strange = [
        (mutant.row, test)
        for mutant in mutants()
        if mutant.row
        for test in mutant.tests.split()
        if not row_of(mutant).names(test)
    ]
    assert not strange
