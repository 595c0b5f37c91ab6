"""CometMQ, a message queue."""

from __future__ import annotations

__version__ = "0.1.0"  # pyproject.toml says so too; reading what is installed takes 10 ms
