from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import reexec
from cometmq.reexec import RoleChange

ROOT = Path(__file__).parents[2]
CHANGE = RoleChange("successor", "handover", {"port": 1, "internal_port": 2}, 77, (1.0, 2.5))

# What the process does before it is replaced, and what its successor tells.
PREDECESSOR = """
import os, signal, socket, sys, threading
from cometmq import reexec
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
kept = [open(os.devnull) for _ in range(5)]
listening = socket.create_server(("127.0.0.1", 0))
for descriptor in (kept[0].fileno(), listening.fileno()):
    os.set_inheritable(descriptor, True)
os.dup2(kept[1].fileno(), 63, inheritable=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("before")
change = reexec.RoleChange("successor", "handover", {"port": listening.getsockname()[1]}, 77)
reexec.replace_process(["--a", "b c"], change.after(None, 5.0))
"""
SUCCESSOR = """
import json, os, signal, sys
from cometmq import reexec
mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
ignored = [n for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
           if signal.getsignal(n) is not signal.SIG_DFL]
descriptors = [int(n) for n in os.listdir("/proc/self/fd") if int(n) > 2]
open_ones = [n for n in descriptors if os.path.exists(f"/proc/self/fd/{n}")]
change = reexec.received(os.environ)
print(json.dumps({
    "argv": sys.argv[1:], "blocked": list(mask), "ignored": ignored, "open": open_ones,
    "module": change.module, "reason": change.reason, "log_end": change.log_end,
    "changed_s": change.changed_s, "ports": change.ports,
    "left": reexec.VARIABLE in os.environ, "pid": os.getpid(), "flags": sys.flags.isolated,
    "safe_path": sys.flags.safe_path,
}))
"""


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    """What a successor finds, after a predecessor that left everything in disorder."""
    (tmp_path / "successor.py").write_text(SUCCESSOR)
    (tmp_path / "predecessor.py").write_text(textwrap.dedent(PREDECESSOR))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "predecessor"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    first, second = output.splitlines()
    assert first == "before"
    found: dict[str, Any] = json.loads(second)
    assert found["pid"] == process.pid
    return found


def test_a_successor_begins_as_if_started_by_a_shell(told: dict[str, Any]) -> None:
    assert sorted(told["blocked"]) == sorted(reexec.HELD_SIGNALS), "held for the successor"
    assert told["ignored"] == []
    assert told["open"] == []
    assert told["argv"] == ["--a", "b c"]
    assert told["safe_path"], "flags of the interpreter stay"


def test_a_successor_is_told_once(told: dict[str, Any]) -> None:
    assert (told["module"], told["reason"], told["log_end"]) == ("successor", "handover", 77)
    assert told["changed_s"] == [5.0]
    assert list(told["ports"]) == ["port"]
    assert not told["left"], "children of the successor are told nothing"


def test_a_signal_to_stop_between_two_programs_reaches_the_second(tmp_path: Path) -> None:
    (tmp_path / "successor.py").write_text(
        "from cometmq.rpc.process import StopSignal\nprint(StopSignal().is_set)\n"
    )
    (tmp_path / "predecessor.py").write_text(
        "import os, signal\nfrom cometmq import reexec\n"
        "reexec.hold_signals()\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "reexec.replace_process([], reexec.RoleChange('successor', 'handover'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-m", "predecessor"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_what_is_encoded_is_received() -> None:
    environ = {reexec.VARIABLE: CHANGE.encode(), "other": "x"}
    assert reexec.received(environ) == CHANGE
    assert environ == {"other": "x"}
    assert reexec.received(environ) is None


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["python", "-P", "-m", "services.haslave", "--port", "0"], ["-P"]),
        (["python", "-m", "a", "-m", "b"], []),
        (["python", "script.py"], []),
    ],
)
def test_interpreter_flags(command: list[str], flags: list[str]) -> None:
    assert reexec.interpreter_flags(command) == flags


def changes(*times_s: float) -> RoleChange:
    change: RoleChange | None = None
    for time_s in times_s:
        change = RoleChange("m", "r").after(change, time_s)
    assert change is not None
    return change


def test_three_changes_a_minute_cost_nothing() -> None:
    assert reexec.delay_s(None, 0.0) == 0.0
    assert reexec.delay_s(changes(0.0, 1.0, 2.0), 2.0) == 0.0
    assert reexec.delay_s(changes(0.0, 1.0, 2.0, 61.5), 61.5) == 0.0


def test_more_wait_longer_each_time() -> None:
    delays = [reexec.delay_s(changes(*map(float, range(n))), float(n)) for n in range(4, 12)]
    assert delays[:4] == [2.0, 4.0, 8.0, 16.0]
    assert delays[4:] == [reexec.DELAY_MAX_S] * 4


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=60))
def test_a_process_that_waits_as_told_changes_ever_more_rarely(gaps_s: list[float]) -> None:
    """However eager, no minute sees more than three changes and those that were waited for."""
    now_s, change, times_s = 0.0, None, []
    for gap_s in gaps_s:
        now_s += min(gap_s, 0.1) + reexec.delay_s(change, now_s)
        change = RoleChange("m", "r").after(change, now_s)
        times_s.append(now_s)
        assert len(change.changed_s) <= reexec.CHANGES_KEPT_MAX
        assert reexec.recent(change, now_s) == sum(now_s - 60.0 < at <= now_s for at in times_s)
        assert reexec.recent(change, now_s) <= 8
