"""The contract, its comments and docs/protocol.md agree with each other and with the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

from cometmq.errors import CATALOGUE
from cometmq.member.rpc.lease_rights import UNDER_LEASE
from tests.support.faults.border import services

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "cometmq" / "v1").glob("*.proto"))
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()
CONTRACT = {
    (service.name, method.name) for service in services().values() for method in service.methods
}
NAMES = {kind.name() for kind in CATALOGUE.values()}


def _sections() -> dict[str, str]:
    """Text below each heading of the second level."""
    parts = re.split(r"^## (.*)$", DOCUMENT, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _served() -> set[tuple[str, str]]:
    """What is described in two lines."""
    found = set()
    for title, text in _sections().items():
        if match := re.match(r"Served: `(\w+)`", title):
            names = re.findall(r"^- \*\*(\w+)\*\*: .*\n  \S.*$", text, flags=re.M)
            found |= {(match[1], name) for name in names}
    return found


def test_the_contract_is_what_is_described_as_served() -> None:
    assert _served() == CONTRACT


def test_each_method_needs_the_lease_or_the_document_says_why_not() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \| (yes|no): .* \|$",
        _sections()["Which answers need the lease"],
        flags=re.M,
    )
    listed = [(service, name, needs) for service, names, needs in rows for name in _names(names)]
    assert len(listed) == len({row[:2] for row in listed})
    assert {row[:2] for row in listed} == CONTRACT
    needed = {f"/cometmq.v1.{service}/{name}" for service, name, needs in listed if needs == "yes"}
    assert needed == UNDER_LEASE


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_contract_names_only_errors_that_exist() -> None:
    for path in PROTOS:
        comments = " ".join(re.findall(r"//(.*)", path.read_text()))
        for listed in re.findall(r"Errors(?: inside[^:]*| end the stream)?: ([^.]*)\.", comments):
            words = re.sub(r"\([^)]*\)", "", listed)
            named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", words))
            assert named <= NAMES, (path.name, listed)


def test_the_document_names_only_errors_that_exist() -> None:
    statuses = {"NOT_FOUND", "OFFSET_MOVED", "NO_MATCHED_MESSAGE"}
    properties = {"RETRY_TOPIC", "ORDER_TOPIC_CONFIG", "CORRELATION_ID", "MSG_TYPE"}
    properties |= {"REPLY_TO_CLIENT"}
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", DOCUMENT))
    assert named <= NAMES | statuses | properties
