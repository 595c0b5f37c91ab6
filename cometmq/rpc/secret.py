"""The secret that the processes of a cluster share, read from a file, and the proofs by it.

One secret a line; all of them are accepted, and a caller uses the first that the server knows too.
So a secret is changed without a moment in which two processes do not understand each other: add
the new one, then take the old one away, each time in the files of all processes before the next
step. A file is looked at again while it is used: no process has to be restarted.

No secret is ever sent. Caller and server prove to each other that they know one
(:mod:`cometmq.rpc.proof`); what they say then is neither hidden nor sealed: that is TLS's to add.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from cometmq.clock import Clock
from cometmq.errors import (
    CometError,
    ConfigInvalid,
    InvalidRequest,
    PeerUnproven,
    Unauthenticated,
)
from cometmq.rpc.proof import NONCE_BYTES, Challenges, Verdict, proven, server_proof, token
from cometmq.telemetry import ThrottledLog, fields, logger

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 1_024
SECRETS_MAX = 8
FILE_BYTES_MAX = 64 * 1024
LOOK_INTERVAL_S = 1.0  # between two looks whether the file has changed
PROOF_METADATA = "cometmq-proof-bin"

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
_FileState: TypeAlias = tuple[int, int, int]

_log = logger(__name__)


def read_secrets(path: Path) -> tuple[str, ...]:
    """The secrets in a file, in its order. ConfigInvalid names the line, not its content; also for
    a file that every user may write to.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigInvalid(
            f"option internal_secret_file: {path} cannot be read: {error.strerror}"
        ) from None
    if mode & stat.S_IWOTH:
        raise ConfigInvalid(
            f"option internal_secret_file: every user of the machine may write to {path}, and with "
            f"it choose the secret: chmod 600 {path}, and put another secret there"
        )
    lines = [line.strip() for line in content.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and (trouble := _trouble(line)):
            raise ConfigInvalid(f"option internal_secret_file: {path}, line {number}: {trouble}")
    found = tuple(dict.fromkeys(line.decode("ascii") for line in lines if line))
    if not 1 <= len(found) <= SECRETS_MAX or len(content) > FILE_BYTES_MAX:
        raise ConfigInvalid(
            f"option internal_secret_file: {path} must hold 1 to {SECRETS_MAX} secrets, one a line"
        )
    return found


def _trouble(line: bytes) -> str:
    """What is wrong with a secret; empty: nothing."""
    if not SECRET_BYTES_MIN <= len(line) <= SECRET_BYTES_MAX:
        return f"a secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes"
    if any(not 0x21 <= byte <= 0x7E for byte in line):
        return "a secret is printable ASCII without blanks, as `openssl rand -base64 32` makes it"
    return ""


class SharedSecret:
    """What a process proves to others, and what it asks of its callers. Belongs to the event
    loop.

    ``refused`` counts calls by why they were refused; the metrics' thread reads it.
    """

    MISSING, WRONG, REPLAYED = "missing", Verdict.WRONG.value, Verdict.REPLAYED.value

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises ConfigInvalid. Later, while the file is no good, what was read last holds."""
        self.refused = dict.fromkeys((self.MISSING, self.WRONG, self.REPLAYED), 0)
        self._path = path
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._state = _state_of(path)
        self._secrets = read_secrets(path)
        self._trouble = ""
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning(
                "every user of the machine can read the internal secret: chmod 600 it, and put "
                "another one there",
                extra=fields(path=path),
            )
        self._challenges = Challenges(os.urandom(32))
        self._unproven = ThrottledLog(_log, logging.WARNING, clock)

    # --- the server's side ---

    def challenge(self, nonce: bytes) -> tuple[bytes, list[bytes]]:
        """A challenge for a caller, and our proofs, one for each secret. InvalidRequest."""
        if len(nonce) != NONCE_BYTES:
            raise InvalidRequest(f"nonce: {NONCE_BYTES} bytes")
        self._look()
        challenge = self._challenges.issue(nonce, self._clock.monotonic_s())
        return challenge, [server_proof(each, nonce, challenge) for each in self._secrets]

    def check(self, method: str, metadata: Metadata) -> CometError | None:
        """Why a call of ``method`` that came with ``metadata`` is refused; None: it is not."""
        self._look()
        given = [value for key, value in metadata if key == PROOF_METADATA]
        if len(given) != 1 or not isinstance(given[0], bytes):
            return self._refused(self.MISSING, "no proof that it knows the cluster's secret")
        now_s = self._clock.monotonic_s()
        match self._challenges.judge(self._secrets, method, given[0], now_s):
            case Verdict.GOOD:
                return None
            case Verdict.WRONG:
                return self._refused(self.WRONG, "a proof by another secret than is known here")
            case Verdict.REPLAYED:
                return self._refused(self.REPLAYED, "a proof that was used before, or is too late")

    def _refused(self, reason: str, what: str) -> CometError:
        self.refused[reason] += 1
        return Unauthenticated(f"the call came with {what}")

    # --- the caller's side ---

    def prove(
        self, peer: str, method: str, nonce: bytes, challenge: bytes, proofs: Iterable[bytes]
    ) -> tuple[tuple[str, bytes], ...]:
        """The metadata of a call of ``method``, once ``peer`` has proven itself. PeerUnproven."""
        self._look()
        secret = proven(self._secrets, nonce, challenge, proofs)
        if secret is None:
            raise self.unproven(peer, "it does not know the secret that is known here")
        return ((PROOF_METADATA, token(secret, method, nonce, challenge)),)

    def unproven(self, peer: str, why: str) -> PeerUnproven:
        """The error for a peer that is not called; logged once a minute."""
        error = PeerUnproven(f"{peer} is not called: {why}")
        self._unproven.log("a peer did not prove itself", peer, error=error)
        return error

    # --- the file ---

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._looked_s + LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        state = _state_of(self._path)
        if state != self._state:
            self._reread(state)

    def _reread(self, state: _FileState | None) -> None:
        try:
            self._secrets = read_secrets(self._path)
        except ConfigInvalid as error:  # it is looked at again: it may be half written
            if str(error) != self._trouble:
                _log.error("the internal secret stays as it was", extra=fields(error=error))
            self._trouble = str(error)
            return
        self._state = state
        self._trouble = ""
        _log.info("the internal secret was read again", extra=fields(count=len(self._secrets)))


def _state_of(path: Path) -> _FileState | None:
    """Changes whenever the file does; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_secret(path: Path | None, clock: Clock) -> SharedSecret | None:
    """As the option ``internal_secret_file`` says; None: no caller has to prove anything."""
    return None if path is None else SharedSecret(path, clock)
