"""The command line in-process: what it understands and refuses. tests/e2e/test_cli.py runs it for
real, against a real cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry

from cometmq.admin import cluster_command, commandline, local
from cometmq.admin.cli import cli
from cometmq.errors import ClusterRunning
from cometmq.flight_recorder import FlightRecorder, Stage
from cometmq.rpc.metrics_server import start_metrics_server

SILENT = "127.0.0.1:1"


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=environment)


def all_commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        here, command = (*path, name), group.get_command(context, name)
        found += all_commands(command, here) if isinstance(command, click.Group) else [here]
    return found


COMMANDS = all_commands(cli)


GROUPS = cli.list_commands(click.Context(cli))


def test_the_help_lists_every_group_in_its_section() -> None:
    assert isinstance(cli, commandline.SectionedGroup)
    shown = run("--help").output
    for title, groups in cli.sections.items():
        assert re.search(rf"^{title}:\n(  .*\n)*  {list(groups)[-1]} ", shown, re.M)


@pytest.mark.parametrize("name", GROUPS)
def test_the_help_of_a_group_is_its_own(name: str) -> None:
    assert isinstance(cli, commandline.SectionedGroup)
    (shown,) = [groups[name][1] for groups in cli.sections.values() if name in groups]
    group = cli.get_command(click.Context(cli), name)
    assert group is not None
    assert group.help == shown


@pytest.mark.parametrize("name", GROUPS)
def test_what_a_command_does_fits_the_line_of_its_name(name: str) -> None:
    lines = run(name, "--help").output.partition("Commands:")[2].splitlines()
    assert lines
    assert not [line for line in lines if line.endswith("...")]


def test_the_commands_are_these() -> None:
    assert sorted(" ".join(path) for path in COMMANDS) == [
        "broker checksum",
        "broker clean",
        "broker elect",
        "broker status",
        "broker step-down",
        "broker trace",
        "client info",
        "client list",
        "client stacks",
        "cluster members",
        "cluster status",
        "dlq export",
        "dlq list",
        "dlq purge",
        "dlq resend",
        "dlq show",
        "group clone-offset",
        "group create",
        "group delete",
        "group forget",
        "group info",
        "group list",
        "group members",
        "group progress",
        "group reset-offset",
        "group skip",
        "group status",
        "group update",
        "local down",
        "local env",
        "local status",
        "local up",
        "message consume",
        "message delayed",
        "message get",
        "message query",
        "message recall",
        "message resend",
        "message send",
        "message trace",
        "message verify",
        "offsets export",
        "quota list",
        "quota set",
        "quota unset",
        "store dump",
        "store repair",
        "store verify",
        "topic allocate",
        "topic create",
        "topic delete",
        "topic list",
        "topic offset-by-time",
        "topic order",
        "topic route",
        "topic shrink",
        "topic status",
        "topic update",
        "transaction drop",
        "transaction list",
        "transaction resume",
        "transaction show",
    ]


# What RocketMQ's mqadmin calls it.
VERBS = {
    "broker clean": "cleanExpiredCQ, cleanUnusedTopic, deleteExpiredCommitLog",
    "broker elect": "electMaster",
    "broker status": "brokerStatus, haStatus, getBrokerEpoch",
    "broker step-down": "electMaster",
    "cluster members": "clusterList",
    "cluster status": "clusterList, getSyncStateSet",
    "group clone-offset": "cloneGroupOffset",
    "group create": "updateSubGroup",
    "group delete": "deleteSubGroup",
    "group info": "getConsumerConfig",
    "group list": "consumerProgress, without a group",
    "group members": "consumerConnection",
    "group progress": "consumerProgress",
    "group reset-offset": "resetOffsetByTime",
    "group skip": "skipAccumulatedMessage",
    "message consume": "consumeMessage, printMsg, printMsgByQueue",
    "message get": "queryMsgById",
    "message query": "queryMsgByKey, queryMsgByUniqueKey",
    "message send": "sendMessage",
    "message trace": "queryMsgTraceById",
    "topic allocate": "allocateMQ",
    "topic create": "updateTopic",
    "topic delete": "deleteTopic",
    "topic list": "topicList, topicClusterList",
    "topic order": "updateOrderConf",
    "topic route": "topicRoute",
    "topic shrink": "updateTopic, first with -w, then with -r",
    "topic status": "topicStatus",
    "topic update": "updateTopic, updateTopicPerm",
}


@pytest.mark.parametrize("path", [p for p in COMMANDS if p[0] not in ("local", "store")])
def test_the_help_of_every_command_names_mqadmins_verb(path: tuple[str, ...]) -> None:
    shown = " ".join(run(*path, "--help").output.split())
    found = re.search(r"mqadmin(?:: ([^.]*)| has no such verb)\.", shown)
    assert found is not None
    if (name := " ".join(path)) in VERBS:
        assert found[1] == VERBS[name]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_output(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "--output" in result.output
    remote = path[0] not in ("local", "store") and path != ("broker", "trace")
    assert ("--namesrv " in result.output) == remote


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a local cluster to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMETMQ_NAMESRV", raising=False)
    monkeypatch.delenv("COMETMQ_LOCAL_DIR", raising=False)
    return tmp_path


@pytest.mark.usefixtures("nowhere")
def test_without_a_name_server_the_way_out_is_told() -> None:
    result = run("topic", "list")
    assert result.exit_code == 2
    assert "--namesrv" in result.stderr
    assert "cometmq local up" in result.stderr


def test_the_local_clusters_name_servers_are_the_default(nowhere: Path) -> None:
    folder = nowhere / ".cometmq"
    folder.mkdir()
    process = {"name": "namesrv-1", "kind": "namesrv", "pid": 1, "start_ticks": 1, "address": "h:1"}
    (folder / "local.json").write_text(json.dumps({"options": {}, "processes": [process]}))
    assert cluster_command.connection_to(None, None)._namesrvs == ("h:1",)
    assert cluster_command.connection_to("other:2", None)._namesrvs == ("other:2",)


def test_a_refusal_is_exit_code_1_with_advice() -> None:
    result = run("cluster", "members", "--namesrv", SILENT)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "PEER_UNAVAILABLE" in result.stderr
    assert SILENT in result.stderr


def test_a_refusal_as_json() -> None:
    result = run("cluster", "members", "--output", "json", COMETMQ_NAMESRV=SILENT)
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["name"] == "PEER_UNAVAILABLE"


@pytest.mark.parametrize("form", ["table", "json"])
def test_options_of_the_way_may_stand_before_the_command(form: str) -> None:
    here = ("--namesrv", SILENT, "--output", form)
    before = run(*here, "cluster", "members", COMETMQ_NAMESRV="elsewhere:1")
    behind = run("cluster", "members", *here, COMETMQ_NAMESRV="elsewhere:1")
    assert before.exit_code == 1
    assert SILENT in before.stderr
    assert before.stderr == behind.stderr
    both = run("--namesrv", "elsewhere:1", "cluster", "members", "--namesrv", SILENT)
    assert SILENT in both.stderr, "what stands nearer counts"


def test_a_secret_may_be_named_before_the_command(tmp_path: Path) -> None:
    missing = ("--internal-secret-file", str(tmp_path / "missing"), "--namesrv", SILENT)
    observed = run(*missing, "broker", "status").stderr
    assert "missing" in observed
    assert observed == run("broker", "status", *missing).stderr


def test_only_a_table_with_more_columns_takes_wide() -> None:
    assert "--wide" in run("cluster", "members", "--help").output
    assert run("topic", "list", "--wide").exit_code == 2
    assert "PEER_UNAVAILABLE" in run("cluster", "members", "--wide", "--namesrv", SILENT).stderr


def test_a_bad_address_is_told_as_such() -> None:
    result = run("cluster", "members", "--namesrv", "nonsense")
    assert result.exit_code == 1
    assert "not host:port" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "create"],
        ["topic", "create", "T", "--queues", "many"],
        ["topic", "create", "T", "--flush", "sometimes"],
        ["topic", "create", "T", "--permission", "x"],
        ["message", "send", "T"],
        ["message", "send", "T", "body", "--queue", "7"],
        ["message", "send", "T", "body", "--property", "no-value"],
        ["message", "consume", "T", "--count", "0"],
        ["message", "consume", "T", "--queue", "g1/x"],
        ["local", "up", "--brokers", "-1"],
        ["topic", "create", "T", "--queues", "0"],
        ["topic", "create", "T", "--read-queues", "0"],
        ["topic", "create", "T", "--write-queues", "-1"],
        ["local", "up", "--option", "=x"],
        ["cluster", "members", "--output", "xml"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments, COMETMQ_NAMESRV=SILENT)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize("bodies", [[], ["x", "--file", "-"]])
def test_one_body_is_sent(bodies: list[str]) -> None:
    result = run("message", "send", "T", *bodies, COMETMQ_NAMESRV=SILENT)
    assert result.exit_code == 2
    assert "one body: as an argument, or as --file (- is standard input)" in result.stderr


def test_a_topic_is_deleted_only_after_a_yes() -> None:
    result = CliRunner().invoke(cli, ["topic", "delete", "T", "--namesrv", SILENT], input="n\n")
    assert result.exit_code == 1
    assert "PEER_UNAVAILABLE" not in result.output


def test_status_of_nothing(tmp_path: Path) -> None:
    table = run("local", "status", "--dir", str(tmp_path))
    assert table.exit_code == 0
    assert "cometmq local up" in table.stdout
    document = run("local", "status", "--dir", str(tmp_path), "--output", "json")
    expected = {
        "directory": str(tmp_path),
        "namesrv": "",
        "internal_secret_file": "",
        "processes": [],
    }
    assert json.loads(document.stdout) == expected


def test_up_again_says_what_the_cluster_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **given: object) -> None:
        assert given.pop("options") == {}
        assert given.pop("own_secret") is True
        assert callable(given.pop("tell"))
        assert set(given.values()) == {None}
        raise ClusterRunning("it is enough to know how it was called")

    monkeypatch.setattr(local, "up", refused)
    folder = ("--dir", str(tmp_path))
    assert "started with" not in run("local", "up", *folder).stderr
    shape = {"namesrvs": 1, "brokers": 3, "slaves": 1, "pullholds": 0}
    state = {"shape": shape, "options": {"a": "b"}, "processes": []}
    (tmp_path / "local.json").write_text(json.dumps(state))
    observed = "started with --namesrvs 1 --brokers 3 --slaves 1 --pullholds 0 --option a=b\n"
    assert observed in run("local", "up", *folder).stderr
    assert json.loads(run("local", "up", *folder, "--output", "json").stderr)["error"]


@pytest.mark.parametrize("text", ["old", "0" * 31, "G" * 32])
def test_a_store_id_is_32_digits_or_new(tmp_path: Path, text: str) -> None:
    result = run("store", "repair", str(tmp_path), "--store-id", text)
    assert result.exit_code == 2
    assert "32 hexadecimal digits" in result.stderr


def test_down_of_nothing(tmp_path: Path) -> None:
    result = run("local", "down", "--dir", str(tmp_path), "--output", "json")
    assert json.loads(result.stdout)["stopped_count"] == 0


def test_an_interrupted_command_says_so() -> None:
    @commandline.Group().command()
    def wait() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(wait).exit_code == 130


def test_the_version() -> None:
    assert run("--version").stdout.startswith("CometMQ ")


def test_the_local_clusters_secret_goes_with_its_name_servers(nowhere: Path) -> None:
    folder, secret = nowhere / ".cometmq", nowhere / "secret"
    folder.mkdir()
    secret.write_text("secret" * 3)
    process = {"name": "namesrv-1", "kind": "namesrv", "pid": 1, "start_ticks": 1, "address": "h:1"}
    options = {"internal_secret_file": str(secret)}
    (folder / "local.json").write_text(json.dumps({"options": options, "processes": [process]}))
    assert cluster_command.connection_to(None, None)._secret is not None
    observed = run("local", "status", "--dir", str(folder)).stdout
    assert f"export COMETMQ_INTERNAL_SECRET_FILE='{secret}'" in observed
    assert cluster_command.connection_to("h:1", None)._secret is not None, "the same, by its name"
    assert cluster_command.connection_to("other:2", None)._secret is None, "another cluster's"
    assert cluster_command.connection_to("other:2", secret)._secret is not None


def test_a_secret_that_is_no_good_is_told(nowhere: Path) -> None:
    (nowhere / "secret").write_text("too short")
    result = run("cluster", "members", "--namesrv", SILENT, COMETMQ_INTERNAL_SECRET_FILE="secret")
    assert result.exit_code == 1
    assert "internal_secret_file" in result.stderr
    assert "too short" not in result.stderr


def test_a_trace_is_read_over_the_port_of_the_metrics() -> None:
    recorder = FlightRecorder()
    recorder.note(Stage.GC_PAUSE, recorder.now_ns() - 5_000_000, 2)
    recorder.note(Stage.APPEND, recorder.now_ns(), 77)
    server = start_metrics_server(
        CollectorRegistry(), host="127.0.0.1", port=0, trace=recorder.as_json
    )
    try:
        address = f"127.0.0.1:{server.port}"
        [found] = json.loads(run("broker", "trace", address, "--output", "json").output)
        kept = run("broker", "trace", address, "--kept", "--output", "json").output
    finally:
        server.close()
    assert (found["stage"], found["number"], kept.strip()) == ("gc_pause", 2, "[]")
    assert run("broker", "trace", address).exit_code == 1


@pytest.mark.parametrize("page", ["# HELP", "{}", "[]"])
def test_a_trace_of_another_program_is_refused(page: str) -> None:
    server = start_metrics_server(
        CollectorRegistry(), host="127.0.0.1", port=0, trace=lambda _: page
    )
    try:
        result = run("broker", "trace", f"127.0.0.1:{server.port}")
    finally:
        server.close()
    assert (result.exit_code, "INVALID_REQUEST" in result.output) == (1, True)
