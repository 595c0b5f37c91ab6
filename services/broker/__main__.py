"""``python -m services.broker``: see ``--help`` for the options.

Signals and health come first; what takes time to import, and recovery, come after them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cometmq.rpc.process import StopSignal, run

if TYPE_CHECKING:
    from cometmq.member.app import MemberApp
    from cometmq.reexec import RoleChange


def load_app() -> type[MemberApp]:
    from services.broker.app import App

    return App


async def main(stop: StopSignal) -> RoleChange | None:
    from cometmq.member.main import live

    return await live(stop, load_app)


if __name__ == "__main__":
    sys.exit(run(main))
