from __future__ import annotations

import pytest

from cometmq.errors import ReplyInvalid
from cometmq.format.request_reply import (
    Requester,
    reply_properties,
    reply_topic,
    request_properties,
    requester_of,
)


def test_the_properties_have_the_names_of_rocketmq() -> None:
    """Of `MessageConst`, `MixAll.getReplyTopic` and `MessageUtil.createReplyMessage`."""
    assert request_properties("c", "i", 3000) == {
        "CORRELATION_ID": "i",
        "REPLY_TO_CLIENT": "c",
        "TTL": "3000",
    }
    requester = requester_of(request_properties("c", "i", 3000), 1_000)
    assert requester == Requester("c", "i", 3000, 4_000)
    assert reply_properties(requester) == request_properties("c", "i", 3000) | {"MSG_TYPE": "reply"}
    assert reply_topic("DefaultCluster") == "DefaultCluster_REPLY_TOPIC"


@pytest.mark.parametrize(
    "changes",
    [
        {"CORRELATION_ID": ""},
        {"REPLY_TO_CLIENT": ""},
        {"MSG_TYPE": "reply"},
        *({"TTL": ttl} for ttl in ("", "0", "-1", "1.5", "x", "²", "86400001", "9" * 5000)),
    ],
)
def test_what_is_no_request_has_no_requester(changes: dict[str, str]) -> None:
    with pytest.raises(ReplyInvalid):
        requester_of(request_properties("c", "i", 3000) | changes, 0)
