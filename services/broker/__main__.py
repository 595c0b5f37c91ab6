"""``python -m services.broker``: see ``--help`` for the options.

Signals and health come first; what takes time to import, and recovery, come after them.
"""

from __future__ import annotations

import sys

from cometmq.rpc.process import Main, StopSignal, run


async def main(stop: StopSignal) -> Main | None:
    from cometmq.member.main import live

    return await live("services.broker", None, stop)


if __name__ == "__main__":
    sys.exit(run(main))
