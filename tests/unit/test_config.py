"""Options: where values come from, what is refused, what --help shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.config import CONFIG_FILE_BYTES_MAX, LogForm, ServiceConfig, about, help_text, load
from cometmq.errors import ConfigInvalid, ConfigUnknownKey


class Flush(Enum):
    ASYNC_FLUSH = 1
    SYNC_FLUSH = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    name: str = field(metadata=about("Who it is."))
    count: int = field(default=3, metadata=about("How many.", unit="things", minimum=1, maximum=9))
    share: float = field(default=0.5, metadata=about("How much.", minimum=0, maximum=1))
    loud: bool = field(default=False, metadata=about("Whether."))
    folder: Path | None = field(default=None, metadata=about("Where."))
    flush: Flush = field(default=Flush.ASYNC_FLUSH, metadata=about("When."))
    peers: tuple[str, ...] = field(default=(), metadata=about("With whom."))

    def __post_init__(self) -> None:
        if self.loud and self.count > 5:
            raise ConfigInvalid("loud: at most 5 may be loud")


def _load(*argv: str, **environ: str) -> Options:
    return load(Options, argv=["--name", "n", *argv], environ=environ)


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_unless_told_otherwise() -> None:
    assert _load() == Options(name="n")


def test_every_type_is_read_from_text() -> None:
    words = "--count=4 --share 0.25 --loud yes --folder /x --flush sync_flush --peers a:1;b:2;"
    assert _load(*words.split()) == Options(
        name="n",
        count=4,
        share=0.25,
        loud=True,
        folder=Path("/x"),
        flush=Flush.SYNC_FLUSH,
        peers=("a:1", "b:2"),
    )


def test_every_type_is_read_from_a_file(tmp_path: Path) -> None:
    text = "count: 4\nshare: 1\nloud: true\nfolder: /x\nflush: SYNC_FLUSH\npeers: ['a:1', 'b:2']\n"
    options = _load("--config", _file(tmp_path, text))

    assert (options.count, options.share, options.loud) == (4, 1.0, True)
    assert (options.folder, options.flush) == (Path("/x"), Flush.SYNC_FLUSH)
    assert options.peers == ("a:1", "b:2")


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "count: 1\nshare: 0.1\npeers: [a]\n")
    options = _load("--count", "3", COMETMQ_CONFIG=path, COMETMQ_COUNT="2", COMETMQ_SHARE="0.2")

    assert (options.count, options.share, options.peers) == (3, 0.2, ("a",))


def test_the_flag_names_the_file_that_counts(tmp_path: Path) -> None:
    path = _file(tmp_path, "count: 7\n")
    assert _load("--config", path, COMETMQ_CONFIG="/nowhere").count == 7


def test_none_is_the_empty_text(tmp_path: Path) -> None:
    assert _load("--folder", "").folder is None
    assert _load("--config", _file(tmp_path, "folder: null\n")).folder is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cuont", "3"], "'cuont'; the nearest is 'count'"),
        (["--folder-", "3"], "the nearest is 'folder'"),
        (["--zzz", "3"], "'zzz'"),
    ],
)
def test_an_unknown_flag_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigUnknownKey, match=words):
        _load(*argv)


def test_an_unknown_name_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigUnknownKey, match="'pears'; the nearest is 'peers'"):
        _load(COMETMQ_PEARS="x")


def test_an_unknown_name_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigUnknownKey, match="'counts'; the nearest is 'count'"):
        _load("--config", _file(tmp_path, "counts: 3\n"))


def test_what_other_programs_read_is_no_unknown_name() -> None:
    others = {"COMETMQ_NAMESRV": "a:1", "COMETMQ_SEED": "7", "COMETMQ_NATIVE": "0", "HOME": "/x"}
    assert _load(**others) == Options(name="n")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", "x", "'x' is not INTEGER"),
        ("count", "1.5", "INTEGER"),
        ("count", "٣", "INTEGER"),
        ("count", "", "INTEGER"),
        ("count", "0", r"0 is out of range \[things, 1 to 9, default 3\]"),
        ("count", "10", "out of range"),
        ("share", "nan", "NUMBER"),
        ("share", "inf", "NUMBER"),
        ("share", "-0.1", "out of range"),
        ("loud", "maybe", "true|false"),
        ("flush", "never", "'never' is none of ASYNC_FLUSH, SYNC_FLUSH"),
        ("folder", "a\0b", "PATH"),
    ],
)
def test_a_bad_value_names_its_option_and_the_reason(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"option {name}: .*{words}"):
        _load(f"--{name}={value}")


@pytest.mark.parametrize("text", ["count: true", "loud: 1", "flush: on", "peers: 3", "folder: 5"])
def test_a_file_value_of_another_type_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigInvalid, match="option"):
        load(
            Options, argv=["--config", _file(tmp_path, f"{text}\n")], environ={"COMETMQ_NAME": "n"}
        )


@pytest.mark.parametrize(
    ("text", "words"), [("[1]", "must map"), ("a: [", "not YAML"), ("\x01", "not YAML")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        _load("--config", _file(tmp_path, text))


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert _load("--config", _file(tmp_path, "# nothing\n")) == Options(name="n")


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        _load("--config", str(tmp_path / "absent"))
    with pytest.raises(ConfigInvalid, match="more than"):
        _load("--config", _file(tmp_path, "#" * (CONFIG_FILE_BYTES_MAX + 1)))


@pytest.mark.parametrize("argv", [["stray"], ["--count"], ["-c", "3"], ["--"]])
def test_what_is_no_flag_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigInvalid, match=r"argument|a value must follow"):
        _load(*argv)


def test_a_required_option_must_be_given() -> None:
    with pytest.raises(ConfigInvalid, match="name is required: Who it is"):
        load(Options, argv=[], environ={})


def test_a_rule_across_options_is_checked() -> None:
    with pytest.raises(ConfigInvalid, match="at most 5"):
        _load("--loud", "true", "--count", "6")


def test_help_lists_every_option_with_unit_range_and_default() -> None:
    text = help_text(Options)

    assert "--name TEXT\n      Who it is. [required]" in text
    assert "--count INTEGER\n      How many. [things, 1 to 9, default 3]" in text
    assert "--flush ASYNC_FLUSH|SYNC_FLUSH\n      When. [default ASYNC_FLUSH]" in text
    assert "COMETMQ_ABC" in text


def test_help_is_printed_and_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _load("--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out == help_text(Options)


def test_every_service_has_the_common_options() -> None:
    config = load(ServiceConfig, argv=["--log_form", "json", "--metrics_port", "0"], environ={})
    assert (config.log_form, config.metrics_port, config.listen_host) == (
        LogForm.JSON,
        0,
        "127.0.0.1",
    )


@given(st.integers(1, 9), st.floats(0, 1), st.booleans(), st.lists(st.text("abc:.", min_size=1)))
def test_what_is_written_is_read(count: int, share: float, loud: bool, peers: list[str]) -> None:
    loud = loud and count <= 5
    options = _load(
        f"--count={count}", f"--share={share!r}", f"--loud={loud}", "--peers=" + ";".join(peers)
    )
    assert options == Options(name="n", count=count, share=share, loud=loud, peers=tuple(peers))


@given(st.dictionaries(st.sampled_from(["count", "share", "flush", "peers", "loud"]), st.text()))
def test_any_text_is_taken_or_refused_by_the_catalogue(given_texts: dict[str, str]) -> None:
    try:
        options = _load(*(f"--{name}={text}" for name, text in given_texts.items()))
    except ConfigInvalid:
        return
    assert 1 <= options.count <= 9
    assert 0 <= options.share <= 1
