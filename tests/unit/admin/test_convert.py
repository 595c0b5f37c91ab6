from __future__ import annotations

import base64
import zlib

import pytest

from cometmq.admin.convert import message_view, permission_bits, permission_name
from cometmq.v1 import broker_pb2 as b


@pytest.mark.parametrize(("name", "bits"), [("rw", 6), ("r", 4), ("w", 2)])
def test_permissions_both_ways(name: str, bits: int) -> None:
    assert permission_bits(name) == bits
    assert permission_name(bits) == name


def test_no_permission_has_a_name() -> None:
    assert permission_name(0) == "-"


def test_a_compressed_body_is_shown_as_it_was_sent() -> None:
    view = message_view(b.StoredMessage(body=zlib.compress(b"text"), sys_flag=1))
    assert (view.body_text, view.body_bytes, view.compressed) == ("text", 4, True)
    assert base64.b64decode(view.body_base64) == b"text"


def test_a_body_that_is_not_text_is_kept_whole() -> None:
    view = message_view(b.StoredMessage(body=b"\xff\x00", sys_flag=1))
    assert view.body_text is None
    assert base64.b64decode(view.body_base64) == b"\xff\x00"
    assert view.compressed
    assert view.body_bytes == 2
