"""The catalogue is total: classes, codes, wire mapping and docs/errors.md agree."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import grpc

from cometmq import errors
from cometmq.errors import CATALOGUE, CometError, Retry
from cometmq.rpc.interceptors import from_proto, to_proto
from cometmq.v1 import common_pb2

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
LEAVES = list(CATALOGUE.values())


def _classes(base: type[CometError]) -> set[type[CometError]]:
    return {base}.union(*map(_classes, base.__subclasses__()))


def _written() -> dict[int, list[str]]:
    """Rows of the table in docs/errors.md, by code."""
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines()]
    return {int(row[0]): row for row in rows if re.fullmatch(r"\d{4}", row[0])}


def test_every_class_with_a_code_is_in_the_catalogue_once() -> None:
    own = {kind for kind in _classes(CometError) if kind.__module__ == errors.__name__}
    coded = [kind for kind in own if "code" in vars(kind) and kind.code]

    assert sorted(coded, key=lambda kind: kind.code) == LEAVES
    assert len(LEAVES) == len(coded)


def test_codes_and_names_are_unique() -> None:
    assert all(kind.code == code for code, kind in CATALOGUE.items())
    assert len({kind.name() for kind in LEAVES}) == len(LEAVES)


def test_only_leaves_have_codes() -> None:
    for kind in LEAVES:
        assert [sub for sub in kind.__subclasses__() if sub.__module__ == errors.__name__] == []


def test_an_error_tells_what_it_means_and_what_to_do() -> None:
    for kind in LEAVES:
        assert kind.__doc__, kind
        assert kind.__doc__.endswith("."), kind
        assert re.search(r"[.!)]$|[A-Z]$", kind.advice), kind


def test_the_status_is_one_of_grpc() -> None:
    assert {kind.status for kind in LEAVES} <= grpc.StatusCode.__members__.keys() - {"OK"}


def test_the_name_is_spelt_from_the_class() -> None:
    for kind in LEAVES:
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.name())
        assert kind.name().replace("_", "").lower() == kind.__name__.lower()


def test_an_error_shown_says_what_happened_and_what_to_do_once() -> None:
    for kind in LEAVES:
        told = str(kind("what happened"))
        assert told == (f"what happened. {kind.advice}" if kind.advice else "what happened")
        assert str(kind(told)) == told, "made of an error that told it"
        assert kind("what happened").message == "what happened"


def test_retry_values_are_those_of_the_wire() -> None:
    ours = {f"RETRY_{rule.name}": rule.value for rule in Retry}

    assert ours | {"RETRY_UNSPECIFIED": 0} == dict(common_pb2.Retry.items())


def test_an_error_survives_the_wire() -> None:
    fences = (None, (0, 0), (2**64 - 1, 2**63 - 1))
    for kind, segment, fence, epoch in product(LEAVES, (None, 0, 7), fences, (None, 13)):
        sent = kind("what happened", segment=segment, fence=fence, epoch=epoch)
        proto = common_pb2.Error.FromString(to_proto(sent).SerializeToString())
        error = from_proto(proto)

        assert type(error) is kind
        assert (error.message, error.segment, error.fence) == ("what happened", segment, fence)
        assert error.epoch == epoch
        told = proto.name, proto.advice, proto.retry
        assert told == (kind.name(), kind.advice, kind.retry.value)


def test_the_document_lists_exactly_the_catalogue() -> None:
    assert list(_written()) == list(CATALOGUE)


def test_the_document_says_the_same() -> None:
    written = _written()
    for kind in LEAVES:
        row = [str(kind.code), f"`{kind.name()}`", kind.status, kind.retry.name, kind.__doc__]
        assert written[kind.code] == [*row, kind.advice.replace("|", "\\|")]
