"""How two processes prove to each other that they know a secret, which neither sends. Pure: time
and randomness are handed in.

The caller sends a nonce. The server answers with a challenge, and with a proof over both: so a
caller knows, before it asks for anything, that the server knows the secret too. Then it
brings its own proof, over nonce, challenge and the method, with one call. Each proof is an
HMAC-SHA-256 with the secret as its key; the label in front keeps one side's from serving as the
other's.

A challenge is good for one call, for CHALLENGE_S, at the process that made it: a recorded proof is
worth nothing. No clock of another machine counts. A server keeps nothing for the challenges that
it gives out: it recognises its own by a tag, and remembers those that were used.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from enum import Enum

CHALLENGE_S = 10.0
USED_MAX = 100_000  # challenges that are remembered as used, twice
NONCE_BYTES = 32
_PROOF = struct.Struct("32s")
_CHALLENGE = struct.Struct(">QQ32s")  # number, end in ms of the server's clock, tag
_TOKEN = struct.Struct(f"{NONCE_BYTES}s{_CHALLENGE.size}s{_PROOF.size}s")

_SERVER = b"cometmq 1 server\0"
_CALLER = b"cometmq 1 caller\0"


class Verdict(Enum):
    """What a server thinks of a caller's proof."""

    GOOD = "good"
    WRONG = "wrong"  # of another secret, or of none
    REPLAYED = "replayed"  # used before, too late, or another process's challenge


def server_proof(secret: str, nonce: bytes, challenge: bytes) -> bytes:
    """The proof that the server knows ``secret``."""
    return _mac(secret.encode(), _SERVER + nonce + challenge)


def proven(
    secrets: Iterable[str], nonce: bytes, challenge: bytes, proofs: Iterable[bytes]
) -> str | None:
    """The first of the caller's secrets that the server has proven to know."""
    given = list(proofs)
    for secret in secrets:
        wanted = server_proof(secret, nonce, challenge)
        if any([hmac.compare_digest(wanted, each) for each in given]):
            return secret
    return None


def token(secret: str, method: str, nonce: bytes, challenge: bytes) -> bytes:
    """What the caller brings with its call of ``method``, the full name."""
    return nonce + challenge + _caller_proof(secret, method, nonce, challenge)


class Challenges:
    """What one server asks of callers. ``key``: random bytes that no other process has."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._used: set[int] = set()
        self._used_before: set[int] = set()  # … in the CHALLENGE_S before
        self._turned_s = 0.0

    def issue(self, nonce: bytes, now_s: float) -> bytes:
        """A challenge for the caller that sent ``nonce``."""
        self._count += 1
        end_ms = int((now_s + CHALLENGE_S) * 1000)
        return _CHALLENGE.pack(self._count, end_ms, self._tag(self._count, end_ms, nonce))

    def judge(self, secrets: Sequence[str], method: str, token: bytes, now_s: float) -> Verdict:
        """Whether the caller knows one of ``secrets``; its challenge is used up then."""
        if len(token) != _TOKEN.size:
            return Verdict.WRONG
        nonce, challenge, proof = _TOKEN.unpack(token)
        number, end_ms, tag = _CHALLENGE.unpack(challenge)
        if not hmac.compare_digest(tag, self._tag(number, end_ms, nonce)):
            return Verdict.REPLAYED
        # Compares all of them: the time that this takes does not reveal which one matches.
        wanted = [_caller_proof(secret, method, nonce, challenge) for secret in secrets]
        if not any([hmac.compare_digest(proof, each) for each in wanted]):
            return Verdict.WRONG
        if now_s * 1000 >= end_ms or not self._use(number, now_s):
            return Verdict.REPLAYED
        return Verdict.GOOD

    def _use(self, number: int, now_s: float) -> bool:
        """False: it was used before, or too many were."""
        if now_s - self._turned_s >= CHALLENGE_S:  # what was used before that has ended by now
            self._used, self._used_before, self._turned_s = set(), self._used, now_s
        if number in self._used or number in self._used_before or len(self._used) >= USED_MAX:
            return False
        self._used.add(number)
        return True

    def _tag(self, number: int, end_ms: int, nonce: bytes) -> bytes:
        return _mac(self._key, struct.pack(">QQ", number, end_ms) + nonce)


def _caller_proof(secret: str, method: str, nonce: bytes, challenge: bytes) -> bytes:
    return _mac(secret.encode(), _CALLER + nonce + challenge + method.encode())


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
