"""Loading the C extension, and what it gives to everybody: checksums."""

from __future__ import annotations

import sys
import tomllib
import zlib
from pathlib import Path

import pytest

from cometmq import native

# --- loading ------------------------------------------------------------------------------------


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_NATIVE", "0")
    assert native._load() is None


def test_a_package_without_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cometmq.native._accelerator", None)  # as if it were not there
    monkeypatch.delenv("COMETMQ_NATIVE", raising=False)
    assert native._load() is None


def test_the_description_tells_which_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "accelerator", None)
    assert native.description() == "plain"


@pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")
def test_the_description_tells_how_checksums_are_made() -> None:
    assert native.description() in {"native, CRC-32 by pclmulqdq", "native, CRC-32 by tables"}


def test_the_build_knows_all_files() -> None:
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    [extension] = project["tool"]["setuptools"]["ext-modules"]
    found = {p.relative_to(root).as_posix() for p in (root / "cometmq/native").glob("*.[ch]")}
    assert {*extension["sources"], *extension["depends"]} == found


# --- checksums ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("implementation")
def test_both_give_the_crc_of_a_batch() -> None:
    assert native.crc32(b"123456789") == 0xCBF43926
    assert native.crc32(memoryview(b"0123456789")[1:]) == 0xCBF43926


@pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")
@pytest.mark.parametrize("name", ["crc32", "crc32_portable"])
def test_every_length_has_the_crc_of_zlib(name: str) -> None:
    crc32 = getattr(native.accelerator, name)
    data = zlib.compress(bytes(range(256)) * 64, 1) * 8
    for length in (*range(300), 511, 512, 513, 1000, 1024, len(data)):
        for start in (0, 1, 7):
            piece = data[start : start + length]
            assert crc32(piece) == zlib.crc32(piece)
