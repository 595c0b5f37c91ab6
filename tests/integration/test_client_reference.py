"""The examples of docs/reference/client.md are one program that runs; the page names all of it."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path
from typing import Any

import pytest

import cometmq.client
from tests.support.cluster.broker import running_broker, running_namesrv

PAGE = (Path(__file__).parents[2] / "docs/reference/client.md").read_text(encoding="utf-8")
EXAMPLES = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S))


@pytest.mark.timeout(60)
async def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path / "store", namesrv=(namesrv,), auto_create_topic_enable=True),
    ):
        monkeypatch.setenv("COMETMQ_NAMESRV", namesrv)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        names: dict[str, Any] = {}
        program = compile(EXAMPLES, "docs/reference/client.md", "exec", flags=flags)
        await types.FunctionType(program, names)()
    assert names["batch"].outcome is cometmq.client.PullOutcome.FOUND


def test_each_public_name_has_a_chapter_and_an_example() -> None:
    chapters = re.split(r"^## ", PAGE, flags=re.M)[1:]
    named = [name for chapter in chapters for name in chapter.splitlines()[0].split(", ")]
    assert sorted(named) == cometmq.client.__all__
    assert all("```python" in chapter for chapter in chapters)


@pytest.mark.parametrize("name", cometmq.client.__all__)
def test_each_public_member_is_named(name: str) -> None:
    chapter = next(c for c in re.split(r"^## ", PAGE, flags=re.M) if name in c.splitlines()[0])
    members = [m for m in vars(getattr(cometmq.client, name)) if not m.startswith("_")]
    options = "Options" in name  # generated: docs/reference/options.md
    assert [m for m in members if not options and not re.search(rf"\b{m}\b", chapter)] == []
