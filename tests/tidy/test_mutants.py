"""The faults of ``scripts/mutants.toml`` can be made in the code, and their tests are there."""

from __future__ import annotations

from collections import Counter

from scripts.mutants import ROOT, mutants, row_of, without_mutant

_FORMS = (("def", "("), ("class", "("), ("class", ":"))


def test_every_fault_can_be_made() -> None:
    stale = [m for m in mutants() if (ROOT / m.file).read_text().count(m.find) != 1]
    assert not stale, "their text is not there, or not once: see scripts/mutants.toml"


def test_no_fault_is_made_twice() -> None:
    counts = Counter((m.file, " ".join(m.find.split()), " ".join(m.put.split())) for m in mutants())
    assert not [fault for fault, count in counts.items() if count > 1]


def is_there(test: str) -> bool:
    """A class may have inherited the test that is named behind it."""
    path, _, names = test.partition("[")[0].partition("::")
    if not names or not (ROOT / path).exists():
        return (ROOT / path).exists()
    name, text = names.partition("::")[0], (ROOT / path).read_text()
    return any(f"{word} {name}{end}" in text for word, end in _FORMS) or f"\n{name} = " in text


def test_every_test_that_looks_for_them_is_there() -> None:
    tests = {test for mutant in mutants() for test in mutant.tests.split()}
    assert not [test for test in tests if not is_there(test)]


def test_each_row_has_a_mutant() -> None:
    bare = without_mutant(mutants())
    assert not bare, "add a mutant that its tests notice to scripts/mutants.toml"


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
