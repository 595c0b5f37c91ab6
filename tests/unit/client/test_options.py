from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from cometmq.client import ProducerOptions, PullConsumerOptions, PushConsumerOptions
from cometmq.client.options import backoff_policy, new_client_id
from cometmq.errors import ConfigInvalid

ALL = (ProducerOptions, PullConsumerOptions, PushConsumerOptions)
LIMITED = [
    (kind, option.name, option.metadata["limits"])
    for kind in ALL
    for option in fields(kind)
    if option.metadata["limits"]
]


@pytest.mark.parametrize(("kind", "name", "limits"), LIMITED)
def test_each_number_has_a_range_that_is_kept(
    kind: Any, name: str, limits: tuple[int, int]
) -> None:
    for good in limits:
        assert getattr(kind(**{name: good}), name) == good
    for bad in (limits[0] - 1, limits[1] + 1, 1.5, "1", None, True):
        with pytest.raises(ConfigInvalid, match=name):
            kind(**{name: bad})


def test_client_ids_differ_and_are_printable() -> None:
    ids = {new_client_id() for _ in range(20)}
    assert len(ids) == 20
    assert all(1 <= len(name) <= 255 and name.isprintable() for name in ids)
    assert PushConsumerOptions().client_id != PushConsumerOptions().client_id


def test_a_first_wait_above_the_longest_one_becomes_the_longest() -> None:
    policy = backoff_policy(ProducerOptions(retry_backoff_ms=500, retry_backoff_max_ms=100))
    assert (policy.first_s, policy.max_s) == (0.5, 0.5)
