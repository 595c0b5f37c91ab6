"""What the tests of this folder draw from."""

from __future__ import annotations

import string

from hypothesis import strategies as st

from cometmq.format import properties, record

TOPIC_ALPHABET = string.ascii_letters + string.digits + "%|_-"
topics = st.text(TOPIC_ALPHABET, min_size=1, max_size=127).map(str.encode)
hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
counts64 = st.integers(0, 2**63 - 1)
bodies = st.binary(max_size=300)
texts = st.text(st.characters(min_codepoint=3, exclude_categories=["Cs"]), min_size=1, max_size=20)
known_names = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "region", "Tenant", "TTL", "RETRY"])
user_names = (known_names | texts).filter(lambda name: not properties.is_reserved(name))
property_maps = st.dictionaries(user_names, texts, max_size=6)


@st.composite
def records(draw: st.DrawFn, topic: bytes, queue_id: int, hosts_like: tuple[bytes, bytes]) -> bytes:
    """A record as a producer sends it, its hosts as long as the given ones."""
    raw = properties.encode(draw(property_maps))
    return record.encode(
        topic,
        queue_id,
        draw(bodies),
        raw.removesuffix(b"\x02") if draw(st.booleans()) else raw,
        born_time_ms=draw(int64),
        born_host=bytes(len(hosts_like[0])),
        store_host=bytes(len(hosts_like[1])),
        flag=draw(int32),
        sys_flag=draw(st.sampled_from([0, 1, 0x101, 0x201, 0x301])),
        queue_offset=draw(int64),
        log_offset=draw(int64),
        store_time_ms=draw(int64),
    )
