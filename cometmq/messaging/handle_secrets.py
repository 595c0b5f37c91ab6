"""The secrets with which a broker group signs handles that clients keep and bring back: of delayed
messages, of messages that are being consumed. Pure: time and randomness are parameters.

A handle says where something lies. Its MAC (message authentication code) shows that this broker
group gave it. All members know the secrets, so a handle stays good after a fail-over.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

SECRET_BYTES = 32
MAC_BYTES = 16
SECRETS_KEPT = 2
# A handle of a message that waits 40 days, the longest delay, is good as long as it is of use.
RENEWAL_MS = 41 * 86_400_000


@dataclass(frozen=True, slots=True)
class Secret:
    """``SECRET_BYTES`` random bytes, and when they were made."""

    created_ms: int
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(self.key)}")


class HandleSecrets:
    """The newest secrets of a broker group. The newest one signs, each of them verifies."""

    def __init__(self) -> None:
        self._secrets: tuple[Secret, ...] = ()  # oldest first

    def __iter__(self) -> Iterator[Secret]:
        """The oldest first."""
        return iter(self._secrets)

    def __len__(self) -> int:
        return len(self._secrets)

    def add(self, secret: Secret) -> None:
        """The secret that signs from now on. One that is known already changes nothing."""
        if secret in self._secrets:
            return
        self._secrets = (*self._secrets, secret)[-SECRETS_KEPT:]

    def needs_renewal(self, now_ms: int) -> bool:
        """Whether an epoch that begins now has to bring a new secret."""
        return not self._secrets or now_ms - self._secrets[-1].created_ms > RENEWAL_MS

    def mac(self, purpose: bytes, data: bytes) -> bytes:
        """The ``MAC_BYTES`` that sign ``data``. ``purpose``: at most 16 bytes that name the kind of
        handle, so that no handle passes for one of another kind.
        """
        return _mac(self._secrets[-1], purpose, data)

    def verifies(self, purpose: bytes, data: bytes, mac: bytes) -> bool:
        """Whether this broker group signed ``data`` for this purpose."""
        return any([hmac.compare_digest(_mac(one, purpose, data), mac) for one in self._secrets])


def _mac(secret: Secret, purpose: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=MAC_BYTES, key=secret.key, person=purpose).digest()
