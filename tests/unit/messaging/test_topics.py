"""Names, settings, and who may send and read."""

from __future__ import annotations

import pytest

from cometmq.errors import (
    CometError,
    InvalidRequest,
    LimitExceeded,
    MessageTypeMismatch,
    NoPermission,
    QueueCountInvalid,
    QueueNotFound,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.messaging.topics import (
    TopicTable,
    check_name,
    check_settings,
    check_type,
    is_system,
    system_access,
)
from cometmq.model import PERMISSION_READ, PERMISSION_WRITE, FlushMode, MessageType, TopicConfig

PLAIN, DELAYED = MessageType.NORMAL, MessageType.DELAY
BAD_NAMES = ["", "../x", "orders\n", "a" * 128, "a b", "ordérs", "a/b", "a.b", "\x00", "٣"]
CLOSED = ["TBW102", "rmq_sys_cometmq_state", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"]
READ_ONLY = ["%RETRY%billing", "%DLQ%billing", "TRANS_CHECK_MAX_TIME_TOPIC"]


@pytest.mark.parametrize("topic_type", MessageType)
@pytest.mark.parametrize("sent", [PLAIN, DELAYED, MessageType.TRANSACTION])
def test_typed_topics_take_their_type_alone(topic_type: MessageType, sent: MessageType) -> None:
    everything = (MessageType.UNSPECIFIED, MessageType.MIXED)
    in_order = (topic_type, sent) == (MessageType.FIFO, PLAIN)
    config = TopicConfig("orders", message_type=topic_type)
    if topic_type in everything or topic_type is sent or in_order:
        check_type(config, sent)
    else:
        with pytest.raises(MessageTypeMismatch, match=f"takes {topic_type.name} messages"):
            check_type(config, sent)


def table_with(*configs: TopicConfig) -> TopicTable:
    table = TopicTable()
    for config in configs:
        table.put(config)
    return table


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_everywhere(name: str) -> None:
    with pytest.raises(TopicNameInvalid):
        check_name(name)
    with pytest.raises(TopicNameInvalid):
        check_settings(TopicConfig(name))
    with pytest.raises(TopicNameInvalid):
        TopicTable().get(name)


@pytest.mark.parametrize("name", ["a", "a" * 127, "%RETRY%g", "A|b_c-9"])
def test_good_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (TopicConfig("orders", read_queue_count=0), QueueCountInvalid),
        (TopicConfig("orders", write_queue_count=1025), QueueCountInvalid),
        (TopicConfig("orders", write_queue_count=-1), QueueCountInvalid),
        (TopicConfig("orders", permission=0), InvalidRequest),
        (TopicConfig("orders", permission=7), InvalidRequest),
    ],
)
def test_bad_settings(config: TopicConfig, error: type[CometError]) -> None:
    with pytest.raises(error):
        check_settings(config)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_system_topics(name: str) -> None:
    table = table_with(TopicConfig(name))
    assert is_system(name)
    with pytest.raises(NoPermission):
        table.for_send(name, 0)
    with pytest.raises(NoPermission):
        table.for_read(name, 0)


@pytest.mark.parametrize("name", READ_ONLY)
def test_system_topics_that_clients_read(name: str) -> None:
    table = table_with(TopicConfig(name))
    assert table.for_read(name, 0).name == name
    with pytest.raises(NoPermission):
        table.for_send(name, 0)


def test_users_topics_are_not_the_systems() -> None:
    assert system_access("orders") is None
    assert system_access("rmq_system") is None
    assert not is_system("RETRY%x")


def test_sending_and_reading_look_at_their_own_queue_counts() -> None:
    config = TopicConfig("orders", read_queue_count=4, write_queue_count=2)
    table = table_with(config)
    assert table.for_send("orders", 1) is config
    assert table.for_read("orders", 3) is config
    for queue_id in (-1, 2):
        with pytest.raises(QueueNotFound):
            table.for_send("orders", queue_id)
    with pytest.raises(QueueNotFound):
        table.for_read("orders", 4)


def test_permission_bits_close_a_topic() -> None:
    table = table_with(
        TopicConfig("in", permission=PERMISSION_WRITE),
        TopicConfig("out", permission=PERMISSION_READ),
    )
    with pytest.raises(NoPermission):
        table.for_read("in", 0)
    with pytest.raises(NoPermission):
        table.for_send("out", 0)


def test_an_unknown_topic_is_named() -> None:
    with pytest.raises(TopicNotFound, match="orders"):
        TopicTable().for_send("orders", 0)
    assert TopicTable().find("orders") is None


def test_the_table_lists_in_order_and_counts_its_changes() -> None:
    table = table_with(TopicConfig("b"), TopicConfig("a"))
    table.put(TopicConfig("b", permission=PERMISSION_READ))
    assert [config.name for config in table] == ["a", "b"]
    assert (len(table), table.version, "a" in table) == (2, 3, True)
    table.drop("a")
    table.drop("a")
    assert (len(table), table.version, "a" in table) == (1, 4, False)


def test_a_full_table_takes_changes_but_no_new_topic() -> None:
    table = TopicTable(topics_max=1)
    table.check_room("a")
    table.put(TopicConfig("a"))
    table.check_room("a")
    with pytest.raises(LimitExceeded, match="topics_max"):
        table.check_room("b")


def test_system_topics_ask_for_all_that_users_topics_ask_for() -> None:
    table = table_with(TopicConfig("%RETRY%g", flush_mode=FlushMode.SYNC), TopicConfig("a"))
    assert table.demands("rmq_sys_cometmq_state")[0] is FlushMode.ASYNC
    table.put(TopicConfig("b", flush_mode=FlushMode.SYNC))
    assert table.demands("rmq_sys_cometmq_state")[0] is FlushMode.SYNC
    assert (table.demands("a")[0], table.demands("b")[0]) == (FlushMode.ASYNC, FlushMode.SYNC)
    table.put(TopicConfig("b"))
    assert table.demands("%RETRY%g")[0] is FlushMode.ASYNC
    table.put(TopicConfig("b", flush_mode=FlushMode.SYNC))
    table.drop("b")
    assert table.demands("%RETRY%g")[0] is FlushMode.ASYNC
