from __future__ import annotations

import pytest

from cometmq.errors import ConfigInvalid
from cometmq.member import listen
from cometmq.member.listen import rebound


class Port:
    """Another connection uses it for the first ``tries``."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    async def bind(self) -> str:
        self.tries -= 1
        if self.tries >= 0:
            raise ConfigInvalid("the port is taken")
        return "bound"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "REBIND_S", 0.0)


async def test_a_port_that_a_connection_uses_for_a_moment_is_waited_for() -> None:
    assert await rebound(Port(3).bind) == "bound"


async def test_a_port_that_stays_taken_is_an_error() -> None:
    port = Port(1000)
    with pytest.raises(ConfigInvalid):
        await rebound(port.bind)
    assert port.tries == 1000 - listen.REBIND_TRIES_MAX - 1
