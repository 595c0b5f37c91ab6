"""Options of a program: a frozen dataclass, filled from YAML file < environment < flags.

A program declares its options once; help text, unit and range are beside the default:

    @dataclass(frozen=True, kw_only=True)
    class BrokerConfig(ServiceConfig):
        broker_group: str = field(metadata=about("Name of the broker group."))  # required
        port: int = field(default=10911, metadata=about("Port.", minimum=0, maximum=65_535))

    config = load(BrokerConfig, argv=sys.argv[1:], environ=os.environ)

Types: ``int``, ``float``, ``bool`` (true, false), ``str``, ``Path``, an ``Enum`` (by name),
``tuple[str, ...]`` (``;`` between the items), and ``T | None`` (the empty text is None).
A rule across options belongs into ``__post_init__`` and raises :class:`ConfigInvalid`.
Unknown names are refused everywhere, because a misspelt limit is no limit.
"""

from __future__ import annotations

import difflib
import math
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cometmq.errors import ConfigInvalid, ConfigUnknownKey
from cometmq.model import PORT_MAX

T = TypeVar("T")

MIB = 1024 * 1024
ENVIRONMENT_PREFIX = "COMETMQ_"
CONFIG_FILE_BYTES_MAX = MIB

# What the command, the tests, cometmq/native and the flight recorder read: it must not keep a
# service from starting.
_READ_BY_OTHERS = frozenset(
    {"internal_secret_file", "namesrv", "native", "profile", "seed", "trace_entries"}
)
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


def about(
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    rocketmq: str = "",
) -> Mapping[str, object]:
    """The metadata of an option's field. ``minimum`` and ``maximum`` are included; ``rocketmq`` is
    RocketMQ's name for the option, if it has one.
    """
    bounds = {"minimum": minimum, "maximum": maximum}
    return {"help": help, "unit": unit, **bounds, "rocketmq": rocketmq}


class LogForm(Enum):
    """How a log line looks."""

    PLAIN = "plain"
    JSON = "json"


class LogLevel(Enum):
    """The least level that is logged; the values are those of :mod:`logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The options that every service has."""

    listen_host: str = field(
        default="127.0.0.1", metadata=about("Address to listen on, for calls and for metrics.")
    )
    metrics_port: int = field(
        default=5557,
        metadata=about(
            "Port of the Prometheus metrics; 0 = any free one.", minimum=0, maximum=PORT_MAX
        ),
    )
    announce_file: Path | None = field(
        default=None,
        metadata=about(
            "Written when the process is ready: JSON with the process id and the bound addresses."
        ),
    )
    drain_grace_s: float = field(
        default=10.0,
        metadata=about(
            "How long calls in flight may take after SIGTERM.", unit="s", minimum=0, maximum=3_600
        ),
    )
    log_form: LogForm = field(default=LogForm.PLAIN, metadata=about("Form of a log line."))
    log_level: LogLevel = field(
        default=LogLevel.INFO, metadata=about("Least level that is logged.")
    )
    trace_limit_ms: int = field(
        default=500,
        metadata=about(
            "A turn of the event loop, a sync of the log or the answer to a hold that takes longer "
            "keeps the flight recorder's ring, for `cometmq broker trace`; 0 = none does.",
            unit="ms",
            minimum=0,
            maximum=60_000,
        ),
    )

    loop_stall_ms: int = field(
        default=5_000,
        metadata=about(
            "An event loop that has not turned for so long is logged with the stack of its thread; "
            "0 = it is not watched.",
            unit="ms",
            minimum=0,
            maximum=600_000,
        ),
    )

    # --- clients that do not read, on each port ---
    calls_per_connection_max: int = field(
        default=1_024,
        metadata=about("Calls in flight on one connection.", minimum=1, maximum=65_536),
    )
    unread_bytes_max: int = field(
        default=32 * MIB,
        metadata=about(
            "Answers that clients have not read yet; each is held twice. Half of it is "
            "kept for connections that have read as much before.",
            unit="bytes",
            minimum=MIB,
        ),
    )
    unread_bytes_per_connection_max: int = field(
        default=16 * MIB,
        metadata=about("Unread answers of one connection.", unit="bytes", minimum=MIB),
    )
    unread_bytes_per_address_max: int = field(
        default=8 * MIB,
        metadata=about(
            "Unread answers of one address, beyond what its connections have read before.",
            unit="bytes",
            minimum=MIB,
        ),
    )
    unread_calls_max: int = field(
        default=512,
        metadata=about(
            "Calls whose client has not sent all of its request or not read its answer. "
            "Above it a connection gets as many as it has read before, at least four.",
            minimum=1,
        ),
    )
    unread_s_max: float = field(
        default=30.0,
        metadata=about(
            "How long an answer may stay unread, plus 1 s for each 64 KiB; then the "
            "service closes the connection. While other calls wait for room: 5 s without "
            "reading.",
            unit="s",
            minimum=0.1,
            maximum=3_600,
        ),
    )


def load(
    cls: type[T],
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    prefix: str = ENVIRONMENT_PREFIX,
) -> T:
    """Fill ``cls``, a frozen dataclass of options, and check it.

    ``--config FILE`` or ``<prefix>CONFIG`` names a YAML file. ``--help`` prints all options and
    raises ``SystemExit(0)``. Raises ConfigUnknownKey, which names the nearest known option, and
    ConfigInvalid, which names the option and the reason.
    """
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(help_text(cls, prefix=prefix))
        raise SystemExit(0)
    hints = get_type_hints(cls)
    options = {option.name: option for option in fields(cast(Any, cls))}
    flags = _flags(argv)
    env = _environment(environ, prefix, known=options)
    path = env.pop("config", "")
    path = flags.pop("config", path)
    given: dict[str, object] = {**(_file(Path(path)) if path else {}), **env, **flags}
    _refuse_unknown(given, options)
    _refuse_missing(given, options.values())
    values = {name: _value(options[name], hints[name], raw) for name, raw in given.items()}
    return cls(**values)


