"""The producer and consumer processes as the job sees them."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from signal import Signals

STOP_S_MAX = 30.0
LOG_TAIL_CHARACTERS = 2_000


class WorkerFailed(Exception):
    """A worker ended with an error; the text holds the end of its log."""


class Worker:
    """One child process. ``said`` holds the newest value of each field that it has said."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.said: dict[str, int] = {}
        self._process = process
        self._log = log
        self._listener = asyncio.create_task(self._listen())
        self._heard = asyncio.Condition()

    @classmethod
    async def start(
        cls, name: str, module: str, folder: Path, **options: str | int | Path
    ) -> Worker:
        """Runs ``python -m module --option value …``; what it writes to standard error goes to a
        log file.
        """
        flags = [text for option, value in options.items() for text in (f"--{option}", str(value))]
        log = folder / f"{name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *flags, stdout=PIPE, stderr=stderr
            )
        return cls(name, process, log)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.said.update(json.loads(line))
            async with self._heard:
                self._heard.notify_all()
        await self._process.wait()
        async with self._heard:
            self._heard.notify_all()

    async def wait_for(self, field: str, seconds_max: float) -> None:
        """Until the worker has said ``field``. Errors: WorkerFailed, TimeoutError."""
        async with asyncio.timeout(seconds_max), self._heard:
            await self._heard.wait_for(lambda: field in self.said or not self.running)
        self.check()
        if field not in self.said:
            raise WorkerFailed(f"{self.name} ended before it was {field}")

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def check(self) -> None:
        """Raises WorkerFailed when the process has ended with an error."""
        if self._process.returncode:
            tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            raise WorkerFailed(f"{self.name} ended with status {self._process.returncode}:\n{tail}")

    def signal(self, number: Signals) -> None:
        """Tells it something, if it still runs."""
        if self.running:
            self._process.send_signal(number)

    async def finish(self) -> None:
        """Until it has ended by itself. Errors: WorkerFailed, TimeoutError."""
        async with asyncio.timeout(STOP_S_MAX):
            await self._listener
        self.check()

    async def stop(self) -> None:
        """Asks it to end and waits. Errors: as :meth:`finish`."""
        self.signal(Signals.SIGTERM)
        await self.finish()

    async def kill(self) -> None:
        """Ends it whatever it does; for the way out after an error."""
        if self.running:
            self._process.kill()
        await self._listener
