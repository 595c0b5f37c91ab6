"""Which names may be made: of topics, groups, clusters, namespaces and clients. Pure.

Brokers make names from names: ``namespace%topic``, the retry topic ``%RETRY%group``, the dead
letters' ``%DLQ%group``, the reply topic ``cluster_REPLY_TOPIC``. Each name is short enough, and of
such a form, that every name made from it is a name. What RocketMQ or an earlier release has made by
other rules is read by the wider rule of :mod:`cometmq.model` (``TOPIC_NAME``, ``GROUP_NAME``).
"""

from __future__ import annotations

import re

from cometmq.errors import ConfigInvalid, GroupNameInvalid, InvalidRequest, TopicNameInvalid
from cometmq.model import (
    BROADCAST_PREFIX,
    GROUP_NAME_LENGTH_MAX,
    RETRY_PREFIX,
    TOPIC_NAME_LENGTH_MAX,
)

REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"

# With the namespace and its '%'. A producer group has no topics.
CONSUMER_GROUP_LENGTH_MAX = TOPIC_NAME_LENGTH_MAX - len(RETRY_PREFIX)
PRODUCER_GROUP_LENGTH_MAX = GROUP_NAME_LENGTH_MAX
CLUSTER_LENGTH_MAX = TOPIC_NAME_LENGTH_MAX - len(REPLY_TOPIC_SUFFIX)
NAMESPACE_LENGTH_MAX = 64
CLIENT_ID_LENGTH_MAX = 255

# '%' stands between parts, and each part has a letter or a digit: so no name is a prefix of the
# system's, nor looks like nothing.
_PART = r"[|_-]*[a-zA-Z0-9][|a-zA-Z0-9_-]*"
NAME = re.compile(rf"{_PART}(?:%{_PART})*")
_NAMESPACE = re.compile(rf"(?=[_-]*[a-zA-Z0-9])[a-zA-Z0-9_-]{{1,{NAMESPACE_LENGTH_MAX}}}")
_OWN_GROUP = re.compile(rf"{BROADCAST_PREFIX}(.*)-[0-9a-f]{{16}}")

SYSTEM_TOPIC_PREFIX = "rmq_sys_"
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_SYSTEM_PREFIXES = (SYSTEM_TOPIC_PREFIX, SYSTEM_GROUP_PREFIX)


def check_new_topic(name: str) -> None:
    """Raises TopicNameInvalid. Whose a topic of the system is, is another question."""
    if why := _why_not(name, TOPIC_NAME_LENGTH_MAX):
        raise TopicNameInvalid(f"{name[:200]!r} is not a topic name: {why}")


def check_new_group(name: str) -> None:
    """Raises GroupNameInvalid for what is no name of a consumer group. That of one broadcasting
    consumer, which its client makes, is made from the name of its group.
    """
    own = _OWN_GROUP.fullmatch(name)
    name = own[1] if own is not None else name
    _check_group(name, CONSUMER_GROUP_LENGTH_MAX, "its retry topic is %RETRY% and the name")


def check_new_producer_group(name: str) -> None:
    """Raises GroupNameInvalid."""
    _check_group(name, PRODUCER_GROUP_LENGTH_MAX)


def _check_group(name: str, length_max: int, because: str = "") -> None:
    why = _why_not(name, length_max, because)
    if any(part.startswith(SYSTEM_GROUP_PREFIX) for part in name.split("%")):
        why = f"names that begin with {SYSTEM_GROUP_PREFIX} are the system's"
    if why:
        raise GroupNameInvalid(f"{name[:300]!r} is not a group name: {why}")


def _why_not(name: str, length_max: int, because: str = "") -> str:
    """Why it is no name; empty: it is one."""
    if len(name) > length_max:
        reason = f"; {because}" if because else ""
        return f"it has {len(name)} characters, {length_max} are allowed{reason}"
    if NAME.fullmatch(name) is None:
        return (
            "it has letters, digits, '|', '_' and '-', at least one letter or digit, and '%' only "
            "between two such parts"
        )
    return ""


def check_cluster(name: str) -> None:
    """Raises ConfigInvalid: the option ``cluster`` has no name of a cluster."""
    because = f"its reply topic is the name and {REPLY_TOPIC_SUFFIX}"
    if why := _why_not(name, CLUSTER_LENGTH_MAX, because):
        raise ConfigInvalid(f"option cluster: {name[:200]!r} is not a cluster name: {why}")


def is_namespace(name: str) -> bool:
    """Whether a namespace may have the name; it is in front of others, so none of the system's may
    begin with it.
    """
    return _NAMESPACE.fullmatch(name) is not None and not name.startswith(_SYSTEM_PREFIXES)


def is_client_id(client_id: str) -> bool:
    """Whether a client may have the id."""
    return 1 <= len(client_id) <= CLIENT_ID_LENGTH_MAX and client_id.isprintable()


def check_client_id(client_id: str) -> None:
    """Raises InvalidRequest unless it is one to 255 printable characters."""
    if not is_client_id(client_id):
        raise InvalidRequest(f"client_id {client_id[:300]!r} is not 1 to 255 printable characters")
