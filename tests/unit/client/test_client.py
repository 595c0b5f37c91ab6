from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import cometmq.client
from cometmq.client import ProducerOptions, PullConsumerOptions, PushConsumerOptions

DOCUMENT = Path(__file__).parents[3] / "docs" / "client.md"


def test_the_public_surface_is_sorted_and_there() -> None:
    names = cometmq.client.__all__
    assert names == sorted(names)
    assert all(hasattr(cometmq.client, name) for name in names)


def test_everything_public_says_what_it_is() -> None:
    for name in cometmq.client.__all__:
        assert getattr(cometmq.client, name).__doc__, name


@pytest.mark.parametrize("kind", [ProducerOptions, PullConsumerOptions, PushConsumerOptions])
def test_the_document_tells_every_option_and_its_default(kind: type) -> None:
    rows = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `")]
    for option in fields(kind):
        told = [row for row in rows if f"`{option.name}`" in row]
        assert told, option.name
        if isinstance(option.default, int) and not isinstance(option.default, bool):
            assert any(f"{option.default:,}" in row for row in told), option.name
