from __future__ import annotations

import cometmq.client


def test_the_public_surface_is_sorted_and_there() -> None:
    names = cometmq.client.__all__
    assert names == sorted(names)
    assert all(hasattr(cometmq.client, name) for name in names)


def test_everything_public_says_what_it_is() -> None:
    for name in cometmq.client.__all__:
        assert getattr(cometmq.client, name).__doc__, name
