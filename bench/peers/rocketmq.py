"""Apache RocketMQ: a name server, a broker, and a load program on its Java client (``Load.java``).

Heaps of 2 GiB and the collector of its start scripts. The broker's limits of what a pull may carry
are those that the tuned consumer is advised to have; the default consumer stays below them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import Popen

from bench.peers.peer import HOST, QUEUE_COUNT, PeerMissing, Served, daemon, first_line, free_port
from scripts.maven import JavaMissing, class_path

HERE = Path(__file__).parent
VERSION = "5.3.3"  # in pom.xml
JVM = ("java", "-server", "-XX:+UseG1GC", "-XX:-OmitStackTraceInFastThrow")
BROKER_JVM = ("-Xms2g", "-Xmx2g", "-XX:MaxDirectMemorySize=4g")
OTHER_JVM = ("-Xms512m", "-Xmx512m")
NAMESRV = "org.apache.rocketmq.namesrv.NamesrvStartup"
BROKER = "org.apache.rocketmq.broker.BrokerStartup"
ROCKSDB = ("--add-exports", "java.base/jdk.internal.ref=ALL-UNNAMED")


class Peer:
    """See :class:`bench.peers.peer.Peer`."""

    name = "rocketmq"
    batch_ways = ("batches of 1,024",)
    consume_ways = ("defaults", "tuned")
    warm_up_s = 60.0

    @contextmanager
    def serve(self, folder: Path, flush: str) -> Iterator[Served]:
        try:
            classes = class_path(self.name, HERE / "pom.xml", [HERE / "Load.java"])
        except JavaMissing as error:
            raise PeerMissing(f"apt-get install default-jdk-headless maven ({error})") from error
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        namesrv_port, broker_port = free_port(), free_port((-2, 0, 1))
        namesrv = f"{HOST}:{namesrv_port}"
        java = (*JVM, *ROCKSDB, f"-Duser.home={folder}", "-cp", classes)
        environment = {"ROCKETMQ_HOME": str(folder), "NAMESRV_ADDR": namesrv}
        for name, options in {
            "namesrv": {"listenPort": namesrv_port, "bindAddress": HOST},
            "broker": _broker_options(folder, namesrv, broker_port, flush),
        }.items():
            lines = (f"{option}={value}\n" for option, value in options.items())
            (folder / f"{name}.conf").write_text("".join(lines))

        def run(name: str, *command: str) -> AbstractContextManager[Popen[bytes]]:
            options = ["-c", str(folder / f"{name}.conf")]
            return daemon([*java, *command, *options], folder / f"{name}.txt", environment)

        with (
            run("namesrv", *OTHER_JVM, NAMESRV) as names,
            run("broker", *BROKER_JVM, BROKER) as broker,
        ):
            yield Served(
                {"broker": broker.pid, "namesrv": names.pid},
                [*java, *OTHER_JVM, "Load", namesrv],
                {self.name: VERSION, "java": first_line("java", "--version")},
            )


def _broker_options(folder: Path, namesrv: str, port: int, flush: str) -> dict[str, object]:
    return {
        "brokerClusterName": "bench",
        "brokerName": "bench",
        "brokerIP1": HOST,
        "bindAddress": HOST,
        "listenPort": port,
        "namesrvAddr": namesrv,
        "storePathRootDir": folder / "store",
        "storePathCommitLog": folder / "store" / "commitlog",
        "flushDiskType": f"{flush.upper()}_FLUSH",
        "defaultTopicQueueNums": QUEUE_COUNT,
        "maxTransferCountOnMessageInMemory": 1024,
        "maxTransferBytesOnMessageInMemory": 1024 * 1024,
    }
