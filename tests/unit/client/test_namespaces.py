from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.namespaces import Namespace
from cometmq.errors import TopicNotFound

NAMES = st.from_regex(r"[%|a-zA-Z0-9_-]{1,20}", fullmatch=True)


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("T", "ns%T"),
        ("%RETRY%g", "%RETRY%ns%g"),
        ("%DLQ%g", "%DLQ%ns%g"),
        ("ns%T", "ns%T"),
        ("%RETRY%ns%g", "%RETRY%ns%g"),
        ("TBW102", "TBW102"),
        ("SCHEDULE_TOPIC_XXXX", "SCHEDULE_TOPIC_XXXX"),
        ("rmq_sys_wheel_timer", "rmq_sys_wheel_timer"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
    ],
)
def test_names_as_rocketmq_wraps_them(name: str, wire: str) -> None:
    assert Namespace("ns").wire(name) == wire
    assert Namespace().wire(name) == name


@given(NAMES)
def test_what_was_wrapped_comes_back_and_is_not_wrapped_twice(name: str) -> None:
    namespace = Namespace("ns")
    wire = namespace.wire(name)
    assert namespace.wire(wire) == wire
    assert namespace.shown(wire) in (name, namespace.shown(name))
    assert namespace.wire(namespace.shown(wire)) == wire


def test_errors_show_no_namespace() -> None:
    error = Namespace("ns").strip(TopicNotFound("no topic ns%T, %RETRY%ns%g"))
    assert error.message == "no topic T, %RETRY%g"
    assert str(error).startswith("no topic T, %RETRY%g")
