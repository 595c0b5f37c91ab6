"""The file of secrets, who knows one, and that none is ever told."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cometmq.errors import ConfigInvalid, InvalidRequest, PeerUnproven, Unauthenticated
from cometmq.rpc.metrics import RefusedCallers
from cometmq.rpc.secret import (
    FILE_BYTES_MAX,
    LOOK_INTERVAL_S,
    PROOF_METADATA,
    SECRET_BYTES_MAX,
    Metadata,
    SharedSecret,
    open_secret,
    read_secrets,
)
from tests.support.stores.small_stores import WallClock

OLD, NEW = "o" * 16, "NewSecret/+=0123456789"
NONCE, METHOD = b"n" * 32, "/a.Service/Method"


def write(path: Path, *secrets: str) -> Path:
    path.write_text("\n".join(secrets) + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "secret", OLD)


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


def later(clock: WallClock) -> None:
    clock.now_ms += int(LOOK_INTERVAL_S * 1000)


def proof_for(
    server: SharedSecret, caller: SharedSecret, method: str = METHOD
) -> tuple[tuple[str, bytes], ...]:
    """What ``caller`` brings with a call once ``server`` has proven itself."""
    challenge, proofs = server.challenge(NONCE)
    return caller.prove("s:1", method, NONCE, challenge, proofs)


def agree(server: SharedSecret, caller: SharedSecret) -> bool:
    try:
        return server.check(METHOD, proof_for(server, caller)) is None
    except PeerUnproven:
        return False


def knows(server: SharedSecret, secret: str, path: Path, clock: WallClock) -> bool:
    """Whether a caller with just this one comes in."""
    return agree(server, SharedSecret(write(path.with_name("caller"), secret), clock))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{OLD}", (OLD,)),
        (f"\n  {OLD}\t\r\n\n{NEW}\n", (OLD, NEW)),
        (f"{NEW}\n{OLD}\n{NEW}\n", (NEW, OLD)),
        ("x" * SECRET_BYTES_MAX, ("x" * SECRET_BYTES_MAX,)),
    ],
)
def test_what_a_file_says(path: Path, content: str, expected: tuple[str, ...]) -> None:
    path.write_bytes(content.encode())
    assert read_secrets(path) == expected


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (b"", "1 to 8 secrets"),
        (b" \n\t\n", "1 to 8 secrets"),
        (b"hush-15-bytes-x", "line 1: a secret has 16 to 1024 bytes"),
        (b"x" * (SECRET_BYTES_MAX + 1), "line 1: a secret has 16"),
        (OLD.encode() + b"\nhush hush hush hush\n", "line 2: a secret is printable ASCII"),
        ("hush-ü-hush-hush-hush".encode(), "printable ASCII"),
        (b"hush\x00hush-hush-hush", "printable ASCII"),
        (b"\n".join(b"hush-hush-hush-%d" % n for n in range(100, 109)), "1 to 8 secrets"),
        (OLD.encode() + b"\n" * FILE_BYTES_MAX, "1 to 8 secrets"),
    ],
)
def test_a_file_that_is_no_good_is_refused(path: Path, content: bytes, trouble: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigInvalid, match=trouble) as refused:
        read_secrets(path)
    assert "internal_secret_file" in str(refused.value)
    assert "hush" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, clock: WallClock) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigInvalid, match="cannot be read"):
            open_secret(path, clock)
    assert open_secret(None, clock) is None


def test_who_knows_one_of_them_comes_in(path: Path, clock: WallClock) -> None:
    server = SharedSecret(write(path, NEW, OLD), clock)
    assert knows(server, OLD, path, clock)
    assert knows(server, NEW, path, clock)
    assert server.refused == {"missing": 0, "wrong": 0, "replayed": 0}


def test_who_does_not_stays_out(path: Path, clock: WallClock) -> None:
    server = SharedSecret(path, clock)
    brought = proof_for(server, server)
    ((name, words),) = brought
    assert server.check(METHOD, brought) is None
    refusals: list[Metadata] = [
        (),
        (("authorization", f"Bearer {OLD}"),),
        ((name, f"{OLD}"),),
        ((name, OLD.encode()),),
        ((name, b""),),
        brought,
        proof_for(server, server, "/a.Service/Other"),
        (*proof_for(server, server), *proof_for(server, server)),
    ]
    for metadata in refusals:
        refusal = server.check(METHOD, metadata)
        assert isinstance(refusal, Unauthenticated)
        assert OLD not in str(refusal)
    assert server.refused == {"missing": 4, "wrong": 3, "replayed": 1}
    assert OLD.encode() not in words


def test_a_caller_tells_a_server_that_does_not_know_the_secret_nothing(
    path: Path, clock: WallClock, caplog: pytest.LogCaptureFixture
) -> None:
    caller, server = SharedSecret(path, clock), SharedSecret(write(path.with_name("s"), NEW), clock)
    for _ in range(5):
        with pytest.raises(PeerUnproven) as refused:
            proof_for(server, caller)
        assert OLD not in str(refused.value)
    assert len(caplog.records) == 1, "one line a minute"
    clock.now_ms += 60_000
    assert not agree(server, caller)
    assert len(caplog.records) == 2
    assert OLD not in "".join(f"{record.__dict__}" for record in caplog.records)


@pytest.mark.parametrize("nonce", [b"", b"x" * 31, b"x" * 33, b"x" * 1_000_000])
def test_a_nonce_of_another_size_is_refused(path: Path, clock: WallClock, nonce: bytes) -> None:
    with pytest.raises(InvalidRequest):
        SharedSecret(path, clock).challenge(nonce)


def test_refusals_are_counted_for_prometheus(path: Path, clock: WallClock) -> None:
    secret = SharedSecret(path, clock)
    secret.check(METHOD, ((PROOF_METADATA, b"x"),))
    for given, wrong in ((secret, 1), (None, 0)):
        (family,) = RefusedCallers(given).collect()
        assert family.name == "cometmq_internal_calls_refused"
        found = {sample.labels["reason"]: sample.value for sample in family.samples}
        assert found == {"missing": 0, "wrong": wrong, "replayed": 0}


def test_a_secret_is_changed_while_everything_runs(path: Path, clock: WallClock) -> None:
    """The steps of the runbook: two processes, whose files change one after the other."""
    other_path = write(path.with_name("other"), OLD)
    here, there = SharedSecret(path, clock), SharedSecret(other_path, clock)
    for step in ((OLD, NEW), (NEW,)):
        for file in (path, other_path):
            write(file, *step)
            later(clock)
            assert agree(here, there)
            assert agree(there, here)
    assert not knows(here, OLD, path, clock), "the old one is no good any more"


def test_a_file_is_not_looked_at_for_every_call(path: Path, clock: WallClock) -> None:
    secret = SharedSecret(path, clock)
    write(path, NEW)
    clock.now_ms += int(LOOK_INTERVAL_S * 1000) - 1
    assert not knows(secret, NEW, path, clock)
    clock.now_ms += 1
    assert knows(secret, NEW, path, clock)


def test_a_file_that_was_replaced_is_noticed(path: Path, clock: WallClock) -> None:
    """As a mounted Secret changes: another file of the same size takes the name."""
    secret = SharedSecret(path, clock)
    before = path.stat()
    swapped = write(path.with_name("swapped"), "p" * 16)
    os.utime(swapped, ns=(before.st_atime_ns, before.st_mtime_ns))
    swapped.replace(path)
    later(clock)
    assert knows(secret, "p" * 16, path, clock)


def test_what_was_read_last_holds_while_the_file_is_no_good(
    path: Path, clock: WallClock, caplog: pytest.LogCaptureFixture
) -> None:
    secret = SharedSecret(path, clock)
    with caplog.at_level(logging.INFO):
        for content in ("", "too short", None):
            path.unlink() if content is None else path.write_text(content)
            for _ in range(3):
                later(clock)
                assert knows(secret, OLD, path, clock)
        assert len(caplog.records) == 3, "each trouble is told once"
        write(path, NEW)
        later(clock)
        assert knows(secret, NEW, path, clock)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3 + ["INFO"]
    told = "".join(f"{record.__dict__}" for record in caplog.records)
    assert "too short" not in told
    assert OLD not in told
    assert NEW not in told


def test_a_secret_that_everybody_can_choose_is_refused(path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(ConfigInvalid, match=f"may write to {path}.*chmod 600"):
        read_secrets(path)
    path.chmod(0o620)
    assert read_secrets(path) == (OLD,)


@pytest.mark.parametrize(("mode", "warnings"), [(0o644, 1), (0o640, 0), (0o600, 0)])
def test_a_secret_that_everybody_can_read_is_named(
    path: Path, mode: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    path.chmod(mode)
    SharedSecret(path, WallClock())
    told = [entry for entry in caplog.records if "can read the internal secret" in entry.message]
    assert len(told) == warnings
