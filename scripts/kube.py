"""A Kubernetes API server and its etcd, kept in ``.tools``: one program, compiled with Go.

``python -m scripts.kube`` builds it from ``tests/kube/server`` when it is not there yet: minutes on
an empty cache. Go fetches the modules and checks them by ``go.sum``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests/kube/server"
BUILD_S_MAX = 1_800


class KubeMissing(Exception):
    """The program is not there, or cannot be built: no Go, no network, another platform."""


def version() -> str:
    """Of Kubernetes, as ``go.mod`` wants it: 1.34.4."""
    found = re.search(r"^\tk8s\.io/kubernetes v(\S+)$", (SOURCE / "go.mod").read_text(), re.M)
    assert found is not None
    return found[1]


def place() -> Path:
    """Where the program is once it is built; another source has another place."""
    sources = sorted(path for path in SOURCE.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return ROOT / ".tools" / f"kube-{version()}-{digest[:8]}" / "kube"


def kube() -> Path:
    """The program; KubeMissing when it is not built."""
    if not place().exists():
        raise KubeMissing(
            "the API server of Kubernetes is missing: python -m scripts.kube builds it"
        )
    return place()


def build() -> Path:
    """The program, built when it is not there yet. KubeMissing says why it cannot be built."""
    target = place()
    if target.exists():
        return target
    if shutil.which("go") is None:
        raise KubeMissing("go is missing: it compiles the API server of Kubernetes")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"kube.{os.getpid()}.tmp")
    _compile(draft)
    draft.replace(target)
    return target


def _compile(target: Path) -> None:
    major, minor, _ = version().split(".")
    stamps = {"gitVersion": f"v{version()}", "gitMajor": major, "gitMinor": minor}
    stamped = [f"-X k8s.io/component-base/version.{key}={text}" for key, text in stamps.items()]
    flags = [
        "-trimpath",
        "-buildvcs=false",
        "-mod=readonly",
        "-ldflags",
        " ".join(["-s -w", *stamped]),
    ]
    # No other compiler is fetched, and no flag of the user's is in the way.
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    try:
        subprocess.run(
            ["go", "build", *flags, "-o", str(target), "."],
            cwd=SOURCE,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=BUILD_S_MAX,
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise KubeMissing(f"go build: {output[-1:]}") from error


def main() -> int:
    try:
        sys.stdout.write(f"{build()}\n")
    except KubeMissing as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
