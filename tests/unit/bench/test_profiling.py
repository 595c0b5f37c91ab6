"""Collapsed stacks into shares."""

from __future__ import annotations

import os

import pytest

from bench import profiling
from bench.profiling import home, parse, room, waits

GRPC = "0x7f00 (grpc/_cython/cygrpc.cpython-311-x86_64-linux-gnu.so)"
APPEND = "append (cometmq/store/writer.py)"
STAMP = "stamp (cometmq/format/batch.py)"
COLLAPSED = f"""\
run (asyncio/runners.py);{APPEND};{STAMP};zlib_crc32 (zlibmodule.c.h);crc32_z (libz.so.1) 30
run (asyncio/runners.py);{APPEND};os_pwrite (libpython3.11.so.1.0);pwrite64 (libc.so.6) 10
run (asyncio/runners.py);{APPEND} 20
run (asyncio/runners.py);{GRPC};sendmsg (libc.so.6) 40
run (asyncio/runners.py);run_forever (loop.c);uv__io_poll (linux.c);epoll_pwait (libc.so.6) 900
"""


def test_what_a_function_calls_in_c_is_its_own() -> None:
    homes = profiling.by_home([s for s in parse(COLLAPSED) if not waits(s[0])])
    assert homes == {STAMP: 30, APPEND: 30, "gRPC core": 40}


@pytest.mark.parametrize(
    ("stack", "waiting"),
    [
        ("a (b.py);epoll_wait (libc.so.6)", True),
        ("a (b.py);os_fdatasync (libpython3.11.so);fdatasync (libc.so.6)", True),
        ("a (b.py);PyThread_acquire_lock_timed (l.so);0x1 (libc.so.6);0x2 (libc.so.6)", True),
        ("a (b.py);pwrite64 (libc.so.6)", False),
        ("poll (b.py);work (c.py)", False),
        ("PyThread_acquire_lock_timed (l.so);a (b.py);b (b.py);c (b.py);d (b.py)", False),
    ],
)
def test_waiting(stack: str, waiting: bool) -> None:
    assert waits(tuple(stack.split(";"))) is waiting


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (("x (y.py)", "0x1 (uvloop/loop.cpython-311.so)", "z (loop.c)"), "uvloop"),
        (("x (y.py)", "upb_Decode (_message.abi3.so)", "memcpy (libc.so.6)"), "protobuf"),
        (("x (y.py)", GRPC, "w (v.py)"), "w (v.py)"),
        (("x (y.py)", "__init__ (<string>)", "PyObject_Malloc (l.so)"), "__init__ (<string>)"),
        (("start_thread (libc.so.6)",), "other C code"),
    ],
)
def test_homes(stack: tuple[str, ...], expected: str) -> None:
    assert home(stack) == expected


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (STAMP, "cometmq/format"),
        ("load (cometmq/config.py)", "cometmq"),
        ("Pull (services/broker/servicer.py)", "services/broker"),
        ("run (asyncio/runners.py)", "asyncio"),
        ("<genexpr> (threading.py)", "threading.py"),
        ("gRPC core", "gRPC core"),
    ],
)
def test_rooms(frame: str, expected: str) -> None:
    assert room(frame) == expected


def test_named_c_functions() -> None:
    calls = profiling.by_call(parse(COLLAPSED))
    assert calls["crc32_z (libz.so.1)"] == 30
    assert APPEND not in calls


def test_recursion_counts_once() -> None:
    stacks = parse("walk (a.py);walk (a.py) 20\nwalk (a.py) 5\n")
    assert profiling.inclusive(stacks)["walk (a.py)"] == 25


def test_summary_shows_shares_of_what_did_not_wait() -> None:
    threads = {"main thread": 3.0, "poller": 1.0}
    text = profiling.summary(parse(COLLAPSED), threads, 1_000_000)
    assert "| main thread | 75.0% | 3.00       |" in text
    assert "| gRPC core      | 40.0% |" in text
    assert f"| `{APPEND}` | 30.0% | 60.0%        |" in text
    assert "epoll" not in text


def test_this_process_has_a_main_thread() -> None:
    assert profiling.thread_seconds(os.getpid())["main thread"] > 0
