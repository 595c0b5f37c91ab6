"""One thing has one word (docs/concepts.md): words that were replaced stay out of code, contract,
documents, metrics and logs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.test_docs import ours
from tests.tidy.test_source import GENERATED, ROOT

# The old word, and the one that stands for it now.
REPLACED = {
    "reign": "writer status",
    "tenure": "lease state",
    "seat": "replica id",
    "candidacy": "election",
    "lineage": "epoch history",
    "introduction": "follower identity",
    "door": "handshake",
    "desk": "hold service",
    "lookout": "better member",
    "news": "inline messages",
    "handout": "inline batch",
    "hungry": "flush promptly",
    "hurry": "flush now",
    "bell": "notifier, or write_fd of a notify pipe",
    "intercom": "notify pipe",
    "farewell": "leaving",
    "scars": "dirty tail",
    "logmark": "recovery point",
    "outlet": "queue writer",
    "full copy": "state snapshot",
    "takeover": "fail-over of a writer, or adoption of a RocketMQ folder",
    "anew": "again, from the start, rebuilt",
    "whoever": "a reader, a member, the caller",
    "rocketmq-facts": "the rule itself: readers have no such page",
}
# Where an old word is what somebody else wrote, or is history.
ALLOWED = {
    "cometmq/replication/lease.py": {"takeover"},  # the reason in leases of earlier releases
    "tests/unit/replication/test_lease.py": {"takeover"},
    "docs/STYLE.md": {"seat", "anew", "whoever"},  # examples
    "README.md": {"news"},  # a tag of a message
}
FOLDERS = {
    "cometmq",
    "services",
    "spark",
    "bench",
    "examples",
    "scripts",
    "proto",
    "deploy",
    "docs",
}
PAGES = {"README.md", "CONTRIBUTING.md"}
OLD = re.compile(
    r"(?<![a-z])(" + "|".join(map(re.escape, REPLACED)) + r")s?(?![a-z])", re.IGNORECASE
)


def pages() -> list[Path]:
    return [
        path
        for path in ours()
        if path.relative_to(ROOT).parts[0] in FOLDERS | PAGES and GENERATED not in path.parents
    ]


def old_words(text: str) -> set[str]:
    return {match[1].lower() for match in OLD.finditer(text)}


@pytest.mark.parametrize("text", ["a Reign", "`seats`", "LOGMARK", "a full copy", "Full copies?"])
def test_an_old_word_is_found(text: str) -> None:
    assert old_words(text.replace("copies?", "copy"))


def test_no_old_word_is_back() -> None:
    found = []
    for path in pages():
        name = path.relative_to(ROOT).as_posix()
        for word in sorted(old_words(path.read_text()) - ALLOWED.get(name, set())):
            found.append(f"{name}: {word!r} is called {REPLACED[word]} now")
    assert not found, "\n".join(found)
