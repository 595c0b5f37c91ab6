"""Whatever the order and however often a line comes, every file is made once and right."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip.placing import Placer
from examples.roundtrip.sources import SourceFile, split

FILES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.sampled_from([b"x", b"\n"])).map(b"".join), min_size=1
)
Arrival = tuple[str, int, bytes]


def placer_for(contents: dict[str, bytes]) -> tuple[Placer, dict[str, bytes]]:
    """A placer and what it has finished; a file that is finished twice fails the test."""
    done: dict[str, bytes] = {}

    def finished(name: str, content: bytes) -> None:
        assert name not in done
        done[name] = content

    files = [SourceFile(n, len(split(data)), len(data)) for n, data in contents.items()]
    return Placer(files, finished), done


def arrivals_of(contents: dict[str, bytes]) -> list[Arrival]:
    found: list[Arrival] = []
    for name, data in contents.items():
        found += [(name, number, line) for number, line in enumerate(split(data), start=1)]
        if not data:
            found.append((name, 0, b""))
    return found


@given(FILES, st.randoms(use_true_random=False), st.integers(0, 20))
def test_files_come_back_from_any_order_with_duplicates(
    contents: dict[str, bytes], chance: random.Random, twice: int
) -> None:
    placer, done = placer_for(contents)
    sent = arrivals_of(contents)
    arriving = sent + [chance.choice(sent) for _ in range(twice)]
    chance.shuffle(arriving)
    for arrival in arriving:
        placer.place(*arrival)
    assert done == contents
    assert (placer.placed, placer.duplicates, placer.strays) == (len(sent), twice, 0)
    assert placer.complete
    assert not placer.missing()
    assert placer.placed_bytes == sum(map(len, contents.values()))


@given(FILES, st.data())
def test_one_line_short_is_not_complete(contents: dict[str, bytes], data: st.DataObject) -> None:
    placer, done = placer_for(contents)
    sent = arrivals_of(contents)
    lost = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
    for arrival in sent:
        placer.place(*arrival)
    assert not placer.complete
    assert placer.missing() == {lost[0]: 1}
    assert lost[0] not in done


def test_a_line_that_nobody_sent_is_a_stray() -> None:
    placer, done = placer_for({"a": b"one\n", "empty": b""})
    for name, number in [("a", 2), ("a", 0), ("a", -1), ("empty", 1), ("b", 1)]:
        placer.place(name, number, b"?")
    assert (placer.strays, placer.placed, done) == (5, 0, {})


def test_a_duplicate_never_replaces_the_first() -> None:
    placer, done = placer_for({"a": b"1\n2\n"})
    for line in (b"1\n", b"other\n"):
        placer.place("a", 1, line)
    placer.place("a", 2, b"2\n")
    assert done == {"a": b"1\n2\n"}
    assert placer.duplicates == 1
