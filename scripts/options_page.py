"""Writes docs/reference/options.md from the options that the code declares.

Without arguments the page is brought up to date; with ``--check`` a difference is a failure.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, get_type_hints

from cometmq.client import (
    ProducerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
    SimpleConsumerOptions,
    Strategy,
)
from cometmq.client.hooks import ConsumeHook, FilterHook, SendHook
from cometmq.client.options import ConsumerOptions, GroupOptions, QueueSelector, TraceOptions
from cometmq.config import ServiceConfig, kind_text
from cometmq.member.config import MemberConfig
from services.namesrv.config import NamesrvConfig
from services.pullhold.config import PullholdConfig
from spark.lag.job import new_parser

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/options.md"
FIRST_HEADING = "## Every service\n"  # what is above it is written by hand
SERVICES = (
    ("Every service", ServiceConfig, None),
    ("Name server", NamesrvConfig, ServiceConfig),
    ("Member: broker and follower", MemberConfig, ServiceConfig),
    ("Pull-hold", PullholdConfig, ServiceConfig),
)
CLIENTS = (
    ("Producers and consumers", TraceOptions, None),
    ("Producer", ProducerOptions, TraceOptions),
    ("Push and pull consumer", ConsumerOptions, TraceOptions),
    ("Member of a group", GroupOptions, ConsumerOptions),
    ("Push consumer", PushConsumerOptions, GroupOptions),
    ("Pull consumer", PullConsumerOptions, GroupOptions),
    ("Simple consumer", SimpleConsumerOptions, ConsumerOptions),
)


def updated(text: str) -> str:
    """``text``, the page, with the options as they are today."""
    parts = list[str]()
    for title, cls, base in (*SERVICES, *CLIENTS):
        parts.append(f"## {title}\n")
        for section, options in _sections(cls, base):
            if section:
                parts.append(f"### {title.partition(':')[0]}: {section}\n")
            parts.append(_table(cls, options))
    parts.append("## Lag job\n")
    parts.append("`python -m spark.lag.job`; the export is `cometmq offsets export`.\n")
    parts.append(_lag_table())
    return text.partition(FIRST_HEADING)[0] + "\n".join(parts)


def _sections(cls: type[Any], base: type[Any] | None) -> Iterator[tuple[str, list[Field[Any]]]]:
    """The options that ``cls`` adds to ``base``, under the headings of its source."""
    inherited = {option.name for option in fields(base)} if base else set()
    own = {option.name: option for option in fields(cls) if option.name not in inherited}
    title, section = "", list[Field[Any]]()
    for line in inspect.getsource(cls).splitlines():
        if heading := re.match(r"    # --- (.+) ---$", line):
            yield title, section
            title, section = heading[1], []
        elif (declared := re.match(r"    (\w+):", line)) and declared[1] in own:
            section.append(own.pop(declared[1]))
    assert not own
    yield title, section


def _table(cls: type[Any], options: Sequence[Field[Any]]) -> str:
    hints = get_type_hints(cls)
    rows = [
        (
            f"`{option.name}`",
            _default(option),
            _unit_and_range(option, hints[option.name]),
            option.metadata["help"],
            option.metadata["rocketmq"],
        )
        for option in options
    ]
    return _markdown(("option", "default", "unit, range", "meaning", "RocketMQ"), rows)


def _default(option: Field[Any]) -> str:
    match option.default:
        case _ if option.default_factory is not MISSING:
            return "computed"
        case None | "" | ():
            return "none"
        case Enum() as value:
            return f"`{value.name}`"
        case tuple() as value:
            return f"`{';'.join(value)}`"
        case bool() as value:
            return f"`{str(value).lower()}`"
        case int() as value if option.name.endswith("port"):
            return str(value)
        case int() | float() as value:
            return f"{value:,}"
        case value:
            return f"`{value}`"


def _unit_and_range(option: Field[Any], hint: Any) -> str:
    known = option.metadata
    low, high = known.get("limits") or (known.get("minimum"), known.get("maximum"))
    ending = option.name.rsplit("_", 1)[-1]
    unit = known.get("unit") or {"ms": "ms"}.get(ending, "bytes" if "_bytes" in option.name else "")
    if low is None:
        limits = kind_text(hint).replace("|", ", ") if hint not in _UNPARSED else _UNPARSED[hint]
        limits = limits if isinstance(hint, EnumMeta) else limits.lower()
    else:
        limits = f"from {low:,}" if high is None else f"{low:,} to {high:,}"
    return ", ".join(part for part in (unit, limits) if part)


# What kind_text does not know, because no service has it: it cannot be given as text.
_UNPARSED = {
    QueueSelector | None: "function",
    Strategy: "strategy",
    tuple[SendHook, ...]: "hooks",
    tuple[ConsumeHook, ...]: "hooks",
    tuple[FilterHook, ...]: "hooks",
}


def _lag_table() -> str:
    rows = []
    for action in new_parser()._actions:
        if action.dest == "help":
            continue
        default = "required" if action.required else f"`{action.default}`"
        form = ", ".join(map(str, action.choices or ())) or getattr(action.type, "__name__", "text")
        meaning = (action.help or "").capitalize() + "."
        shown = "none" if default == "`None`" else default
        rows.append((f"`{action.option_strings[0]}`", shown, form.lower(), meaning, ""))
    return _markdown(("option", "default", "form", "meaning", "RocketMQ"), rows)


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kept = range(len(titles)) if any(row[-1] for row in rows) else range(len(titles) - 1)
    lines = [titles, ["---"] * len(titles), *rows]
    shown = [[line[column].replace("|", "\\|") for column in kept] for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in shown) + "\n"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = updated(text)
    if "--check" in sys.argv[1:]:
        if text != new:
            sys.stderr.write(f"{PAGE.name} is not up to date: python -m scripts.options_page\n")
        return int(text != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
