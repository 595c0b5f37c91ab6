from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import native
from cometmq.errors import StoreFailed
from cometmq.native.interface import SharedOffsets
from cometmq.store.disk.files import OsFile, OsFiles
from cometmq.store.layout import StorePaths
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.log.levels import PlainSharedOffsets, new_shared_offsets

SIZE = 1 << 20
needs_native = pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")


class Pipe:
    """A pipe for notifications, and what reads it."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK)

    def heard(self) -> list[int]:
        try:
            return list(array("q", os.read(self._read_fd, 1 << 16)))
        except BlockingIOError:
            return []

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.write_fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CommitLog]:
    (tmp_path / "commitlog").mkdir()
    log = CommitLog(StorePaths(tmp_path), OsFiles(), SIZE)
    yield log
    log.close()


def put(log: CommitLog, size: int) -> int:
    """Appends so much that somebody waits for; returns the end."""
    log.append(log.place(size), bytes(size), 7)
    log.offsets.demand(log.end[0])
    return log.end[0]


def levels_of(appended: int, demanded: int, flushed: int) -> SharedOffsets:
    offsets = new_shared_offsets()
    offsets.flush_to(flushed, 1)
    offsets.append_to(appended, 2)
    offsets.demand(demanded)
    return offsets


# --- both implementations -------------------------------------------------------------------------


@pytest.mark.usefixtures("implementation")
def test_they_begin_at_the_start_and_keep_what_is_flushed() -> None:
    offsets = new_shared_offsets()
    assert offsets.flushed() == (0, 0)
    offsets.append_to(2**62, 2**61)
    offsets.demand(2**62)
    assert offsets.flushed() == (0, 0)
    offsets.flush_to(2**62, 2**61)
    assert offsets.flushed() == (2**62, 2**61)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("appended", "demanded", "flushed"),
    [
        (50, 0, 0),  # nobody waits
        (50, 20, 20),  # nobody waits any more
        (20, 50, 20),  # for what is not there
        (101, 101, 50),  # it goes on in the next file
    ],
)
def test_nothing_is_synced(fd: int, pipe: Pipe, appended: int, demanded: int, flushed: int) -> None:
    offsets = levels_of(appended, demanded, flushed)
    assert offsets.sync(fd, 100, pipe.write_fd) == 0
    assert (offsets.flushed(), pipe.heard()) == ((flushed, 1), [])


@pytest.mark.usefixtures("implementation")
def test_a_log_is_flushed_in_either_way(log: CommitLog, pipe: Pipe) -> None:
    end = put(log, 100)
    count = int(log.flush_while_wanted(pipe.write_fd))
    assert (count or log.flush()) in (1, end)
    assert log.flushed == log.end == (end, 7)
    assert not log.flush_while_wanted(pipe.write_fd), "nobody waits any more"
    durations = pipe.heard()
    assert len(durations) == count
    assert all(0 < duration < 60e9 for duration in durations)


calls = st.tuples(st.sampled_from(["append_to", "demand", "flush_to", "sync"]), st.integers(0, 9))


@pytest.mark.usefixtures("implementation")
@given(st.lists(calls))
def test_any_calls_in_any_order(drawn: list[tuple[str, int]]) -> None:
    with TemporaryFile() as file, closing(Pipe()) as pipe:
        play(drawn, file.fileno(), pipe.write_fd)


def play(drawn: list[tuple[str, int]], fd: int, write_fd: int) -> None:
    """Levels against a few numbers; plain Python never syncs by itself."""
    offsets = new_shared_offsets()
    appended = flushed = (0, 0)
    demanded = 0
    for time_ms, (name, position) in enumerate(drawn):
        if name == "append_to":
            appended = (position, time_ms)
            offsets.append_to(*appended)
        elif name == "demand":
            demanded = position
            offsets.demand(demanded)
        elif name == "flush_to":
            flushed = (position, time_ms)
            offsets.flush_to(*flushed)
        else:
            due = demanded > flushed[0] and flushed[0] < appended[0] <= position
            count = offsets.sync(fd, position, write_fd)
            assert count == (due and not isinstance(offsets, PlainSharedOffsets))
            flushed = appended if count else flushed
        assert offsets.flushed() == flushed


# --- the loop of the C extension ------------------------------------------------------------------


@needs_native
def test_one_sync_is_for_all_who_wait(fd: int, pipe: Pipe) -> None:
    offsets = levels_of(100, 30, 10)
    assert offsets.sync(fd, 100, pipe.write_fd) == 1
    assert offsets.flushed() == (100, 2), "up to what was appended, with its time"
    assert len(pipe.heard()) == 1


@needs_native
def test_it_goes_on_while_others_append(log: CommitLog, pipe: Pipe) -> None:
    """A thread appends and waits for the disk, again and again; the other one syncs by itself."""
    put(log, 8)
    count, heard = 2000, list[int]()

    def append() -> None:
        for _ in range(count):
            end = put(log, 8)
            while log.flushed[0] < end:
                flushed, appended = log.flushed[0], log.end[0]
                assert flushed <= appended
        heard.extend(pipe.heard())

    appending = threading.Thread(target=append)
    appending.start()
    syncs = 0
    while appending.is_alive() or log.flushed != log.end:
        syncs += log.flush_while_wanted(pipe.write_fd)
    appending.join()
    assert log.flushed == log.end == ((count + 1) * 8, 7)
    assert len(heard) + len(pipe.heard()) >= count >= syncs > 0


@needs_native
def test_it_leaves_a_log_that_goes_on_in_another_file(log: CommitLog, pipe: Pipe) -> None:
    put(log, SIZE - 100)
    assert log.flush_while_wanted(pipe.write_fd)
    end = put(log, 200)
    assert not log.flush_while_wanted(pipe.write_fd)
    assert log.flushed[0] == SIZE - 100, "the first file has got its end mark since"
    assert log.flush() == end
    end = put(log, 200)
    assert log.flush_while_wanted(pipe.write_fd)
    assert log.flushed[0] == end


@needs_native
def test_a_log_may_go_on_in_another_file_at_any_moment(fd: int, pipe: Pipe) -> None:
    """Also between the look at where it ends and the sync: what lies there was not synced."""
    offsets, stop, behind = new_shared_offsets(), 600_000, 1_000_000
    offsets.demand(behind)

    def append() -> None:
        for position in range(stop):
            offsets.append_to(behind, 1)
            offsets.append_to(position, 1)

    appending = threading.Thread(target=append)
    appending.start()
    while appending.is_alive():
        offsets.sync(fd, stop, pipe.write_fd)
    appending.join()
    offsets.sync(fd, stop, pipe.write_fd)
    assert offsets.flushed()[0] == stop - 1


@needs_native
def test_it_goes_up_to_the_end_of_a_file(log: CommitLog, pipe: Pipe) -> None:
    put(log, 100)
    log.end_file()
    log.offsets.demand(SIZE)
    assert log.flush_while_wanted(pipe.write_fd)
    assert log.flushed[0] == SIZE
    assert not log.flush_while_wanted(pipe.write_fd), "the next file is not there yet"


@needs_native
def test_a_refusal_of_the_disk_ends_it(log: CommitLog, pipe: Pipe) -> None:
    put(log, 100)
    assert log.flush_while_wanted(pipe.write_fd)
    put(log, 100)
    [segment] = log.segments
    assert isinstance(segment.file, OsFile)
    os.dup2(pipe.write_fd, segment.file._fd)  # a pipe cannot be synced
    with pytest.raises(StoreFailed, match=r"cannot sync .*: Invalid argument"):
        log.flush_while_wanted(pipe.write_fd)
    assert log.flushed[0] == 100
    assert len(pipe.heard()) == 1


@needs_native
def test_a_file_that_is_closed_is_not_synced(log: CommitLog, pipe: Pipe) -> None:
    put(log, 100)
    log.close()
    assert not log.flush_while_wanted(pipe.write_fd)
    assert log.flushed[0] == 0


@needs_native
def test_a_bell_that_nobody_hears_stops_nothing(fd: int, pipe: Pipe) -> None:
    os.write(pipe.write_fd, bytes(1 << 16))  # it is full
    offsets = new_shared_offsets()
    for position in (1, 2):
        offsets.append_to(position, position)
        offsets.demand(position)
        assert offsets.sync(fd, 10_000, pipe.write_fd) == 1
    assert offsets.flushed() == (2, 2)
    assert pipe.heard() == [0] * ((1 << 16) // 8)
