"""A real broker process on a real file system: its power is cut, its disk fails."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from cometmq.errors import StoreFailed
from cometmq.rpc.interceptors import from_proto
from tests.support.cluster.broker import SYNC, BrokerProcess, SendLane, StreamEnded, batch
from tests.support.faults import tally
from tests.support.stores.loop_disk import KINDS, LoopDisk, loop_disk
from tests.support.waiting import until

# A machine that restarts has another boot id; here the file that tells it is covered by another,
# for the broker alone.
COVER = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


def on_a_machine_started(tmp_path: Path, times: int) -> tuple[str, ...]:
    """What to put before a command that is to see the boot id of start number ``times``."""
    boot_id = tmp_path / f"boot-{times}"
    boot_id.write_text(f"00000000-0000-4000-8000-{times:012}\n")
    return ("unshare", "--mount", "sh", "-c", COVER, str(boot_id))


class Sender:
    """Sends one small batch after the other; ``acknowledged`` are the first so many of ``sent``."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.acknowledged = 0

    async def send(self, lane: SendLane) -> None:
        """Until the broker is gone."""
        try:
            while True:
                body = b"%d " % len(self.sent) + bytes(500)
                self.sent.append(body)
                await lane.send(("T", 0, [body]))
                self.acknowledged = len(self.sent)
        except (StreamEnded, AssertionError, grpc.aio.AioRpcError):
            return


async def live_and_lose_power(
    process: BrokerProcess, disk: LoopDisk, sender: Sender, batches: int
) -> None:
    lane = await process.client.lane()
    sending = asyncio.create_task(sender.send(lane))
    wanted = sender.acknowledged + batches
    await until(lambda: sender.acknowledged >= wanted or sending.done())
    acknowledged = sender.acknowledged
    disk.shut_down()
    await process.kill()
    await asyncio.wait([sending])  # however its stream has ended
    sender.acknowledged = acknowledged  # nobody hears a machine that has no power


async def cut_power_of_a_broker(tmp_path: Path, rng: random.Random, kind: str, cuts: int) -> None:
    sender = Sender()
    with loop_disk(tmp_path, kind) as disk:
        process = BrokerProcess(
            tmp_path,
            *("--flush_disk_type", "SYNC_FLUSH"),
            store=disk.mount_point / "store",
            wrapper=on_a_machine_started(tmp_path, 0),
        )
        async with process:
            await process.client.put_topic("T", 1, SYNC)
            for cut in range(1, cuts + 1):
                await live_and_lose_power(process, disk, sender, rng.randint(1, 60))
                disk.restart()
                process.wrapper = on_a_machine_started(tmp_path, cut)
                await process.start()
                found = await process.client.bodies("T", 0)
                assert found == sender.sent[: len(found)]
                lost = max(0, sender.acknowledged - len(found))
                tally.count(f"power cuts of a real {kind} under a broker")
                tally.count("messages lost", lost)
                assert not lost, f"{lost} of {sender.acknowledged}"
                sender.sent, sender.acknowledged = found, len(found)


@pytest.mark.parametrize("kind", KINDS)
async def test_power_cut(tmp_path: Path, rng: random.Random, kind: str) -> None:
    await cut_power_of_a_broker(tmp_path, rng, kind, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
async def test_power_cuts(tmp_path: Path, rng: random.Random, kind: str) -> None:
    await cut_power_of_a_broker(tmp_path, rng, kind, 12)


async def test_a_disk_that_answers_eio(tmp_path: Path) -> None:
    """The kernel tells of a failed sync once; the second one would succeed. The broker asks once:
    it acknowledges nothing more, says why, and ends.
    """
    with loop_disk(tmp_path, "ext4") as disk:
        async with BrokerProcess(tmp_path, store=disk.mount_point / "store") as process:
            await process.client.put_topic("T", 1, SYNC)
            lane = await process.client.lane()
            await lane.send(("T", 0, [b"kept"]))
            with disk.failing():
                result = await lane.exchange(*batch(("T", 0, [b"lost"])))
                assert isinstance(from_proto(result.error), StoreFailed)
                assert await process.ended() == 1
            assert "STORE_FAILED" in process.output()
            assert "Traceback" not in process.output()
            disk.restart()
            await process.start()
            assert (await process.client.bodies("T", 0))[0] == b"kept"
