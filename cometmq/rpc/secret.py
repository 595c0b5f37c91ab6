"""The secret that the internal ports of a cluster share, as a file tells it.

One secret a line; all of them are accepted, the first is the one that is sent. So a secret is
changed without a moment in which two processes do not understand each other: add the new one below
the old, turn the two round, take the old one away, each time in the files of all processes before
the next step. A file is looked at again while it is used: nothing has to be started anew.

It travels as ``authorization: Bearer <secret>`` in the metadata of each call. That keeps out who
does not know it, from a port that is open to more than the cluster; it hides nothing from who can
read the network (docs/operations.md, "The internal ports").
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from cometmq.clock import Clock
from cometmq.errors import CometError, ConfigInvalid, Unauthenticated
from cometmq.telemetry import fields

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 1_024  # gRPC refuses metadata above 8 KiB
SECRETS_MAX = 8
FILE_BYTES_MAX = 64 * 1024
LOOK_INTERVAL_S = 1.0  # between two looks whether the file has changed

HEADER = "authorization"
_SCHEME = "Bearer "

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
_FileState: TypeAlias = tuple[int, int, int]

_log = logging.getLogger(__name__)


def read_secrets(path: Path) -> tuple[str, ...]:
    """The secrets in a file, in its order. ConfigInvalid tells the line, not what stands there."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigInvalid(
            f"option internal_secret_file: {path} cannot be read: {error.strerror}"
        ) from None
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
    """What a process sends to internal ports, and what its own takes. Belongs to the event loop.

    ``refused`` counts calls by why they were refused; the metrics' thread reads it.
    """

    MISSING, WRONG = "missing", "wrong"

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises ConfigInvalid. Later, while the file is no good, what was read last holds."""
        self.refused = {self.MISSING: 0, self.WRONG: 0}
        self._path = path
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._state = _state_of(path)
        self._secrets = read_secrets(path)
        self._trouble = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes along with a call."""
        self._look()
        return ((HEADER, _SCHEME + self._secrets[0]),)

    def check(self, metadata: Metadata) -> CometError | None:
        """Why a call that came with ``metadata`` is refused; None: it is not."""
        self._look()
        given = [value for key, value in metadata if key == HEADER]
        if any([self._knows(value) for value in given]):
            return None
        self.refused[self.WRONG if given else self.MISSING] += 1
        what = "another secret than is known here" if given else "no secret"
        return Unauthenticated(f"this internal port wants a secret; the call came with {what}")

    def _knows(self, value: str | bytes) -> bool:
        # Over digests, and of all secrets: how long it takes tells neither how much of one was
        # right, nor how long they are.
        given = _digest(value)
        wanted = [_digest(_SCHEME + secret) for secret in self._secrets]
        return any([hmac.compare_digest(given, each) for each in wanted])

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


def _digest(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return hashlib.sha256(data).digest()


def _state_of(path: Path) -> _FileState | None:
    """Changes whenever the file does; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_secret(path: Path | None, clock: Clock) -> SharedSecret | None:
    """As the option ``internal_secret_file`` says; None: internal ports want none."""
    return None if path is None else SharedSecret(path, clock)
