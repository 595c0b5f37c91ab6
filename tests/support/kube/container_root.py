"""The file tree that a container sees, as a shell script of mounts.

The script makes the tree in a mount namespace of its own and becomes the command that it is given.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from tests.support.kube.chart import Object
from tests.support.kube.dockerfile import Stage, parse, sources
from tests.support.kube.pods import Cluster, Pod

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = "/opt/cometmq"  # where the images have their Python environment
USER_ID = 10001  # of the user that the images make
LENT = ("ssl", "alternatives", "java-17-openjdk", "java-21-openjdk")  # of the machine's /etc
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True)
class Images:
    """The images by what their Dockerfile says; ``trees`` gets the code of each."""

    trees: Path
    stages: dict[str, Stage]

    @staticmethod
    def make(trees: Path) -> Images:
        stages = parse(ROOT / "deploy/docker/Dockerfile")
        for target in ("service", "lag"):
            (trees / target).mkdir(parents=True)
            for name in sources(stages, target):
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / name, trees / target / name, ignore=ignored)
        _readable(trees)
        _write_commands(trees / "bin")
        return Images(trees, stages)

    def stage(self, image: str) -> Stage:
        return self.stages[_target(image)]

    def mounts(self, image: str) -> list[str]:
        """The Python environment where the image has it; the code where the environment looks
        for it: its one path file names this repository. Nothing else of the repository is there."""
        lines = [bind(Path(sys.prefix), ENVIRONMENT), bind(self.trees / _target(image), str(ROOT))]
        lines += [
            f"mount --bind {quote(str(script))} $R{ENVIRONMENT}/bin/{script.name}"
            for script in (self.trees / "bin").iterdir()
        ]
        base = Path(sys.base_prefix)
        if not base.is_relative_to("/usr"):
            lines.append(bind(base, str(base)))
        return lines


def write_etc(etc: Path, hosts: str) -> None:
    """/etc of every container: names, users as `useradd` leaves them in the image, no resolver."""
    etc.mkdir(parents=True)
    users = f"root:x:0:0::/:/bin/sh\ncometmq:x:{USER_ID}:{USER_ID}::/var/cache/cometmq:/bin/sh\n"
    (etc / "hosts").write_text(hosts)
    (etc / "resolv.conf").write_text("")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "host.conf").write_text("multi on\n")  # a name on two lines has two addresses
    (etc / "passwd").write_text(users)
    (etc / "group").write_text(f"root:x:0:\ncometmq:x:{USER_ID}:\n")
    if Path("/etc/ld.so.cache").exists():
        shutil.copyfile("/etc/ld.so.cache", etc / "ld.so.cache")
    _readable(etc)


@dataclass(frozen=True)
class Roots:
    """Makes the script of each container; ``state`` holds what the mounts show."""

    state: Path
    cluster: Cluster
    images: Images

    def script(self, pod: Pod, container: Object) -> str:
        root = self.state / "roots" / pod.name / container["name"]
        root.mkdir(parents=True)
        lines = [
            f"R={quote(str(root))}",
            "mount -t tmpfs -o mode=755 tmpfs $R",
            *_system(self.state / "etc"),
            *(self._volume(pod, mount) for mount in container["volumeMounts"]),
            *self.images.mounts(container["image"]),
        ]
        if container["securityContext"]["readOnlyRootFilesystem"]:
            lines.append("mount -o remount,ro $R")
        workdir = container.get("workingDir", "/")
        lines.append(f'exec chroot $R env --chdir={quote(workdir)} "$@"')
        return "\n".join(lines)

    def _volume(self, pod: Pod, mount: Object) -> str:
        name = mount["name"]
        volume: Object = next((v for v in pod.spec["volumes"] if v["name"] == name), {})
        if "hostPath" in volume:
            folder = Path(volume["hostPath"]["path"])
        elif name in pod.claims:
            folder = self.state / "claims" / pod.claims[name]
        else:
            folder = self.state / "volumes" / pod.name / name
        if not folder.exists():
            _new_volume(folder, pod.spec["securityContext"]["fsGroup"])
        if "configMap" in volume:
            for file, text in self.cluster.config_map(volume["configMap"]["name"]).items():
                (folder / file).write_text(text)
                (folder / file).chmod(0o644)
        if "secret" in volume:
            for file, content in self.cluster.secret(volume["secret"]["secretName"]).items():
                (folder / file).write_bytes(content)
                (folder / file).chmod(0o644)
        return bind(folder, mount["mountPath"], writable=not mount.get("readOnly", False))


def _write_commands(folder: Path) -> None:
    """The package's commands as an installer writes them, for the place of the environment in the
    image: those of this machine's environment name its own Python."""
    folder.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, entry in project["scripts"].items():
        module, _, function = entry.partition(":")
        call = f"from {module} import {function}\n\n{function}()\n"
        (folder / name).write_text(f"#!{ENVIRONMENT}/bin/python\n{call}")
        (folder / name).chmod(0o755)


def bind(source: Path, target: str, *, writable: bool = False) -> str:
    """Show ``source`` at ``target``."""
    place = f"$R{quote(target)}"
    lines = [f"mkdir -p {place}", f"mount --bind {quote(str(source))} {place}"]
    if not writable:
        lines.append(f"mount -o remount,bind,ro {place}")
    return "; ".join(lines)


def _system(etc: Path) -> list[str]:
    lines = ["mkdir $R/proc $R/dev; mount -t proc proc $R/proc"]
    lines.append("mount -t tmpfs -o mode=755 tmpfs $R/dev")
    lines.append("mkdir $R/dev/shm; mount -t tmpfs -o mode=1777 tmpfs $R/dev/shm")
    lines += [f"touch $R/dev/{name}; mount --bind /dev/{name} $R/dev/{name}" for name in DEVICES]
    lines.append("ln -s /proc/self/fd $R/dev/fd")
    lines.append(bind(Path("/usr"), "/usr"))
    for name in ("bin", "sbin", "lib", "lib64"):
        link = Path("/", name)
        if link.is_symlink():
            lines.append(f"ln -s {quote(os.readlink(link))} $R/{name}")
        elif link.exists():
            lines.append(bind(link, f"/{name}"))
    lines.append(f"cp -r {quote(str(etc))} $R/etc")
    lent = (Path("/etc", name) for name in LENT)
    return [*lines, *(bind(path, str(path)) for path in lent if path.exists())]


def _new_volume(folder: Path, group: int) -> None:
    """An empty volume as the kubelet hands it over: the pod's group may write."""
    folder.mkdir(parents=True)
    os.chown(folder, 0, group)
    folder.chmod(0o2770)


def _target(image: str) -> str:
    """``cometmq/lag:0.1.0`` → ``lag``."""
    return image.rpartition("/")[2].partition(":")[0].partition("@")[0]


def _readable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
