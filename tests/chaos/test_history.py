from __future__ import annotations

from math import inf
from pathlib import Path

from tests.support.faults.history import Disturbance, History, Outcome, Recorder, Seen, Step

QUEUE = ("T", 1)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with Recorder(path) as recorder:
        recorder.send("a/0", QUEUE)
        recorder.sent("a/0", Outcome.OK, 7, 4711)
        recorder.send("a/1", QUEUE)
        recorder.seen("r", QUEUE, "a/0", offset=7, generation=3)
        recorder.step("r", QUEUE, Step.COMMITTED, (3, 8))
        with recorder.fault("kill"):
            pass
    history = History.read([path])
    first, second = history.sends.values()
    assert (first.outcome, first.offset, first.log_offset) == (Outcome.OK, 7, 4711)
    assert first.began_s <= first.ended_s < second.began_s
    assert (first.producer, second.number, second.queue) == ("a", 1, QUEUE)
    seen, place = history.reads
    assert isinstance(seen, Seen)
    assert seen[1:] == ("r", QUEUE, 3, 7, "a/0")
    assert place[1:] == ("r", QUEUE, Step.COMMITTED, (3, 8))
    [(name, began_s, ended_s)] = history.disturbances
    assert name == "kill"
    assert began_s <= ended_s


def test_what_happens_to_all_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with Recorder(path) as recorder:
        recorder.send("a/0", QUEUE)
        recorder.refused("a/0", "DISK_FULL")
        recorder.dark(4711)
        recorder.reborn("T", 1.5, {0: 7, 1: 8})
    history = History.read([path])
    [send] = history.sends.values()
    assert (send.outcome, send.refusal) == (Outcome.REFUSED, "DISK_FULL")
    assert send.began_s <= send.ended_s
    [(dark_s, on_disk)] = history.darknesses
    [(topic, began_s, ended_s, generations)] = history.rebirths
    assert (on_disk, topic, began_s, generations) == (4711, "T", 1.5, {0: 7, 1: 8})
    assert send.ended_s <= dark_s <= ended_s
    assert history.of_former_life(send) == (send.began_s <= ended_s)


def test_what_is_unfinished_is_unknown_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with Recorder(path) as recorder:
        recorder.send("a/0", QUEUE)
        recorder.send("a/1", QUEUE)
    path.write_bytes(path.read_bytes()[:-5])
    [send] = History.read([path]).sends.values()
    assert (send.message, send.outcome, send.ended_s) == ("a/0", Outcome.UNKNOWN, inf)


def test_events_of_several_files_are_one_history(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Recorder(tmp_path / name) as recorder:
            recorder.seen(name, QUEUE, "a/0", offset=0)
            recorder.seen(name, QUEUE, "a/1", offset=1)
    history = History.read([tmp_path / "one", tmp_path / "two"])
    assert [len(events) for events in history.readers().values()] == [2, 2]


def test_a_fault_is_felt_for_a_while() -> None:
    history = History(disturbances=[Disturbance("kill", 10.0, 20.0)])
    assert history.disturbed(15.0, 16.0, 0.0)
    assert history.disturbed(5.0, 10.0, 0.0)
    assert history.disturbed(24.0, 30.0, 5.0)
    assert not history.disturbed(5.0, 9.0, 5.0)
    assert not history.disturbed(26.0, 30.0, 5.0)
