"""The rule for names, checked before a call is made."""

from __future__ import annotations

import re

from cometmq.errors import GroupNameInvalid, TopicNameInvalid
from cometmq.model import GROUP_NAME_LENGTH_MAX, TOPIC_NAME_LENGTH_MAX

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


def check_group(group: str) -> str:
    """The name itself; GroupNameInvalid when it is none."""
    if len(group) > GROUP_NAME_LENGTH_MAX or _NAME.fullmatch(group) is None:
        raise GroupNameInvalid(f"{group!r} is not a group name.")
    return group


def check_topic(topic: str) -> str:
    """The name itself; TopicNameInvalid when it is none."""
    if len(topic) > TOPIC_NAME_LENGTH_MAX or _NAME.fullmatch(topic) is None:
        raise TopicNameInvalid(f"{topic!r} is not a topic name.")
    return topic
