"""``python -m services.namesrv``: see ``--help`` for the options.

Signals and health come first; what takes time to import comes after them.
"""

from __future__ import annotations

import os
import sys

from cometmq.config import load
from cometmq.rpc.process import StopSignal, run, settle
from services.namesrv.config import NamesrvConfig


async def main(stop: StopSignal) -> None:
    config = load(NamesrvConfig, argv=sys.argv[1:], environ=os.environ)

    from services.namesrv.listen import new_server

    server = new_server(config)
    try:
        await server.start()

        from cometmq.telemetry import setup_logging
        from services.namesrv.app import App

        setup_logging(level=config.log_level, form=config.log_form)
        async with App(config, server):
            settle(config.trace_limit_ms)
            await stop.wait()
    finally:
        await server.stop(0)


if __name__ == "__main__":
    sys.exit(run(main))
