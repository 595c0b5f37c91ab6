"""Where a group's lease is, by the option ``lease``. Options are read before modules that take time
to import: the client of Kubernetes is in :mod:`cometmq.member.lease.stores`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from cometmq.errors import ConfigInvalid


class KubernetesPlace(NamedTuple):
    """A Lease of ``coordination.k8s.io/v1``."""

    namespace: str
    name: str


def place_of(url: str) -> Path | KubernetesPlace:
    """Parse ``file:///path/of/lease.json`` or ``kubernetes://namespace/name``. ConfigInvalid."""
    parts = urlsplit(url)
    path, name = unquote(parts.path), parts.path.strip("/")
    if parts.scheme == "file" and not parts.netloc and name:
        if path.endswith("/") or Path(path).is_dir():
            raise ConfigInvalid(f"option lease: {path} is a folder: name a file in it")
        return Path(path)
    if parts.scheme == "kubernetes" and parts.netloc and name and "/" not in name:
        return KubernetesPlace(parts.netloc, name)
    raise ConfigInvalid(f"option lease: {url!r} is neither file:///path nor kubernetes://ns/name")
