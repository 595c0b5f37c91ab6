from __future__ import annotations

import pytest

from cometmq.client.names import check_group, check_producer_group, check_topic, own_group
from cometmq.client.namespaces import Namespace
from cometmq.errors import GroupNameInvalid, TopicNameInvalid
from cometmq.model import GROUP_NAME
from cometmq.names import CONSUMER_GROUP_LENGTH_MAX, NAMESPACE_LENGTH_MAX

NONE = Namespace()


@pytest.mark.parametrize("name", ["a", "%RETRY%g", "a|b_c-9", "x" * 127])
def test_a_topic_that_is_there_may_have_any_name(name: str) -> None:
    assert check_topic(name) == name


@pytest.mark.parametrize("name", ["", "../x", "a\n", "a b", "ä", "x" * 256, None, 3])
def test_bad_names(name: object) -> None:
    with pytest.raises(TopicNameInvalid):
        check_topic(name)
    for check in (check_group, check_producer_group):
        with pytest.raises(GroupNameInvalid):
            check(name, NONE)


def test_a_group_is_short_enough_with_its_namespace() -> None:
    namespace = Namespace("n" * NAMESPACE_LENGTH_MAX)
    longest = "g" * (CONSUMER_GROUP_LENGTH_MAX - NAMESPACE_LENGTH_MAX - 1)
    assert check_group(longest, namespace) == longest
    assert GROUP_NAME.fullmatch(own_group(namespace.wire(longest), "c" * 255))
    with pytest.raises(GroupNameInvalid, match="120 are allowed"):
        check_group(longest + "g", namespace)
    assert check_group(longest + "g", NONE)
    assert check_producer_group(longest + "g", namespace), "a producer group has no topics"
