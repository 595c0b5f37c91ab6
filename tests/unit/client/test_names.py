from __future__ import annotations

import pytest

from cometmq.client.names import check_group, check_topic
from cometmq.errors import GroupNameInvalid, TopicNameInvalid


@pytest.mark.parametrize("name", ["a", "%RETRY%g", "a|b_c-9", "x" * 127])
def test_good_names(name: str) -> None:
    assert check_topic(name) == check_group(name) == name


@pytest.mark.parametrize("name", ["", "../x", "a\n", "a b", "ä", "x" * 256])
def test_bad_names(name: str) -> None:
    with pytest.raises(TopicNameInvalid):
        check_topic(name)
    with pytest.raises(GroupNameInvalid):
        check_group(name)


def test_groups_may_be_longer_than_topics() -> None:
    check_group("x" * 255)
    with pytest.raises(TopicNameInvalid):
        check_topic("x" * 128)
