"""The options of the processes, as JSON schema, in the chart's ``values.schema.json``.

So `helm install` refuses a misspelt or impossible option before anything starts. Without arguments
the file is brought up to date; with ``--check`` a difference is a failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cometmq.member.config import MemberConfig
from services.namesrv.config import NamesrvConfig
from services.pullhold.config import PullholdConfig

SCHEMA = Path(__file__).resolve().parents[1] / "deploy/helm/cometmq/values.schema.json"
CONFIGS: Mapping[str, type[Any]] = {
    "namesrvConfig": NamesrvConfig,
    "memberConfig": MemberConfig,
    "pullholdConfig": PullholdConfig,
}
# The chart sets these itself, from values that it needs in other places too.
CHART_OWNED = frozenset(
    {
        "advertised_host",
        "announce_file",
        "broker_group",
        "cluster",
        "drain_grace_s",
        "internal_port",
        "internal_secret_file",
        "kv_config_path",
        "lease",
        "listen_host",
        "log_form",
        "log_level",
        "member_id",
        "metrics_port",
        "namesrv",
        "peers",
        "pod_name",
        "pod_uid",
        "port",
        "store_path",
    }
)
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def config_schema(cls: type[Any]) -> dict[str, Any]:
    """The schema of a ``config`` map: the options of ``cls`` that the chart leaves to its user."""
    hints = get_type_hints(cls)
    properties = {
        option.name: _option_schema(hints[option.name], option.metadata)
        for option in sorted(fields(cls), key=lambda option: option.name)
        if option.name not in CHART_OWNED
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _option_schema(kind: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    words = (metadata.get("help", ""), f"[{metadata['unit']}]" if metadata.get("unit") else "")
    schema: dict[str, Any] = {"description": " ".join(word for word in words if word)}
    if get_origin(kind) is UnionType:
        (kind,) = (inner for inner in get_args(kind) if inner is not type(None))
    if get_origin(kind) is tuple:
        return {**schema, "type": "array", "items": {"type": "string"}}
    if issubclass(kind, Enum):
        return {**schema, "enum": list(kind.__members__)}
    bounds = {name: metadata.get(name) for name in ("minimum", "maximum")}
    known = {name: bound for name, bound in bounds.items() if bound is not None}
    return {**schema, "type": _TYPES[kind], **known}


def updated(text: str) -> str:
    """``text``, a schema file, with the options as they are today."""
    schema = json.loads(text)
    for name, cls in CONFIGS.items():
        schema["$defs"][name] = config_schema(cls)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    text = SCHEMA.read_text(encoding="utf-8")
    new = updated(text)
    if "--check" in sys.argv[1:]:
        if text != new:
            sys.stderr.write(f"{SCHEMA.name} is not up to date: python -m scripts.chart_schema\n")
        return int(text != new)
    SCHEMA.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
