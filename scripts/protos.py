"""Generate ``cometmq/v1`` from ``proto/cometmq/v1``, or prove that it is what generation gives.

Usage: python scripts/protos.py [--check]

protoc derives Python imports from file paths; the folder below ``proto/`` is the package path, so
nothing has to be rewritten. ``--check`` generates into a temporary folder and compares every byte,
and compares the lower bounds of protobuf and grpcio in pyproject.toml with the versions that the
generated code demands.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("cometmq/v1")
HAND_WRITTEN = {"__init__.py"}


def generate(target: Path) -> None:
    """Write all stubs below ``target``; CalledProcessError when protoc refuses the contract."""
    sources = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    outputs = [
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", f"-I{well_known}"]
    # protoc looks for its plugins on the PATH: those beside this interpreter are the pinned ones.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(
        [*command, *outputs, *sources], cwd=ROOT, env={**os.environ, "PATH": path}, check=True
    )


def stubs(folder: Path) -> dict[str, bytes]:
    """The generated files of a folder by name."""
    files = (p for p in folder.glob("*.py*") if p.is_file() and p.name not in HAND_WRITTEN)
    return {p.name: p.read_bytes() for p in files}


def differences() -> list[str]:
    """What distinguishes the committed stubs from newly generated ones."""
    with tempfile.TemporaryDirectory(prefix="cometmq-proto-") as temporary:
        generate(Path(temporary))
        wanted = stubs(Path(temporary) / PACKAGE)
    found = stubs(ROOT / PACKAGE)
    missing = [f"{PACKAGE / name} is missing" for name in wanted.keys() - found.keys()]
    foreign = [f"{PACKAGE / name} comes from no .proto" for name in found.keys() - wanted.keys()]
    changed = [
        f"{PACKAGE / name} differs from what generation gives"
        for name in wanted.keys() & found.keys()
        if wanted[name] != found[name]
    ]
    return sorted(missing + foreign + changed)


def demanded(name: str, pattern: str) -> set[str]:
    """Versions of their run time that the committed stubs called ``name`` demand."""
    texts = (p.read_text() for p in (ROOT / PACKAGE).glob(name))
    return {match for text in texts for match in re.findall(pattern, text)}


def wrong_bounds() -> list[str]:
    """Lower bounds in pyproject.toml that are not what the generated code demands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    demands = {
        "protobuf": demanded("*_pb2.py", r"Protobuf Python Version: ([\d.]+)"),
        "grpcio": demanded("*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
    }
    return [
        f"pyproject.toml has to say {package}>={version}"
        for package, versions in demands.items()
        for version in sorted(versions)
        if f"{package}>={version}" not in project["dependencies"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    if not parser.parse_args().check:
        for name in stubs(ROOT / PACKAGE):
            (ROOT / PACKAGE / name).unlink()
        generate(ROOT)
    faults = differences() + wrong_bounds()
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print("Run `make proto` and commit what it changes.", file=sys.stderr)
    else:
        print(f"{len(stubs(ROOT / PACKAGE))} stubs are byte for byte what generation gives")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
