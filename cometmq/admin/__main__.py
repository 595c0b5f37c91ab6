"""The ``cometmq`` command; its libraries are the optional extra ``cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the process ends with its exit code."""
    try:
        import click  # noqa: F401  only to see whether the extra is there
        import rich  # noqa: F401
    except ModuleNotFoundError as missing:
        sys.exit(f"the cometmq command needs {missing.name}: pip install 'cometmq[cli]'")
    from cometmq.admin.cli import main as command

    command()


if __name__ == "__main__":
    main()