def help_text(cls: type[Any], *, prefix: str = ENVIRONMENT_PREFIX) -> str:
    """All options of ``cls``, two lines each."""
    hints = get_type_hints(cls)
    lines = [
        f"Options (YAML file < environment < flags; the environment name of --abc is {prefix}ABC):",
        "",
        "  --config FILE",
        "      YAML file with options by name.",
    ]
    for option in fields(cls):
        lines.append(f"  --{option.name} {kind_text(hints[option.name])}")
        lines.append(f"      {option.metadata.get('help', '')} {_range_text(option)}".rstrip())
    return "\n".join(lines) + "\n"


# --- where values come from -----------------------------------------------------------------------


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value``; a later one of the same name wins."""
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--") or word == "--":
            raise ConfigInvalid(f"unexpected argument {word!r}: options are given as --name value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigInvalid(f"option {name}: a value must follow")
            value = following
        found[name] = value
    return found


def _environment(environ: Mapping[str, str], prefix: str, known: Iterable[str]) -> dict[str, str]:
    ours = {k[len(prefix) :].lower(): v for k, v in environ.items() if k.startswith(prefix)}
    for name in _READ_BY_OTHERS.difference(known):
        ours.pop(name, None)
    return ours


def _file(path: Path) -> dict[str, object]:
    import yaml  # here, because most processes get no file

    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(text) > CONFIG_FILE_BYTES_MAX:
            raise ConfigInvalid(f"{path} has more than {CONFIG_FILE_BYTES_MAX} bytes")
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigInvalid(f"{path} must map option names to values")
    return {str(name): value for name, value in content.items()}


def _refuse_unknown(given: Mapping[str, object], known: Mapping[str, object]) -> None:
    for name in given:
        if name in known:
            continue
        nearest = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
        raise ConfigUnknownKey(f"there is no option {name!r}{hint}")


def _refuse_missing(given: Mapping[str, object], options: Iterable[Field[Any]]) -> None:
    for option in options:
        no_default = option.default is MISSING and option.default_factory is MISSING
        if no_default and option.name not in given:
            about_it = option.metadata.get("help", "")
            raise ConfigInvalid(f"option {option.name} is required: {about_it}")


# --- one value ------------------------------------------------------------------------------------


def _value(option: Field[Any], kind: Any, raw: object) -> Any:
    inner, optional = _optional(kind)
    if optional and (raw is None or raw == ""):
        return None
    try:
        value = _parse(inner, raw)
    except ValueError as error:
        wanted = kind_text(inner)
        reason = str(error) or f"{raw!r} is not {wanted}"
        raise ConfigInvalid(f"option {option.name}: {reason}") from None
    _check_range(option, value)
    return value


def _parse(kind: Any, raw: object) -> Any:
    """Parse text, or take a YAML value of the right type. A ValueError without text: not of it."""
    if get_origin(kind) is tuple:
        items = [_text(item) for item in raw] if isinstance(raw, list) else _text(raw).split(";")
        return tuple(item.strip() for item in items if item.strip())
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _parse_enum(kind, raw)
    return _PARSERS[kind](raw)


def _parse_int(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    text = _text(raw).strip()
    if not text.removeprefix("-").replace("_", "").isdecimal() or not text.isascii():
        raise ValueError
    return int(text)


def _parse_float(raw: object) -> float:
    number = float(raw) if isinstance(raw, float) else None
    if number is None and isinstance(raw, int) and not isinstance(raw, bool):
        number = float(raw)
    if number is None:
        try:
            number = float(_text(raw))
        except ValueError:
            raise ValueError from None
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = _text(raw).strip().lower()
    if text not in _TRUE and text not in _FALSE:
        raise ValueError
    return text in _TRUE


def _parse_enum(kind: type[Enum], raw: object) -> Enum:
    if isinstance(raw, bool):  # YAML 1.1 reads ON and OFF as booleans
        raise ValueError
    member = kind.__members__.get(_text(raw).strip().upper())
    if member is None:
        raise ValueError(f"{raw!r} is none of {', '.join(kind.__members__)}")
    return member


def _text(raw: object) -> str:
    if not isinstance(raw, str) or "\0" in raw:
        raise ValueError
    return raw


_PARSERS: dict[Any, Any] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
    str: _text,
    Path: lambda raw: Path(_text(raw)).expanduser(),
}


def _optional(kind: Any) -> tuple[Any, bool]:
    """``T | None`` → (T, True)."""
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
        return inner, True
    return kind, False


def _check_range(option: Field[Any], value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    low, high = option.metadata.get("minimum"), option.metadata.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigInvalid(f"option {option.name}: {value} is out of range {_range_text(option)}")


def kind_text(kind: Any) -> str:
    inner, _ = _optional(kind)
    if get_origin(inner) is tuple:
        return "A;B;…"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "|".join(inner.__members__)
    return {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}[inner]


def _range_text(option: Field[Any]) -> str:
    """``[s, 0 to 3600, default 10]``: unit, range and default, as far as there are any."""
    parts = [option.metadata.get("unit", "")]
    low, high = option.metadata.get("minimum"), option.metadata.get("maximum")
    if low is not None or high is not None:
        parts.append(f"{'' if low is None else low} to {'' if high is None else high}".strip())
    if option.default is MISSING:
        parts.append("required")
    elif option.default is not None:
        default = option.default
        parts.append(f"default {default.name if isinstance(default, Enum) else default}")
    shown = ", ".join(part for part in parts if part)
    return f"[{shown}]" if shown else ""
